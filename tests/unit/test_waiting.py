"""Waiting and working in order: acknowledgements, gates, parallel maps, failpoints, errors, configuration."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from datetime import timedelta
from typing import Any

import pytest

import headgate as hg
from headgate import errors
from headgate.clock import SYSTEM_CLOCK, SystemClock, map_ordered, ulid
from headgate.failpoint import failpoint, hooked
from headgate.wal.ack import Ack, decided

PATIENCE = 30.0


def settle(ack: Ack, error: hg.HeadgateError | None = None) -> None:
    ack._decide(None if error else ("0000", 1, 7), error)
    ack._wake()


# -- ack


def test_an_ack_waits_for_its_place() -> None:
    ack = Ack(SYSTEM_CLOCK)
    assert not ack.done()
    with pytest.raises(TimeoutError):
        ack.wait(0)
    threading.Thread(target=settle, args=(ack,)).start()
    receipt = ack.wait(PATIENCE)
    assert ack.done()
    assert dict(receipt) == {"0000": (1, 7)}
    assert not receipt.duplicate
    assert ack.wait(0) == receipt, "as often as wanted"


def test_many_threads_wait_for_one_ack_and_each_gets_an_error_of_its_own() -> None:
    ack = Ack(SYSTEM_CLOCK)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            ack.wait(PATIENCE)
        except hg.ClosedError as error:
            caught.append(error)

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    settle(ack, hg.ClosedError("closed", hint="reopen"))
    for thread in threads:
        thread.join(PATIENCE)
    assert len(caught) == 8
    assert len({id(error) for error in caught}) == 8
    assert {str(error) for error in caught} == {"closed\n  hint: reopen"}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("failing", [True, False])
def test_an_ack_is_awaited(early: bool, failing: bool) -> None:
    async def story() -> Any:
        ack = Ack(SYSTEM_CLOCK)
        error = hg.ClosedError("closed") if failing else None
        if early:
            settle(ack, error)
        else:
            threading.Timer(0.01, settle, (ack, error)).start()
        many = [asyncio.create_task(wait_for(ack)) for _ in range(3)]
        return await asyncio.gather(*many, return_exceptions=True)

    async def wait_for(ack: Ack) -> Any:
        return await ack

    results = asyncio.run(story())
    if failing:
        assert [type(result) for result in results] == [hg.ClosedError] * 3
    else:
        assert [dict(result) for result in results] == [{"0000": (1, 7)}] * 3


def test_an_ack_decided_after_its_loop_is_gone_bothers_nobody() -> None:
    ack = Ack(SYSTEM_CLOCK)

    async def wait_for() -> Any:
        return await ack

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait_for(), 0.001)

    asyncio.run(give_up())
    settle(ack)
    assert ack.wait(0)["0000"] == (1, 7)


def test_a_cancelled_waiter_leaves_the_others_waiting() -> None:
    async def story() -> Any:
        ack = Ack(SYSTEM_CLOCK)

        async def wait_for() -> Any:
            return await ack

        first, second = asyncio.create_task(wait_for()), asyncio.create_task(wait_for())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        settle(ack)
        return first.cancelled() or await asyncio.gather(first, return_exceptions=True), await second

    cancelled, receipt = asyncio.run(story())
    assert cancelled
    assert receipt["0000"] == (1, 7)


def test_a_duplicates_ack_says_so() -> None:
    receipt = decided(SYSTEM_CLOCK, "0001", 4, 9).wait(0)
    assert (dict(receipt), receipt.duplicate, len(receipt)) == ({"0001": (4, 9)}, True, 1)
    assert "duplicate" in repr(receipt)


def test_a_gate_lets_everybody_through_once_open() -> None:
    gate = SYSTEM_CLOCK.gate()
    assert not gate.wait(0)
    through: list[int] = []
    threads = [threading.Thread(target=lambda n=n: through.append(n) if gate.wait(PATIENCE) else None) for n in range(5)]
    for thread in threads:
        thread.start()
    gate.open()
    gate.open()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(through) == [0, 1, 2, 3, 4]
    assert gate.wait(0)


# -- map_ordered


@pytest.mark.parametrize("parallel", [1, 3, 50])
def test_results_come_in_order_whatever_order_the_work_ends_in(parallel: int) -> None:
    turn = threading.Condition()
    started: list[int] = []

    def work(number: int) -> int:
        with turn:
            started.append(number)
            turn.notify_all()
            if number == 0 and parallel > 1:
                turn.wait_for(lambda: len(started) > 1, PATIENCE)  # the first ends after the second began
        return number * 10

    assert list(map_ordered(SYSTEM_CLOCK, work, range(20), parallel=parallel)) == [n * 10 for n in range(20)]


def test_no_more_than_so_many_at_once_and_so_many_ahead() -> None:
    lock = threading.Lock()
    running = most = begun = 0

    def work(number: int) -> int:
        nonlocal running, most, begun
        with lock:
            running += 1
            begun += 1
            most = max(most, running)
        with lock:
            running -= 1
        return number

    results = map_ordered(SYSTEM_CLOCK, work, range(100), parallel=4, ahead=6)
    for number in range(10):
        assert next(results) == number
        assert begun <= number + 1 + 6
    results.close()  # type: ignore[attr-defined]
    assert most <= 4
    assert begun < 100


def test_an_error_is_raised_where_its_result_would_have_stood() -> None:
    def work(number: int) -> int:
        if number == 3:
            raise KeyError(number)
        return number

    results = map_ordered(SYSTEM_CLOCK, work, range(10), parallel=4)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError):
        next(results)


def test_what_is_quick_is_done_without_threads_and_what_is_not_with_them() -> None:
    here = threading.get_ident()
    now = 0.0
    threads: dict[int, bool] = {}

    class Clock(SystemClock):
        def monotonic(self) -> float:
            return now

    def work(number: int) -> int:
        nonlocal now
        threads[number] = threading.get_ident() != here
        now += 2.0 if number == 5 else 0.5
        return number

    assert list(map_ordered(Clock(), work, range(9), parallel=2, patience=1.0)) == list(range(9))
    assert [number for number in range(9) if threads[number]] == [6, 7, 8]
    threads.clear()
    assert list(map_ordered(Clock(), work, range(4), parallel=2, patience=1.0)) == list(range(4))
    assert not any(threads.values())


@pytest.mark.parametrize("patience", [None, 0.0, 60.0])
def test_with_any_patience_an_error_is_raised_in_its_turn(patience: float | None) -> None:
    def work(number: int) -> int:
        if number == 3:
            raise KeyError(number)
        return number

    results = map_ordered(SYSTEM_CLOCK, work, range(10), parallel=4, patience=patience)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError):
        next(results)


def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()
    results = map_ordered(SYSTEM_CLOCK, lambda n: n, range(1000), parallel=8)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_nothing_to_do_is_nothing() -> None:
    assert list(map_ordered(SYSTEM_CLOCK, lambda n: n, [], parallel=8)) == []


# -- clock and failpoints


def test_tokens_are_distinct_and_sort_by_time() -> None:
    assert len({SYSTEM_CLOCK.token() for _ in range(1000)}) == 1000
    assert ulid(5, 2**80 - 1) < ulid(6, 0) < ulid(2**47, 0)
    assert len(ulid(0, 0)) == len(ulid(2**48 - 1, 2**80 - 1)) == 26


def test_a_hook_hears_of_failpoints_only_while_it_is_installed() -> None:
    heard: list[str] = []
    failpoint("before")
    with hooked(heard.append):
        failpoint("outer")
        with hooked(lambda name: heard.append(name.upper())):
            failpoint("inner")
        failpoint("outer again")
    failpoint("after")
    assert heard == ["outer", "INNER", "outer again"]


# -- errors


def all_errors() -> list[hg.HeadgateError]:
    return [
        errors.InvalidInputError("m", hint="h"),
        errors.FencedError("m", shard="0000", epoch=1, position=2, by_epoch=3),
        errors.WriterPoisonedError("m", cause=KeyError("k"), unacknowledged=[1, 2]),
        errors.WalHoleError("m", object="o"),
        errors.CorruptEntryError("m", object="o", hint="h"),
        errors.StoreUnavailableError("m", object="o"),
        errors.DeleteIncompleteError(["a", "b"], "cause"),
        errors.BackpressureTimeoutError("m"),
        errors.OutcomeUnknownError("m"),
    ]


@pytest.mark.parametrize("error", all_errors(), ids=lambda e: type(e).__name__)
def test_an_error_crosses_processes_whole(error: hg.HeadgateError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert {k: repr(v) for k, v in again.__dict__.items()} == {k: repr(v) for k, v in error.__dict__.items()}


def test_the_tree_of_errors_is_the_one_that_was_promised() -> None:
    assert issubclass(hg.InvalidInputError, ValueError)
    assert issubclass(hg.BackpressureTimeoutError, TimeoutError)
    for kind in (hg.WalHoleError, hg.WalTruncatedError, hg.CorruptEntryError):
        assert issubclass(kind, hg.DataLossError)
    kinds = [value for name, value in vars(hg).items() if name.endswith("Error")]
    assert all(issubclass(kind, hg.HeadgateError) for kind in kinds)
    assert {kind.__name__ for kind in kinds if kind.retryable} >= {"SnapshotExpiredError", "CommitConflictError"}
    assert not hg.FencedError.retryable


# -- configuration


def test_the_defaults_are_the_promised_ones() -> None:
    config = hg.ShardWriterConfig()
    assert (config.enable_memtable, config.durable_write, config.fsync, config.max_inflight) == (True, False, True, 4)
    assert (config.max_wal_buffer_size, config.max_wal_flush_interval) == (8 << 20, 0.0)
    assert config.producer_retention == timedelta(days=7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_inflight": 0},
        {"max_inflight": 65},
        {"max_inflight": 1.5},
        {"max_inflight": True},
        {"max_inflight": "4"},
        {"max_inflight": None},
        {"max_wal_buffer_size": 0},
        {"max_wal_flush_interval": -1},
        {"max_wal_flush_interval": float("nan")},
        {"max_wal_persist_retries": -1},
        {"wal_persist_retry_base_delay": -0.1},
        {"max_unflushed_memtable_bytes": 0},
        {"max_memtable_rows": 0},
        {"put_timeout": -1},
        {"put_timeout": float("nan")},
        {"put_timeout": "1"},
        {"put_timeout": float("inf")},
        {"max_wal_flush_interval": float("inf")},
        {"wal_persist_retry_base_delay": float("inf")},
        {"on_bad_rows": "ignore"},
        {"producer_retention": timedelta(seconds=-1)},
        {"producer_retention": 7},
        {"fsync": 1},
        {"enable_memtable": None},
        {"enable_memtable": False, "index_configs": ["x"]},
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_with_its_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(hg.InvalidInputError) as caught:
        hg.ShardWriterConfig(**wrong)
    assert list(wrong)[-1] in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "right",
    [
        {"max_inflight": 64},
        {"max_wal_flush_interval": 1},
        {"put_timeout": 0},
        {"put_timeout": 0.5},
        {"max_wal_persist_retries": 0},
        {"enable_memtable": False, "index_configs": []},
        {"producer_retention": timedelta(0)},
    ],
    ids=str,
)
def test_settings_at_their_bounds_are_taken(right: dict[str, Any]) -> None:
    config = hg.ShardWriterConfig(**right)
    assert all(getattr(config, name) == value for name, value in right.items())
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("call", ["memtable_stats", "active_memtable", "scan"])
def test_a_wal_only_writer_has_no_memtable_to_ask(bench: Any, call: str) -> None:
    with pytest.raises(hg.InvalidInputError, match=call):
        getattr(bench.writer(), call)()


def test_a_minimal_interval_bounds_the_rate_and_never_the_first_put(bench: Any) -> None:
    writer = bench.writer(max_wal_flush_interval=3600.0)
    writer.put(bench.rows(1)).wait(bench.PATIENCE)
    later = writer.put(bench.rows(2))
    with pytest.raises(TimeoutError):
        later.wait(0.05)
    assert writer.wal_stats().entries_written == 1


def test_the_next_position_is_right_from_the_moment_open_returns(bench: Any) -> None:
    for number in range(3):
        writer = bench.writer()
        expected = writer.wal_stats().next_wal_entry_position
        assert writer.put(bench.rows(number)).wait()["0000"] == (number + 1, expected)
        writer.close()
