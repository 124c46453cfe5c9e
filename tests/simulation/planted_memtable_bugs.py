"""One planted bug per rule of MemTable mode: flush, cursor, view, replay, and the merged read.

Every bug is a patch of the real code, as small as the mistake it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pyarrow as pa

import headgate.flush as flush
import headgate.keys as keys
import headgate.life.gc as gc
import headgate.query.scan as scan
import headgate.query.sources as sources
import headgate.view as view
import headgate.wal.fence as fence
from headgate.columnar.arrow import ArrowColumnar
from headgate.failpoint import failpoint
from headgate.flush import Generations
from headgate.manifest.model import FIRST_POINT, ChainPoint, ShardManifest, SliceRecord
from headgate.memtable import MemTable
from headgate.query.sources import sources_of
from headgate.view import ReadView, ShardReader
from headgate.writer import ShardWriter

Bug = Callable[[], AbstractContextManager[object]]
BUGS: dict[str, Bug] = {}


def bug(make: Bug) -> Bug:
    BUGS[make.__name__] = make
    return make


# -- flush and cursor


@bug
def second_frozen_is_flushed_first():
    original = Generations._flush_until_done

    def impatient(self, memtable):
        if self._pipeline is not None and len(self._tables) > 2:
            first, second, *others = self._tables
            self._tables = (second, first, *others)
        original(self, self._tables[0])

    return patch.object(Generations, "_flush_until_done", impatient)


@bug
def cursor_is_one_past():
    def past(changed):
        return changed.but(cursor=changed.cursor.past_data())

    return _committed_as(lambda manifest, changed: past(changed))


@bug
def cursor_is_one_short():
    def short(changed):
        if changed.cursor.position == 0 or changed.runs[-1].first >= changed.cursor.position:
            return changed
        run = changed.runs[-1]
        at = max(run.first, run.end - 1)
        return changed.but(runs=(*changed.runs[:-1], run.but(end=at)), cursor=ChainPoint(changed.cursor.epoch, at))

    return _committed_as(lambda manifest, changed: short(changed))


@bug
def cursor_is_committed_before_the_run_is_there():
    """The file is closed after the commit that names it."""
    create, flush_once = ArrowColumnar.write, Generations._flush_once
    unwritten: list[Callable[[], object]] = []

    def later(self, path, schema, batches):
        rows = list(batches)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema) as writer:
            for batch in rows:
                writer.write_batch(batch)
        unwritten.append(lambda: create(self, path, schema, iter(rows)))
        return SliceRecord(path=path, rows=sum(batch.num_rows for batch in rows), bytes=sink.getvalue().size)

    def and_then_write(self, memtable):
        flush_once(self, memtable)
        while unwritten:
            unwritten.pop()()

    return _both(patch.object(ArrowColumnar, "write", later), patch.object(Generations, "_flush_once", and_then_write))


@bug
def frozen_is_dropped_before_the_commit():
    original = Generations._flush_until_done

    def tidy(self, memtable):
        if self._pipeline is None:
            return original(self, memtable)
        self._tables = self._tables[1:]
        try:
            return original(self, memtable)
        finally:
            self._tables = (memtable, *self._tables)

    return patch.object(Generations, "_flush_until_done", tidy)


@bug
def flush_of_a_fenced_writer_commits():
    return patch.object(flush, "check_epoch", lambda log, manifest, epoch: None)


@bug
def flush_forgets_the_producers():
    return _committed_as(lambda manifest, changed: changed.but(producers=manifest.producers))


@bug
def generation_is_committed_twice_after_an_unknown_outcome():
    original = Generations._with_run

    def again(self, manifest, memtable, record, generation, producers):
        if manifest.cursor.position >= memtable.end.position:
            return manifest.but(runs=(*manifest.runs, record), next_generation=manifest.next_generation + 1)
        return original(self, manifest, memtable, record, manifest.next_generation, producers)

    return patch.object(Generations, "_with_run", again)


@bug
def dedup_keeps_the_oldest():
    return patch.object(flush, "newest_rows", lambda puts, rules: keys.newest_rows(list(reversed(puts)), rules))


@bug
def tombstones_are_dropped_at_flush():
    def without(puts, rules):
        merged = keys.newest_rows(puts, rules)
        if merged.deleted is None:
            return merged
        return keys.RunRows(merged.rows.filter(pa.array(~merged.deleted)))

    return patch.object(flush, "newest_rows", without)


# -- replay


@bug
def replay_starts_at_resume():
    original = ShardManifest.walk_from
    return patch.object(ShardManifest, "walk_from", lambda self, *, replay: original(self, replay=False))


@bug
def what_was_flushed_between_survey_and_claim_is_replayed():
    walk, begin = fence.seal_walk, Generations.begin

    def anew(log, claimed, survey, replay, writer_id):
        start = claimed.walk_from(replay=replay is not None)
        if replay is not None:
            for entry in survey.kept:
                if entry.position < start.position:
                    replay(entry)
        return walk(log, claimed, survey, replay, writer_id)

    def unsuspecting(self, claimed, walked):
        begin(self, claimed, walked)
        _end_at(self.active, FIRST_POINT)

    return _both(patch.object(fence, "seal_walk", anew), patch.object(Generations, "begin", unsuspecting))


@bug
def entries_replayed_twice():
    """Those that the survey kept, and again by the walk."""
    walk, append = fence.seal_walk, MemTable.append

    def twice(log, claimed, survey, replay, writer_id):
        survey.kept_through = survey.kept_through if replay is None else claimed.cursor
        return walk(log, claimed, survey, replay, writer_id)

    def trusting(self, epoch, position, puts, size_bytes, now):
        if position < self.end.position:
            _end_at(self, ChainPoint(epoch, position))
        append(self, epoch, position, puts, size_bytes, now)

    return _both(patch.object(fence, "seal_walk", twice), patch.object(MemTable, "append", trusting))


# -- views


def _view(self, freshness, *, manifest_first=False, pending_always=False):
    """The writer's view, as it would be without its care."""
    manifest = self._log.manifests.load()
    if manifest_first:
        failpoint("view.memory")
    generations = self._generations
    with generations.lock:
        if self._pipeline.failure is not None:
            raise self._pipeline.failure
        fresh = generations.views()
        pending = tuple(self._pipeline.pending()) if freshness == "memory" or pending_always else ()
    if not manifest_first:
        failpoint("view.memory")
        manifest = self._log.manifests.load()
    fence.check_epoch(self._log, manifest, self.epoch)
    runs = self._runs.open(manifest.runs)
    fresh = tuple(part for part in fresh if part.count and part.memtable.end.position > manifest.cursor.position)
    return ReadView(self.shard, self.rules, runs, fresh, pending, cache=self._runs, version=manifest.version)


