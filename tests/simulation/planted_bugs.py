"""One planted bug per rule of the protocol: each takes a rule away, and the simulation must notice.

Every bug is a patch of the real code, as small as the mistake it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import headgate.simulation.run as run
import headgate.wal.ack as ack
import headgate.wal.appender as appender
import headgate.wal.collect as collect
import headgate.wal.entry as entry_module
import headgate.wal.fence as fence
import headgate.wal.loss as loss
import headgate.wal.marker as marker
import headgate.wal.pipeline as pipeline
import headgate.writer as writer_module
from headgate.errors import FencedError, HeadgateError, ObjectExistsError, ObjectMissingError, StoreUnavailableError
from headgate.manifest import chain as chain_module
from headgate.manifest.document import encode_document
from headgate.manifest.model import ChainPoint, ShardManifest
from headgate.store.exact import create_exactly

Bug = Callable[[], AbstractContextManager[object]]
BUGS: dict[str, Bug] = {}


def bug(make: Bug) -> Bug:
    BUGS[make.__name__] = make
    return make


# -- fence


@bug
def verify_is_skipped():
    return patch.object(fence, "verify_change", lambda log, manifest, epoch, walk, *, resume: None)


@bug
def verify_without_a_commit():
    def check_only(log, manifest, epoch, walk, *, resume):
        fence.check_epoch(log, manifest, epoch)

    return patch.object(fence, "verify_change", check_only)


@bug
def verify_does_not_check_the_epoch():
    """Nor the cursor, which in a log that is trimmed tells the same story."""
    original = fence.verify_change

    def unchecked(log, manifest, epoch, walk, *, resume):
        walk.ends = {e: p for e, p in walk.ends.items() if manifest.ends().end_of(e) in (None, p)}
        with patch.object(ShardManifest, "contradicts", lambda self, ends: False):
            return original(log, manifest, manifest.epoch, walk, resume=resume)

    return patch.object(fence, "verify_change", unchecked)


@bug
def verify_does_not_look_at_the_cursor():
    """Trimmed and collected under the walk: what looked like the tip was not."""
    original = fence.verify_change

    def blind(log, manifest, epoch, walk, *, resume):
        with patch.object(ShardManifest, "contradicts", lambda self, ends: False):
            return original(log, manifest, epoch, walk, resume=resume)

    return patch.object(fence, "verify_change", blind)


@bug
def only_own_seals_are_checked_against_the_cursor():
    """The seal of another slow claimant, met on the walk, leads astray as well as one's own."""
    original, put = fence.verify_change, fence.put_seal
    own: set[tuple[int, int]] = set()

    def noting(log, space, at, **rest):
        occupant = put(log, space, at, **rest)
        if occupant is None:
            own.add((rest["by_epoch"], at.epoch))
        return occupant

    def partly(log, manifest, epoch, walk, *, resume):
        check = ShardManifest.contradicts

        def mine(self, ends):
            return check(self, {e: p for e, p in ends.items() if (epoch, e) in own})

        with patch.object(ShardManifest, "contradicts", mine):
            return original(log, manifest, epoch, walk, resume=resume)

    return _both(patch.object(fence, "verify_change", partly), patch.object(fence, "put_seal", noting))


@bug
def predecessor_is_not_sealed():
    def no_seal(log, space, at, *, by_epoch, durable_through, writer_id):
        return None

    return patch.object(fence, "put_seal", no_seal)


@bug
def entry_found_instead_of_the_seal_is_ignored():
    original = fence.put_seal

    def careless(*args, **kwargs):
        original(*args, **kwargs)

    return patch.object(fence, "put_seal", careless)


@bug
def claim_from_a_stale_manifest():
    original = fence.claim_change

    def stale(log, manifest, survey, writer_id, **rest):
        changed = original(log, manifest, survey, writer_id, **rest)
        return changed and changed.but(epoch=max(1, survey.manifest.epoch + 1))

    return patch.object(fence, "claim_change", stale)


@bug
def cursor_stops_on_a_seal():
    """Past a seal the next epoch goes on; a cursor in the old one leads nowhere."""

    def on_the_seal(point, segments):
        while segments.end_of(point.epoch) == point.position:
            return point.past_data()
        return point

    return patch.multiple(fence, over_seals=on_the_seal)


@bug
def walk_takes_a_hole_for_the_tip():
    return patch.object(fence, "evidence_of_loss", lambda space, manifest, missing: None)


# -- append and acknowledge


@bug
def acknowledged_before_durable():
    original = pipeline.Pipeline._fly

    def eager(self, flight):
        with self.lock:
            flight.landed = True
            self._acknowledge(flight)
        for decided in flight.decided:
            for item in decided.items:
                item.ack._wake()
        original(self, flight)

    return patch.object(pipeline.Pipeline, "_fly", eager)


