"""F05, F17, F18: seals and manifests made where something had been collected, and everybody who may meet them.

A claimant that stops before its seal may put it where an entry was trimmed and collected
meanwhile. Whoever began to walk before that and comes to the seal afterwards must not take it for
the end of its epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import headgate as hg
import headgate.wal.collect as collect
import headgate.wal.fence as fence
from headgate.failpoint import hooked
from headgate.manifest.document import encode_document
from headgate.wal.collect import collect_entries, trim
from headgate.wal.tailer import WalTailer

PATIENCE = 30.0


class Stopped:
    """An opener in a thread of its own, stopped at a step until it is let go."""

    def __init__(self, bench: Any, step: str) -> None:
        self.step, self._at, self._go = step, threading.Event(), threading.Event()
        self.appender: hg.WalAppender | None = None
        self.error: hg.HeadgateError | None = None
        self._thread = threading.Thread(target=self._open, args=(bench,))
        self._thread.start()
        assert self._at.wait(PATIENCE)

    def _open(self, bench: Any) -> None:
        try:
            self.appender = bench.appender()
        except hg.HeadgateError as error:
            self.error = error
        finally:
            self._at.set()

    def meet(self, name: str) -> None:
        if threading.current_thread() is self._thread and name == self.step and not self._at.is_set():
            self._at.set()
            assert self._go.wait(PATIENCE)

    def finish(self) -> None:
        self._go.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@contextmanager
def stopping() -> Iterator[Callable[[Any, str], Stopped]]:
    openers: list[Stopped] = []

    def meet(name: str) -> None:
        for opener in list(openers):
            opener.meet(name)

    def start(bench: Any, step: str) -> Stopped:
        opener = Stopped.__new__(Stopped)
        openers.append(opener)
        opener.__init__(bench, step)  # type: ignore[misc]  # the hook must know it before its thread runs
        return opener

    with hooked(meet):
        yield start


def trim_and_collect(bench: Any, before: int) -> None:
    trim(bench.log(), before)
    collect_entries(bench.log(), dry_run=False, sweep=True)


def test_f17_a_claimant_that_meets_anothers_stale_seal_does_not_follow_it(bench: Any) -> None:
    incumbent = bench.appender()
    with stopping() as start:
        slow = start(bench, "fence.before-seal")
        third = start(bench, "fence.claimed")
        incumbent.append([bench.rows(1)])
        trim_and_collect(bench, 1)
        incumbent.append([bench.rows(2)])
        slow.finish()
        third.finish()
    assert third.appender is not None, third.error
    third.appender.append([bench.rows(3)])

    with pytest.raises(hg.FencedError):
        incumbent.append([bench.rows(4)])
    assert bench.ids(1) == [2, 3]
    bench.appender()


def test_f17_a_survey_that_meets_a_stale_seal_calls_nothing_lost(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    incumbent = bench.appender()
    original = fence._read_to_tip
    with stopping() as start:
        slow = start(bench, "fence.before-seal")
        incumbent.append([bench.rows(1)])

        def read_late(*args: Any) -> bool:
            monkeypatch.setattr(fence, "_read_to_tip", original)
            trim_and_collect(bench, 1)
            incumbent.append([bench.rows(2)])
            slow.finish()
            assert slow.appender is not None
            slow.appender.append([bench.rows(3)])
            return original(*args)

        monkeypatch.setattr(fence, "_read_to_tip", read_late)
        bench.appender().append([bench.rows(4)])

    assert bench.ids(1) == [2, 3, 4]


def test_f17_a_trim_that_meets_a_stale_seal_stays_on_the_chain(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    incumbent = bench.appender()
    original = collect._walk_to
    with stopping() as start:
        slow = start(bench, "fence.before-seal")
        incumbent.append([bench.rows(1)])
        incumbent.append([bench.rows(2)])

        def walk_late(*args: Any) -> Any:
            monkeypatch.setattr(collect, "_walk_to", original)
            trim_and_collect(bench, 1)
            slow.finish()
            return original(*args)

        monkeypatch.setattr(collect, "_walk_to", walk_late)
        trim(bench.log(), 2)
    assert slow.appender is not None
    slow.appender.append([bench.rows(3)])

    with pytest.raises(hg.FencedError):
        incumbent.append([bench.rows(4)])
    assert bench.ids(2) == [3]
    assert bench.manifest.ends().end_of(1) == 2


def test_f14_a_tailer_that_meets_a_stale_seal_says_that_the_log_was_truncated(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    incumbent = bench.appender()
    original = WalTailer._reader
    with stopping() as start:
        slow = start(bench, "fence.before-seal")
        incumbent.append([bench.rows(1)])

        def read_late(self: Any, manifest: Any) -> Any:
            monkeypatch.setattr(WalTailer, "_reader", original)
            trim_and_collect(bench, 1)
            incumbent.append([bench.rows(2)])
            slow.finish()
            assert slow.appender is not None
            slow.appender.append([bench.rows(3)])
            return original(self, manifest)

        monkeypatch.setattr(WalTailer, "_reader", read_late)
        with pytest.raises(hg.WalTruncatedError):
            bench.ids(0)
    assert bench.ids(1) == [2, 3]


def test_f18_a_version_made_again_between_list_and_get_is_not_believed(bench: Any) -> None:
    """A late copy of the committer's own request makes a collected version again, right before it looks."""
    committer, other = bench.log(bench.inner).manifests, bench.log(bench.inner).manifests
    proposals: list[Any] = []
    create, read = committer._create, committer._read
    state = {"overtaken": False, "made again": False}

    def noting(proposal: Any) -> bool:
        proposals.append(proposal)
        return create(proposal)

    def read_late(version: int) -> Any:
        if proposals and not state["made again"]:
            state["made again"] = True
            other.commit(lambda m: m.but(next_generation=m.next_generation + 1))
            bench.inner.delete([committer.key(proposals[0].version)])
            bench.inner.create(committer.key(proposals[0].version), encode_document(proposals[0]))
        return read(version)

    def overtake(name: str) -> None:
        if name == "commit.loaded" and not state["overtaken"]:
            state["overtaken"] = True
            other.commit(lambda m: m.but(next_generation=m.next_generation + 1))

    committer._create, committer._read = noting, read_late
    with hooked(overtake):
        committed = committer.commit(lambda m: m.but(wal_floor=m.wal_floor + 1))

    assert state == {"overtaken": True, "made again": True}
    assert committed.version == bench.manifest.version
    assert (bench.manifest.wal_floor, bench.manifest.next_generation) == (1, 3)
