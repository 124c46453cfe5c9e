"""The fenced WAL through the public surface, on every kind of store (S05)."""

from __future__ import annotations

import pickle
import threading

import pytest
from stores_support import SCHEMA, WAL_ONLY, ids_of, rows

import headgate as hg
from headgate.errors import AlreadyExistsError, FencedError, NotFoundError, WalStoreMismatchError, WalTruncatedError
from headgate.wal.collect import collect_entries
from servers import Plan

pytestmark = pytest.mark.timeout(600)


def write(shard: hg.Shard, *ids: int) -> None:
    with shard.writer(WAL_ONLY) as writer:
        for number in ids:
            writer.put(rows(number))


def test_s05_what_was_put_is_there_after_reopening(racing_place):
    shard = racing_place.create_table().shard("0000")
    with shard.writer(WAL_ONLY) as writer:
        assert (writer.epoch, writer.wal_stats().next_wal_entry_position) == (1, 0)
        acks = [writer.put(rows(number, number + 1000)) for number in range(20)]
        places = [ack.wait(30)["0000"] for ack in acks]
    write(racing_place.open_table().shard("0000"), 20, 21)

    table = racing_place.open_table()
    assert places == sorted(places)
    assert ids_of(table.shard("0000")) == [number for i in range(20) for number in (i, i + 1000)] + [20, 21]
    report = table.verify(deep=True)
    assert report.ok, report.problems
    assert (report.counts["rows"], report.counts["seals"]) == (42, 1)
    assert table.status().shards[0].epoch == 2


def test_s05_a_second_writer_takes_over_and_the_first_is_fenced(racing_place):
    shard = racing_place.create_table().shard("0000")
    first = shard.writer(WAL_ONLY)
    first.put(rows(1)).wait(30)

    second = racing_place.open_table().shard("0000").writer(WAL_ONLY)
    second.put(rows(2)).wait(30)
    late = first.put(rows(3))
    with pytest.raises(FencedError) as caught:
        late.wait(30)
    with pytest.raises(FencedError):
        first.check_fenced()
    with pytest.raises(FencedError):
        first.close()
    second.close()

    assert (caught.value.epoch, caught.value.by_epoch) == (1, 2)
    assert shard.outcome(caught.value.epoch, caught.value.position) == "void"
    assert ids_of(shard) == [1, 2]
    assert racing_place.open_table().verify(deep=True).ok


def test_s05_racing_writers_lose_and_double_nothing(racing_place):
    shard = racing_place.create_table().shard("0000")
    acknowledged: dict[int, tuple[int, int]] = {}
    failures: list[BaseException] = []

    def run(name: int) -> None:
        number = name * 1000
        try:
            for _ in range(4):
                try:
                    with racing_place.open_table().shard("0000").writer(WAL_ONLY) as writer:
                        for _ in range(5):
                            number += 1
                            acknowledged[number] = writer.put(rows(number)).wait(60)["0000"]
                except FencedError:
                    continue
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    assert not failures
    found = {
        number: (entry.epoch, entry.position)
        for entry in shard.tail(0, follow=False)
        for b in entry.batches
        for number in b["id"].to_pylist()
    }
    ids = ids_of(shard)
    assert len(ids) == len(set(ids))
    assert {number: found.get(number) for number in acknowledged} == acknowledged
    assert racing_place.open_table().verify(deep=True).ok


def test_s05_a_producers_retry_is_one_copy_across_writers(racing_place):
    shard = racing_place.create_table().shard("0000")
    with shard.writer(WAL_ONLY) as writer:
        for number in range(5):
            writer.put(rows(number), producer="p", sequence=number).wait(30)
    with racing_place.open_table().shard("0000").writer(WAL_ONLY) as writer:
        receipt = writer.put(rows(4), producer="p", sequence=4).wait(30)
        writer.put(rows(5), producer="p", sequence=5).wait(30)

    assert receipt.duplicate
    assert ids_of(shard) == [0, 1, 2, 3, 4, 5]


def test_s05_a_follower_sees_what_comes_after_a_takeover(racing_place):
    shard = racing_place.create_table().shard("0000")
    seen: list[int] = []
    done = threading.Event()

    def follow() -> None:
        for entry in racing_place.open_table().shard("0000").tail(0):
            seen.extend(number for batch in entry.batches for number in batch.column("id").to_pylist())
            if seen[-1] == 6:
                done.set()
                return

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    write(shard, 1, 2, 3)
    write(shard, 4, 5, 6)

    assert done.wait(60)
    assert seen == [1, 2, 3, 4, 5, 6]