@bug
def acknowledged_out_of_order():
    def any_order(self, landed):
        if self._failure is None:
            for flight in [f for f in self._flights if f.landed]:
                self._flights = tuple(other for other in self._flights if other is not flight)
                self._acked = max(self._acked, flight.position)
                self._room.unacknowledged_bytes -= flight.size
                self._room.flying_bytes -= flight.size
                self._puts += len(flight.items)
                if self._on_acknowledged is not None:
                    self._on_acknowledged(flight.position, [item.put for item in flight.items], flight.size)
                for item in flight.items:
                    item.ack._decide((self._shard, self._writer.epoch, flight.position))
                landed.decided.append(flight)
            self._room.tell()
            self._work.notify_all()
            self._settled.notify_all()

    return patch.object(pipeline.Pipeline, "_acknowledge", any_order)


@bug
def seal_taken_for_success():
    def accepting(self, position, body):
        key = self.claim.space.key(self.claim.epoch, position)
        create_exactly(self.claim.space.store, key, body, self.log.clock, self._policy)

    return patch.object(appender.EpochWriter, "persist", accepting)


@bug
def failed_entry_is_skipped():
    """Instead of poisoning, go on with the next position: it lies past a hole."""
    original = pipeline.Pipeline._fly

    def carefree(self, flight):
        try:
            original(self, flight)
        except StoreUnavailableError as error:
            with self.lock:
                failed = list(flight.items)
                for item in failed:
                    item.ack._decide(None, error)
                self._puts += len(failed)
                flight.items.clear()
                flight.landed = True
                self._acknowledge(flight)
                for condition in (self._work, self._room._freed, self._settled):
                    condition.notify_all()
            for item in [*failed, *(item for decided in flight.decided for item in decided.items)]:
                item.ack._wake()

    return patch.object(pipeline.Pipeline, "_fly", carefree)


@bug
def retry_goes_to_a_new_position():
    """A retry that is batched anew instead of sending the same bytes to the same name."""

    def rebatching(self, position, body):
        space = self.claim.space
        for _ in range(4):
            try:
                space.store.create(space.key(self.claim.epoch, position), body)
                return
            except ObjectExistsError as error:
                raise FencedError("taken", shard=space.shard, epoch=self.claim.epoch, position=position) from error
            except StoreUnavailableError:
                body = self.again(position)

    original_encode = appender.EpochWriter.encode

    def remembering(self, position, durable_through, schema, puts, size_bytes=0):
        body = original_encode(self, position, durable_through, schema, puts, size_bytes)
        self.again = lambda at: original_encode(self, at, durable_through, schema, puts, size_bytes)
        return body

    return patch.multiple(appender.EpochWriter, encode=remembering, persist=rebatching)


@bug
def own_bytes_after_a_lost_reply_are_not_recognised():
    """A lost reply taken for a fence: the put is reported void and is in the log."""

    def mistrusting(store, key, body, clock, policy):
        for _ in range(policy.retries + 1):
            try:
                store.create(key, body)
                return None
            except ObjectExistsError:
                return entry_module.encode_seal(
                    entry_module.Header("wal0", "0000", int(key.split("/")[3]), int(key.split("/")[4][:20]), "seal", "x", "y", -1, 0.0)
                )
            except StoreUnavailableError:
                clock.sleep(0.01)
        raise StoreUnavailableError("no answer", object=key)

    return patch.object(appender, "create_exactly", mistrusting)


@bug
def durable_through_is_the_highest_known():
    """What landed past a gap is not durable yet: counting it makes a healthy log look damaged."""
    fly, encode = pipeline.Pipeline._fly, appender.EpochWriter.encode

    def telling(self, flight):
        self._writer.flights = self._flights
        fly(self, flight)

    def boasting(self, position, durable_through, schema, puts, size_bytes=0):
        landed = [f.position for f in getattr(self, "flights", ()) if f.landed]
        return encode(self, position, max([durable_through, *landed]), schema, puts, size_bytes)

    return _both(patch.object(pipeline.Pipeline, "_fly", telling), patch.object(appender.EpochWriter, "encode", boasting))


@bug
def last_seen_counts_what_is_in_flight():
    # Nothing is patched for the time of the call: two writers record at once, and the last to end would leave the bug behind.
    def generous(self, *, clean):
        with self._pipeline.lock:
            seen, marks = ChainPoint(self.epoch, self._pipeline._next), dict(self._admission.marks)
        wal_only = self._generations is None
        self._writer.commit_progress(seen, marks, resume=wal_only, clean=clean, retention_seconds=1e9)
        self._recorded = seen.position

    return patch.object(writer_module.ShardWriter, "_record", generous)


