"""Hazards of Ctrl-C in a put or in a wait: it is accepted once or not at all, and nobody waits for ever."""

from __future__ import annotations

import dis
import itertools
import sys
import threading
from types import CodeType, FrameType
from typing import Any

import pytest

import headgate as hg
from headgate.admission import Admission, _Producer
from headgate.store.faulty import Fault
from headgate.wal.pipeline import Pipeline

PUTTING = (Pipeline.submit, Pipeline._enqueue, Pipeline._sweep, Admission.admit, _Producer.settle)
LEADING = (Pipeline.lead, Pipeline._depart, Pipeline._delay, Pipeline._fly_or_fail, Pipeline._fly, Pipeline._acknowledge)
FAILING = (*LEADING, Pipeline.fail, Pipeline._final, Pipeline._failure_for)


class Signal:
    """Raises KeyboardInterrupt in this thread at the n-th place where Python would let a signal in; 0: counts the places only.

    Those are the start of a function, and what follows a call or a jump backwards.
    """

    def __init__(self, at: int, steps: tuple[Any, ...]) -> None:
        self._at, self.places = at, 0
        self._open = {step.__code__: _open_offsets(step.__code__) for step in steps}

    @property
    def came(self) -> bool:
        return 0 < self._at <= self.places

    def __enter__(self) -> Signal:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code not in self._open:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and frame.f_lasti in self._open[frame.f_code]:
            self.places += 1
            if self.places == self._at:
                raise KeyboardInterrupt
        return self._opcode


def _open_offsets(code: CodeType) -> set[int]:
    instructions = list(dis.get_instructions(code))
    after = {"RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}
    return {b.offset for a, b in itertools.pairwise(instructions) if a.opname in after and b.opname != "NOP"}


def ended(run: Any, patience: float) -> None:
    """Run to the end, in time; raises what it raises."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(patience)
    assert not thread.is_alive(), "somebody waits for ever"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("then", ["the same again", "the next one"])
def test_a13_a_put_interrupted_anywhere_is_accepted_with_its_sequence_or_not_at_all(
    make_bench: Any, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr(Pipeline, "_call_slot", lambda self: None)  # whoever waits leads
    at, places = 0, 0
    while at <= places:
        bench = make_bench()
        writer = bench.writer()
        writer.put(bench.rows(0), producer="p", sequence=0).wait()
        with Signal(at, PUTTING) as signal:
            try:
                writer.put(bench.rows(1), producer="p", sequence=1)
            except KeyboardInterrupt:
                pass
        places = max(places, signal.places)
        assert signal.came == (at > 0)

        def go_on(bench: Any = bench, writer: hg.ShardWriter = writer) -> None:
            if then == "the next one":
                try:
                    writer.put(bench.rows(2), producer="p", sequence=2).wait()
                except hg.OutOfSequenceError:  # the one before was not accepted
                    pass
            for number in (1, 2, 3):
                writer.put(bench.rows(number), producer="p", sequence=number).wait()

        ended(go_on, bench.PATIENCE)
        assert bench.ids() == [0, 1, 2, 3], f"interrupted at place {at}"
        assert writer.backpressure_stats().held_bytes == 0
        assert writer.wal_stats().queued_puts == 0
        writer.abort()
        at += 1
    assert places > 10


@pytest.mark.parametrize("memtable", [False, True])
def test_a12_a_wait_interrupted_anywhere_leaves_no_put_and_no_waiter_behind(
    make_bench: Any, monkeypatch: pytest.MonkeyPatch, memtable: bool
) -> None:
    at, places = 0, 0
    while at <= places:
        bench = make_bench()
        writer = bench.memtable_writer(max_memtable_age=1e6) if memtable else bench.writer()
        with monkeypatch.context() as patched:
            patched.setattr(Pipeline, "_call_slot", lambda self: None)  # whoever waits leads
            writer.put(bench.rows(0)).wait()
            acks = [writer.put(bench.rows(1)), writer.put(bench.rows(2))]
            with Signal(at, LEADING) as signal:
                try:
                    acks[0].wait()
                except KeyboardInterrupt:
                    pass
        places = max(places, signal.places)

        def go_on(bench: Any = bench, writer: hg.ShardWriter = writer, acks: list[hg.Ack] = acks) -> None:
            for ack in acks:
                ack.wait()
            writer.put(bench.rows(3)).wait()
            writer.flush()
            writer.close()

        ended(go_on, bench.PATIENCE)
        assert bench.ids() == [0, 1, 2, 3], f"interrupted at place {at}"
        assert writer.wal_stats().puts_acknowledged == 4
        assert writer.backpressure_stats().held_bytes == 0
        assert writer.threads_alive() == 0
        at += 1
    assert places > 20


def test_a07_a_wait_interrupted_while_the_writer_fails_leaves_nobody_waiting(make_bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    at, places = 0, 0
    while at <= places:
        bench = make_bench()
        store = bench.faulty()
        writer = bench.writer(store, max_wal_persist_retries=0)
        with monkeypatch.context() as patched:
            patched.setattr(Pipeline, "_call_slot", lambda self: None)
            writer.put(bench.rows(0)).wait()
            store.add(Fault("create", "fail", key="wal/", times=1000))
            acks = [writer.put(bench.rows(1)), writer.put(bench.rows(2))]
            with Signal(at, FAILING) as signal:
                try:
                    acks[0].wait()
                except (KeyboardInterrupt, hg.WriterPoisonedError):
                    pass
        places = max(places, signal.places)

        def go_on(writer: hg.ShardWriter = writer, acks: list[hg.Ack] = acks) -> None:
            for ack in acks:
                with pytest.raises(hg.WriterPoisonedError) as caught:
                    ack.wait()
                assert len(caught.value.unacknowledged) == 2
            with pytest.raises(hg.WriterPoisonedError):
                writer.flush()

        ended(go_on, bench.PATIENCE)
        at += 1
    assert places > 20