def test_s05_trimmed_and_collected_the_log_begins_later(racing_place):
    table = racing_place.create_table()
    shard = table.shard("0000")
    with hg.WalAppender.open(shard) as appender:
        for number in range(6):
            appender.append([rows(number)])

    table.trim(before=4)
    collected = collect_entries(shard.log, dry_run=False)

    assert collected.entries == 4
    assert hg.WalTailer(shard).first_position() == 4
    with pytest.raises(WalTruncatedError):
        ids_of(shard, 0)
    assert ids_of(racing_place.open_table().shard("0000")) == [4, 5]
    write(shard, 6)
    assert ids_of(shard) == [4, 5, 6]
    assert racing_place.open_table().verify(deep=True).ok


def test_s05_the_log_may_be_in_a_second_store(racing_place, tmp_path):
    wal, options = racing_place.uri("the log"), racing_place.options
    table = hg.create_table(tmp_path / "table", SCHEMA, key="id", wal_uri=wal, wal_storage_options=options)
    write(table.shard("0000"), 1, 2)

    again = hg.open_table(tmp_path / "table", wal_storage_options=options)
    write(again.shard("0000"), 3)

    assert ids_of(again.shard("0000")) == [1, 2, 3]
    assert again.verify(deep=True).ok
    assert not (tmp_path / "table" / "wal").exists()
    assert sum(info.key.endswith(".arrow") for info in racing_place.store("the log").list("wal/")) >= 3
    elsewhere = hg.open_table(tmp_path / "table", wal_uri=racing_place.uri("elsewhere"), wal_storage_options=options)
    with pytest.raises(WalStoreMismatchError):
        elsewhere.shard("0000").writer(WAL_ONLY)


def test_s05_a_table_is_created_once(racing_place):
    racing_place.create_table()

    with pytest.raises(AlreadyExistsError):
        racing_place.create_table()
    assert racing_place.create_table(if_exists="open").uri == racing_place.open_table().uri
    with pytest.raises(NotFoundError):
        racing_place.open_table("another")


@pytest.mark.parametrize("path", ["with space", "100%", "a%20b", "ünï/日本", "dots..x"])
def test_r15_a_table_lives_under_any_name(racing_place, path):
    write(racing_place.create_table(path).shard("0000"), 1, 2)

    table = racing_place.open_table(path + "/")

    assert ids_of(table.shard("0000")) == [1, 2]
    assert table.verify(deep=True).ok


def test_handles_pickle_and_go_on_elsewhere(racing_place):
    table = racing_place.create_table()
    write(table.shard("0000"), 1)
    assert table.shard("0000").log  # opened: the connection stays behind

    again, shard = pickle.loads(pickle.dumps((table, table.shard("0000"))))

    assert ids_of(shard) == [1]
    write(shard, 2)
    assert ids_of(again.shard("0000")) == [1, 2]


def test_s05_the_same_on_an_s3_that_fails_every_fourth_request(proxy):
    """All of the above in one, with faults that the retries outlast."""
    uri, options = proxy.server.uri("every fourth"), proxy.server.options
    table = hg.create_table(uri, SCHEMA, key="id", storage_options=options)
    proxy.hurt(Plan(seed=4, rate=0.25, in_a_row_max=2))

    first = table.shard("0000").writer(WAL_ONLY)
    for number in range(10):
        first.put(rows(number), producer="p", sequence=number).wait(60)
    second = hg.open_table(uri, options).shard("0000").writer(WAL_ONLY)
    assert second.put(rows(9), producer="p", sequence=9).wait(60).duplicate
    for number in range(10, 20):
        second.put(rows(number), producer="p", sequence=number).wait(60)
    with pytest.raises(FencedError):
        first.put(rows(99)).wait(60)
    first.abort()
    second.close()

    table = hg.open_table(uri, options)
    assert ids_of(table.shard("0000")) == list(range(20))
    assert table.verify(deep=True).ok
    table.trim(before=5)
    collect_entries(table.shard("0000").log, dry_run=False)
    assert ids_of(table.shard("0000"), 5)[-1] == 19
    assert sum(request.fault is not None for request in proxy.requests) > 10