@bug
def view_takes_the_manifest_before_the_memtables():
    return patch.object(ShardWriter, "view", lambda self, freshness="durable": _view(self, freshness, manifest_first=True))


@bug
def pending_puts_that_were_flushed_meanwhile_count_as_newest():
    return patch.object(ShardWriter, "view", lambda self, freshness="durable": _view(self, freshness))


@bug
def durable_reads_show_what_is_pending():
    return patch.object(ShardWriter, "view", lambda self, freshness="durable": _view(self, freshness, pending_always=True))


@bug
def missing_entry_is_taken_for_the_tip():
    """Without a look at the manifest afterwards."""
    original = ShardReader._extend

    def trusting(self, tail, manifest):
        log = self._log
        self._log = SimpleNamespace(manifests=SimpleNamespace(load=lambda: manifest), space=log.space, clock=log.clock, shard=log.shard)
        try:
            return original(self, tail, manifest)
        finally:
            self._log = log

    return _both(
        patch.object(ShardReader, "_extend", trusting), patch.object(view, "evidence_of_loss", lambda space, manifest, missing: None)
    )


@bug
def tail_is_not_cut_at_the_cursor():
    """What was flushed since the last poll is in runs, and still in the tail."""
    return patch.object(view._Tail, "drop_before", lambda self, cursor: None)


@bug
def collected_above_the_cursor():
    return patch.object(ShardManifest, "hold_position", lambda self: self.cursor.position + 2)


@bug
def flushes_under_way_are_collected():
    """What no manifest names may be about to be named."""
    return patch.object(gc, "_still_written", lambda attempt, manifest: None)


# -- the merged read


@bug
def filter_comes_before_the_newest():
    """Of the rows that match, the newest; the newest of all may not match, or be a tombstone."""
    original = scan.Scan._rows

    def careless(self, views, columns=None):
        if self._filter is None or not self._rules.key:
            return original(self, views, columns)
        newest = {}
        for source in [source for one in views for source in sources_of(one)]:
            for rows in source.scan(self._rules.schema.names):
                newest |= {row["id"]: row for row in rows.take(pa.array(self._filter.matching(rows))).to_pylist()}
        found = pa.RecordBatch.from_pylist(list(newest.values()), schema=self._rules.schema)
        return scan.limited(iter([found]), self._limit)

    return patch.object(scan.Scan, "_rows", careless)


@bug
def limit_comes_before_the_shadow():
    def cut(source, limit):
        return SimpleNamespace(
            mask=source.mask, matching=lambda filter, columns: None, scan=lambda columns: scan.limited(source.scan(columns), limit)
        )

    def careless(self, views, columns=None):
        wanted = self.columns if columns is None else columns
        cuts = (cut(source, self._limit) for source in scan.all_sources(views, self._rules))
        return scan.limited((rows for source in cuts for rows in scan.visible_rows(source, wanted, self._filter)), self._limit)

    return patch.object(scan.Scan, "_rows", careless)


@bug
def masks_of_runs_are_not_renewed():
    original, kept = sources.masks_of, {}

    def stale(known, budget):
        return {id: kept.setdefault(id, mask) for id, mask in original(known, budget).items()}

    return patch.object(sources, "masks_of", stale)


@bug
def rows_of_a_memtable_are_kept_though_it_grew():
    original = sources.fresh_rows

    def stale(fresh, rules, order):
        return fresh.memtable.cache or original(fresh, rules, order)

    return patch.object(sources, "fresh_rows", stale)


# -- planting


def _end_at(memtable, point):
    memtable._held = memtable._held._replace(end=point)


def _committed_as(change):
    """What a flush commits, changed."""
    original = Generations._with_run

    def changed(self, manifest, *args):
        proposal = original(self, manifest, *args)
        return None if proposal is None else change(manifest, proposal)

    return patch.object(Generations, "_with_run", changed)


@contextmanager
def _both(*patches: AbstractContextManager[object]) -> Iterator[None]:
    with patches[0], patches[1]:
        yield