# -- manifests


@bug
def latest_manifest_by_probing():
    def probing(self):
        version = self._latest.version if self._latest is not None else None
        if version is None:
            return chain_original(self)
        while True:
            try:
                self._store.head(self.key(version + 1))
            except ObjectMissingError:
                return version
            version += 1

    chain_original = chain_module.ManifestChain._highest_version
    return patch.object(chain_module.ManifestChain, "_highest_version", probing)


@bug
def reply_of_a_manifest_create_is_trusted():
    def trusting(self, proposal):
        occupant = create_exactly(self._store, self.key(proposal.version), encode_document(proposal), self._clock, self._policy)
        return occupant is None

    return patch.object(chain_module.ManifestChain, "_create", trusting)


# -- collection


@bug
def seals_are_collected():
    return patch.object(collect, "SEAL_BYTES", 0)


@bug
def collected_above_the_cursor():
    return patch.object(ShardManifest, "hold_position", lambda self: self.cursor.position + 2)


@bug
def past_a_seal_is_void():
    """Deleting what lies past the first seal of an epoch's folder: an epoch may hold several."""
    original = collect.collect_entries

    def sweeping(log, *, dry_run, sweep=False):
        manifest = log.manifests.load()
        seals: dict[int, int] = {}
        for point, info in log.space(manifest).list_from(0):
            if info.size_bytes == entry_module.SEAL_BYTES:
                seals.setdefault(point.epoch, point.position)
        dead = [
            info.key
            for point, info in log.space(manifest).list_from(0)
            if info.size_bytes > entry_module.SEAL_BYTES and point.position > seals.get(point.epoch, 1 << 62)
        ]
        if dead:
            log.wal_store.delete(dead)
        return original(log, dry_run=dry_run, sweep=sweep)

    return patch("headgate.simulation.actors.collect_entries", sweeping)


@bug
def trim_forgets_the_producers():
    original = collect._walk_to

    def forgetful(log, manifest, position):
        point, ends, _ = original(log, manifest, position)
        return point, ends, {}

    return patch.object(collect, "_walk_to", forgetful)


@bug
def trim_forgets_the_ends_of_epochs():
    original = collect._walk_to

    def forgetful(log, manifest, position):
        point, _, producers = original(log, manifest, position)
        return point, {}, producers

    return patch.object(collect, "_walk_to", forgetful)


# -- WAL store, producers, names


@bug
def seals_are_forgotten_after_a_wipe():
    return patch.object(marker, "_put_seal_back", lambda *args: None)


@bug
def tables_share_names():
    @contextmanager
    def sharing() -> Iterator[None]:
        with (
            patch.object(run, "other_wal_id", lambda: "wal0"),
            patch.object(fence, "check_marker", lambda log, manifest: True),
            patch("headgate.life.verify.check_marker", lambda log, manifest: True),
        ):
            yield

    return sharing()


@bug
def replayed_producers_are_forgotten():
    original = writer_module.ShardWriter.__init__

    def forgetful(self, log, rules, config):
        original(self, log, rules, config)
        self._admission._known.clear()

    return patch.object(writer_module.ShardWriter, "__init__", forgetful)


@bug
def a_waiter_who_was_woken_wakes_nobody():
    """Nor does the slot look in."""
    original = ack.Relay.wake

    def first_only(self, acks):
        with patch.object(ack.Relay, "pass_on", ack_pass_on):
            original(self, acks)

    ack_pass_on = ack.Relay.pass_on
    return _both(
        _both(patch.object(ack.Relay, "wake", first_only), patch.object(ack.Relay, "pass_on", lambda self: None)),
        patch.object(ack.Relay, "rush", lambda self: None),
    )


@bug
def resume_runs_ahead_of_the_acknowledged():
    original = appender.EpochWriter.commit_progress

    def hasty(self, acknowledged, producers, *, resume, clean, retention_seconds):
        ahead = ChainPoint(acknowledged.epoch, acknowledged.position + 1)
        return original(self, ahead, producers, resume=resume, clean=clean, retention_seconds=retention_seconds)

    return patch.object(appender.EpochWriter, "commit_progress", hasty)


@bug
def a_cut_entry_is_skipped():
    original = fence.ChainReader.fetch

    def lenient(self, point):
        try:
            return original(self, point)
        except HeadgateError as error:
            if isinstance(error, StoreUnavailableError):
                raise
            return None

    return _both(patch.object(fence.ChainReader, "fetch", lenient), patch.object(loss, "_newest_later", lambda space, missing: []))


@contextmanager
def _both(*patches: AbstractContextManager[object]) -> Iterator[None]:
    with patches[0], patches[1]:
        yield
