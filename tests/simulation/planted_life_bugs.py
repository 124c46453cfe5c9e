"""One planted bug per rule of a table's life: loads, transactions, compaction, checkpoints, collection, followers.

Every bug is the real code with a line or two changed, as small as the mistake it stands for. A line that is
no longer there is an error: then the bug must be planted anew.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import headgate.attempt as attempt
import headgate.checkpoint as checkpoint
import headgate.compact as compact
import headgate.consumer as consumer
import headgate.feed as feed
import headgate.life.gc as gc
import headgate.load as load
from headgate.flush import Generations
from headgate.manifest.model import ShardManifest
from headgate.transaction import Transactions
from headgate.writer import ShardWriter

Bug = Callable[[], AbstractContextManager[object]]
BUGS: dict[str, Bug] = {}


def changed(function: Any, *lines: tuple[str, str]) -> AbstractContextManager[object]:
    """The function with some text of its source replaced, for everybody who has it."""
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in lines:
        assert source.count(old) == 1, f"{function.__qualname__} has {old!r} {source.count(old)} times"
        source = source.replace(old, new)
    made: dict[str, Any] = {}
    exec(compile(source, f"<{function.__qualname__}, changed>", "exec"), function.__globals__, made)
    return _code_of(function, made[function.__name__].__code__)


@contextmanager
def _code_of(function: Any, code: Any) -> Iterator[None]:
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before


@contextmanager
def together(*changes: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield


def bug(make: Bug) -> Bug:
    BUGS[make.__name__] = make
    return make


# -- the place of a load


@bug
def tip_is_read_once_before_the_announcement() -> AbstractContextManager[object]:
    tips: dict[str, int] = {}
    return together(
        patch.object(load, "tips", tips, create=True),
        changed(
            load.announce, ("    def change(manifest", "    tips.setdefault(id, find_tip(log)[1].position)\n\n    def change(manifest")
        ),
        changed(load.place, ("tip = find_tip(log)[1].position", "tip = tips[id]")),
    )


@bug
def load_is_placed_below_the_cursor() -> AbstractContextManager[object]:
    return changed(load.place, ("max(tip, manifest.last_place())", "tip"))


@bug
def load_is_not_announced() -> AbstractContextManager[object]:
    """Its place is found and taken in one commit; nobody can see that it comes."""
    known: dict[str, Any] = {}
    return together(
        patch.object(load, "known", known, create=True),
        changed(
            load.announce, ("    def change(manifest", "    known[id] = load\n    return log.manifests.load()\n\n    def change(manifest")
        ),
        changed(load.place, ("load = manifest.announced[id]", "load = known[id]")),
        changed(load._check_announced, ("if id not in manifest.announced", "if id not in known")),
    )


@bug
def flush_across_a_load_is_one_run() -> AbstractContextManager[object]:
    return changed(Generations._with_run, ("raise _LoadInside(places)", "first = max(p for p in places if p < end)"))


@bug
def compaction_takes_what_is_past_the_cursor() -> AbstractContextManager[object]:
    return changed(compact.pick, ("if run.end <= cursor", "if run.end >= 0"))


# -- views


@bug
def view_has_a_load_and_not_the_entries_before_it() -> AbstractContextManager[object]:
    return changed(ShardWriter.view, ("if places and places[-1] > acknowledged + 1:", "if False:"))


@bug
def memtable_is_not_cut_at_a_load() -> AbstractContextManager[object]:
    return changed(ShardWriter.view, ("if any(part.spans(place) for part in fresh for place in (cursor, *places)):", "if False:"))


@bug
def tail_is_not_cut_at_a_load() -> AbstractContextManager[object]:
    from headgate.view import _Tail

    return changed(_Tail.views, ("[load.end for load in manifest.loads_past_cursor()]", "[]"))


# -- transactions


@bug
def intent_is_not_consulted() -> AbstractContextManager[object]:
    """Whoever has announced places: attempts mix."""
    old = "occupant = create_exactly(self.store, name, encode_document(mine), self.clock, self.policy)"
    return changed(Transactions.commit, (old, "occupant = None"))


@bug
def announcement_is_withdrawn_though_it_was_decided() -> AbstractContextManager[object]:
    old = "occupant = create_exactly(self.store, load.transaction, encode_document(abort), self.clock, self.policy)"
    return changed(Transactions.decide, (old, "occupant = None"))


@bug
def shards_without_rows_take_no_part() -> AbstractContextManager[object]:
    return changed(
        Transactions.commit,
        ("for shard in shards}", "for shard in runs}"),
        ("self._each(announce_one, shards)", "self._each(announce_one, list(runs))"),
    )


@bug
def aborted_intents_are_collected() -> AbstractContextManager[object]:
    return changed(gc.collect_intents, ('(intent.loads if intent.state == "committed" else marks)', "intent.loads"))


@bug
def intents_are_collected_before_they_are_carried_out() -> AbstractContextManager[object]:
    return changed(gc.collect_intents, ("if info.key in waited_for or not (is_done or is_over):", "if False:"))


# -- compaction


@bug
def run_is_dropped_before_the_commit_that_replaces_it() -> AbstractContextManager[object]:
    drop = "[columnar.drop(part.path) for run in inputs for part in run.slices if part not in made.slices]"
    old = "        log.manifests.commit(lambda manifest: replaced("
    return changed(compact._compact_once, (old, f"        {drop}\n{old}"))


@bug
def tombstones_are_dropped_above_the_base() -> AbstractContextManager[object]:
    return changed(compact.compact_shard, ("with_oldest = has_oldest(inputs, manifest)", "with_oldest = True"))


@bug
def compaction_does_not_check_that_its_inputs_are_there() -> AbstractContextManager[object]:
    old = 'raise CommitConflictError(f"shard {log.shard}: another compaction has merged these runs", hint="compact again")'
    return changed(compact.replaced, (old, "return manifest.but(runs=(*manifest.runs, made))"))


@bug
def files_are_written_without_an_attempt() -> AbstractContextManager[object]:
    return together(
        changed(attempt.register, ("log.manifests.commit(", "str(")),
        changed(attempt.check_registered, ("if id not in manifest.attempts:", "if False:")),
    )


# -- collection


@bug
def collection_goes_by_the_manifest_from_before_its_list() -> AbstractContextManager[object]:
    return changed(
        gc.collect_shard,
        ("    files = list(table_store.list(folder))", "    early = log.manifests.load()\n    files = list(table_store.list(folder))"),
        ("committed = log.manifests.commit(end_leases)", "committed = early"),
    )


@bug
def files_of_announced_loads_are_collected() -> AbstractContextManager[object]:
    return changed(gc.collect_shard, ("for announced in committed.announced.values():", "for announced in ():"))


@bug
def runs_that_checkpoints_need_are_collected() -> AbstractContextManager[object]:
    return changed(gc.collect_shard, ("pinned = _pinned_versions(log, committed)", "pinned = {}"))


@bug
def consumers_do_not_hold_the_log() -> AbstractContextManager[object]:
    return changed(ShardManifest.hold_position, ("holds += [hold.position for hold in self.consumers.values()]", "pass"))


@bug
def consumers_do_not_hold_loads() -> AbstractContextManager[object]:
    return changed(
        gc._without_passed_loads,
        ("min((consumer.load for consumer in manifest.consumers.values()), default=manifest.next_load)", "manifest.next_load"),
    )


@bug
def loads_are_let_go_though_the_log_before_them_is_not() -> AbstractContextManager[object]:
    return changed(
        gc._without_passed_loads, ("load.number <= passed and load.position <= floor", "load.position <= manifest.cursor.position")
    )


# -- checkpoints


@bug
def checkpoint_ends_before_the_load_it_shows() -> AbstractContextManager[object]:
    return changed(checkpoint.with_checkpoint, ("end=max(end, manifest.last_place())", "end=end"))


@bug
def checkpoint_of_all_leaves_a_gap_below_a_load() -> AbstractContextManager[object]:
    return changed(ShardWriter._checkpoint_flushed, ("if manifest.loads_past_cursor():", "if False:"))


# -- followers


@bug
def feed_does_not_wait_for_announced_loads() -> AbstractContextManager[object]:
    return changed(feed.settled, ("place if manifest.announced else max(tip, place)", "max(tip, place)"))


@bug
def feed_passes_a_load_before_the_entries_below_it() -> AbstractContextManager[object]:
    return changed(feed.settled, ("place if manifest.announced else max(tip, place)", "tip"))


@bug
def offset_moves_beyond_a_load_that_was_not_given() -> AbstractContextManager[object]:
    old = "yield from _load(shard, form, load, at, batch_rows)"
    return changed(feed.read, (old, f"if load.position > begin.position or not begin.position:\n                {old}"))


@bug
def follower_goes_on_where_it_was_before_its_snapshot_was_pinned() -> AbstractContextManager[object]:
    return changed(
        consumer.claim,
        ("    start = Start(Offset())\n", "    start = Start(Offset())\n    early = begin(log, log.manifests.load(), tip, where)\n"),
        ("offset, is_snapshot = begin(log, manifest, tip, where)", "offset, is_snapshot = early"),
    )
