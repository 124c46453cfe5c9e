"""One planted bug per rule of splits and clones.

As for a table's life: the real code with a line or two changed, as small as the mistake each stands for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import headgate.heirs as heirs
import headgate.life.clone as clone
import headgate.life.drop as drop
import headgate.life.split as split
import headgate.load as load
import headgate.view as view
import headgate.wal.fence as fence
from headgate.table_writer import TableWriter
from headgate.transaction import Transactions
from tests.simulation.planted_life_bugs import Bug, changed, together

BUGS: dict[str, Bug] = {}


def bug(make: Bug) -> Bug:
    BUGS[make.__name__] = make
    return make


_PIN = "pinned = origin.pin(existing, parent, target.table.uri)"


# -- clones


_PIN_ONE = "pinned.append((log.manifests.commit(add).checkpoints[id], log))"
_READ_ONE = (
    "found = log.manifests.load()\n"
    "        add(found)\n"
    "        pinned.append((found.checkpoints.get(parent.checkpoint) or found.checkpoints[id], log))"
)


@bug
def clone_pins_after_it_has_copied() -> AbstractContextManager[object]:
    """And does not see that its checkpoint went meanwhile."""
    late = "[log.manifests.commit(lambda m, r=r: m.but(checkpoints={**m.checkpoints, pin_id(existing.table_id): r})) for r, log in pinned]"
    return together(
        changed(clone._Origin.pin, (_PIN_ONE, _READ_ONE)),
        changed(
            clone.clone_table,
            (
                '        failpoint("clone.shards")\n',
                '        failpoint("clone.shards")\n'
                "        pinned = [(r.but(clone=target.table.uri, expires_at=None, name=None), log) for r, log in pinned]\n"
                f"        {late}\n",
            ),
        ),
    )


@bug
def clone_has_no_pin() -> AbstractContextManager[object]:
    return changed(clone._Origin.pin, (_PIN_ONE, _READ_ONE))


@bug
def pin_of_a_clone_ends_with_the_lease_of_its_checkpoint() -> AbstractContextManager[object]:
    return changed(clone._Origin.pin, ("record.but(clone=uri, expires_at=None, name=None)", "record.but(clone=uri, name=None)"))


@bug
def clone_lets_go_of_the_log_before_it_has_copied() -> AbstractContextManager[object]:
    return changed(clone.clone_table, (_PIN, f"{_PIN}\n        origin.release(existing, parent)"))


@bug
def clone_leaves_the_ends_of_epochs_open() -> AbstractContextManager[object]:
    """What it copies has gaps where seals were."""
    return changed(clone._clone_shard, ("first = first.but(segments=first.ends().adding(ends).rows)", "pass"))


@bug
def clone_copies_one_entry_too_few() -> AbstractContextManager[object]:
    return changed(clone._walk, ("while point.position < end:", "while point.position < end - 1:"))


@bug
def clone_is_of_now_and_not_of_its_checkpoint() -> AbstractContextManager[object]:
    return changed(clone._clone_shard, ("log.manifests.at(record.version)", "log.manifests.load()"))


@bug
def clone_of_now_has_half_of_a_load() -> AbstractContextManager[object]:
    old = "if not Transactions(self.places.table_store(), clock, self.log).finish_those_between(pinned):"
    return changed(clone._Origin.take, (old, "if True:"))


@bug
def checkpoint_does_not_see_what_came_between_its_pins() -> AbstractContextManager[object]:
    old = "bool(intents) or any(self._was_too_early(manifest, manifests) for manifest in manifests)"
    return changed(Transactions.finish_those_between, (old, "bool(intents)"))


@bug
def detached_before_its_rows_are_copied() -> AbstractContextManager[object]:
    return changed(
        clone.detach_table,
        (
            "    columnar = places.columnar()\n",
            "    columnar = places.columnar()\n    drop_pins(places, manifest.table_id, manifest.parent) if manifest.parent else None\n",
        ),
    )


@bug
def checkpoints_of_a_clone_do_not_hold_its_parent() -> AbstractContextManager[object]:
    return changed(clone.held_manifests, ("for id, record in latest.checkpoints.items():", "for id, record in ():"))


@bug
def drop_of_a_clone_deletes_what_it_names() -> AbstractContextManager[object]:
    old = '    failpoint("drop.fenced")\n'
    parts = "(part for state in last_of.values() for run in state.runs for part in run.slices if part.uri)"
    new = f"    for part in {parts}:\n        Places(places.table.beside(part.uri), None, places.clock).columnar().drop(part.path)\n"
    return changed(drop.drop, (old, new))


# -- splits


@bug
def split_is_told_to_the_table_alone() -> AbstractContextManager[object]:
    return changed(split.split_shard, ("retired = _retire(places, log, state, split_id, epoch)", 'retired = state.but(state="retired")'))


@bug
def claim_of_a_split_does_not_say_so() -> AbstractContextManager[object]:
    """Two commits: between them a writer may claim the shard, and be fenced by nobody."""
    late = 'm.but(state="splitting", split=_begun(log, m, split_id, ranges), splits_begun=m.splits_begun + 1)'
    return together(
        changed(
            split.split_shard,
            ("lambda m: _begun(log, m, split_id, ranges))", "lambda m: None)"),
            ("        # 3. Pin", f"        log.manifests.commit(lambda m: {late})\n        # 3. Pin"),
        ),
        changed(split._check_mine, ("check_epoch(log, manifest, epoch)", "pass")),
        changed(split._pinned, ('assert manifest.cursor.epoch == epoch, "flushed: the cursor is past all that others wrote"', "pass")),
        changed(split._retired, ('assert manifest.cursor.position == known.cursor.position, "nobody else writes"', "pass")),
    )


@bug
def shard_that_is_split_is_claimed() -> AbstractContextManager[object]:
    """By writers that do not wait for the lease; and the splitter does not look whose it is in the end."""
    return together(
        changed(fence.check_open, ('manifest.state == "active" or', 'manifest.state in ("active", "splitting") or')),
        *_not_looked_at(),
    )


@bug
def splitter_does_not_see_that_its_split_was_taken_back() -> AbstractContextManager[object]:
    return together(*_not_looked_at())


def _not_looked_at() -> list[AbstractContextManager[object]]:
    return [
        changed(
            split._check_mine,
            ("check_epoch(log, manifest, epoch)", "pass"),
            ('if manifest.state != "splitting" or split is None or split.id != split_id:', "if False:"),
        ),
        changed(
            split._pinned, ("    now, position =", '    if split is None:\n        raise CommitConflictError("gone")\n    now, position =')
        ),
        changed(
            split._retired,
            ('assert manifest.cursor.position == known.cursor.position, "nobody else writes"', "split = known.split"),
        ),
    ]


@bug
def shard_is_not_flushed_before_it_is_split() -> AbstractContextManager[object]:
    return together(
        changed(split.split_shard, ("        writer.flush()\n", "        pass\n")),
        changed(split._pinned, ('assert manifest.cursor.epoch == epoch, "flushed: the cursor is past all that others wrote"', "pass")),
    )


@bug
def range_is_forgotten_in_one_part() -> AbstractContextManager[object]:
    return changed(split._make, ("run.but(keep=child.range)", "run.but(keep=child.range if child.range.low else None)"))


@bug
def parts_do_not_hold_the_runs_of_the_whole() -> AbstractContextManager[object]:
    return changed(split._pinned, ("checkpoints={**manifest.checkpoints, **pins}", "checkpoints=manifest.checkpoints"))


@bug
def parts_are_let_go_before_they_are_rewritten() -> AbstractContextManager[object]:
    return changed(
        split.let_parts_go,
        (
            "if all(piece.path.startswith(own) or piece.uri is not None for s in states for run in s.runs for piece in run.slices):",
            "if True:",
        ),
    )


@bug
def parts_of_every_try_have_the_same_names() -> AbstractContextManager[object]:
    return together(
        changed(split._begun, ("first = _PARTS * manifest.splits_begun", "first = 0")),
        changed(split._make, ('raise CommitConflictError(f"there is a shard {child.shard} already", hint="split it again")', "return")),
    )


@bug
def load_is_announced_in_a_shard_that_is_split() -> AbstractContextManager[object]:
    return changed(load.announce, ('if manifest.state != "active":', "if False:"))


@bug
def split_does_not_wait_for_loads() -> AbstractContextManager[object]:
    return together(
        changed(split.split_shard, ("    _wait_for_loads(log, transactions)\n", "")),
        changed(split._begun, ("if manifest.announced:", "if False:")),
    )


# -- those who write and read what is split


@bug
def fenced_writer_sends_everything_again() -> AbstractContextManager[object]:
    return changed(TableWriter._send_again, ("place = sent.durable_at(ends)", "place = None"))


@bug
def fenced_writer_takes_everything_it_sent_for_durable() -> AbstractContextManager[object]:
    return changed(heirs.Sent.durable_at, ("if fence.position < end else None", ""))


@bug
def heir_lets_newer_rows_through_first() -> AbstractContextManager[object]:
    """What was fenced is sent again one put at a time, the last one first."""
    return changed(TableWriter._send_again, ("in self._outbox.fenced(shard):", "in self._outbox.fenced(shard)[::-1]:"))


@bug
def reader_goes_on_with_a_shard_that_was_split() -> AbstractContextManager[object]:
    return changed(view._check_alive, ('if manifest.state == "retired":', "if False:"))


@bug
def producers_are_not_handed_on() -> AbstractContextManager[object]:
    """What a producer repeats after the split is there twice."""
    return changed(split._make, ("        shard=child.shard,\n", "        shard=child.shard,\n        producers={},\n"))
