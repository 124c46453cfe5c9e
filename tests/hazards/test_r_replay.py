"""Hazards of replay: loss is loud, names are taken as they are, an abort ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.failpoint import hooked
from headgate.manifest import ChainPoint
from headgate.store import Location
from headgate.store.faulty import Fault
from headgate.wal.fence import open_epoch

# -- R13


def a_log_of_three_epochs(bench: Any) -> list[str]:
    """Two epochs that were taken over and one whose writer died; its progress is in the manifest. Returns the names, in order.

    Nobody closed, so no later open may start past the beginning.
    """
    for start in (0, 10):
        appender = bench.appender()
        for number in range(start, start + 3):
            appender.append([bench.rows(number)])
    last = bench.appender()
    for number in (20, 21, 22):
        last.append([bench.rows(number)])
    last._writer.commit_progress(ChainPoint(3, last.next_position), {}, resume=False, clean=False, retention_seconds=1e9)
    # The marks that would spare an open the walk: a table with a MemTable has none.
    bench.log().manifests.commit(lambda m: m.but(resume=None))
    return [bench.entry_key(entry.epoch, entry.position) for entry in bench.entries(include_seals=True)]


def damaged(body: bytes, how: str) -> bytes:
    if how == "flip":
        middle = len(body) // 2
        return body[:middle] + bytes([body[middle] ^ 0x10]) + body[middle + 1 :]
    return {"cut": body[:-7], "empty": b"", "zeros": bytes(len(body))}[how]


def openers() -> dict[str, Callable[[Any], Any]]:
    return {
        "with replay": lambda b: open_epoch(b.log(), replay=lambda entry: None),
        "WAL-only": lambda b: b.writer(),
        "appender": lambda b: b.appender(),
    }


@pytest.mark.parametrize("opener", list(openers()))
@pytest.mark.parametrize("which", range(11))
def test_r13_an_open_over_a_missing_entry_names_it_and_writes_nothing(bench: Any, which: int, opener: str) -> None:
    names = a_log_of_three_epochs(bench)
    assert len(names) == 11
    bench.inner.delete([names[which]])
    before = bench.contents()
    expected = hg.WalTruncatedError if which == 10 else hg.WalHoleError
    with pytest.raises(expected) as caught:
        openers()[opener](bench)
    assert caught.value.object == names[which]
    assert names[which] in str(caught.value)
    assert bench.contents() == before


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "zeros"])
@pytest.mark.parametrize("which", range(11))
def test_r13_an_open_over_a_damaged_entry_names_it_and_writes_nothing(bench: Any, which: int, how: str) -> None:
    names = a_log_of_three_epochs(bench)
    body = bytes(bench.inner.get(names[which]))
    bench.inner.delete([names[which]])
    bench.inner.create(names[which], damaged(body, how))
    before = bench.contents()
    for opener in openers().values():
        with pytest.raises(hg.CorruptEntryError) as caught:
            opener(bench)
        assert caught.value.object == names[which]
    assert bench.contents() == before


def test_r13_an_entry_under_anothers_name_is_noticed(bench: Any) -> None:
    names = a_log_of_three_epochs(bench)
    bodies = [bytes(bench.inner.get(name)) for name in names[:2]]
    bench.inner.delete(names[:2])
    bench.inner.create(names[0], bodies[1])
    bench.inner.create(names[1], bodies[0])
    before = bench.contents()
    with pytest.raises(hg.CorruptEntryError) as caught:
        bench.appender()
    assert caught.value.object == names[0]
    assert bench.contents() == before


def test_r13_many_entries_missing_at_once_are_noticed(bench: Any) -> None:
    names = a_log_of_three_epochs(bench)
    for left in range(len(names)):
        kept = {name: bytes(bench.inner.get(name)) for name in names[left:]}
        bench.inner.delete(names[left:])
        before = bench.contents()
        with pytest.raises(hg.DataLossError) as caught:
            bench.appender()
        assert caught.value.object == names[left]
        assert bench.contents() == before
        for name, body in kept.items():
            bench.inner.create(name, body)
    bench.appender()


@pytest.mark.parametrize("which", range(11))
def test_r13_verify_and_readers_name_a_missing_entry_too(bench: Any, which: int) -> None:
    names = a_log_of_three_epochs(bench)
    bench.inner.delete([names[which]])
    report = bench.table.verify()
    assert not report.ok
    assert names[which] in [problem.object for problem in report.problems]
    with pytest.raises(hg.DataLossError) as caught:
        bench.entries(0)
    assert caught.value.object == names[which]


def test_r13_after_a_close_verify_still_notices_what_an_open_need_not_read(bench: Any) -> None:
    with bench.writer() as writer:
        for number in range(4):
            writer.put(bench.rows(number)).wait()
    bench.inner.delete([bench.entry_key(1, 2)])
    report = bench.table.verify()
    assert [problem.object for problem in report.problems] == [bench.entry_key(1, 2)]


def test_r13_the_last_entry_missing_after_a_close_fails_the_open(bench: Any) -> None:
    with bench.writer() as writer:
        for number in range(4):
            writer.put(bench.rows(number)).wait()
    bench.inner.delete([bench.entry_key(1, 3)])
    before = bench.contents()
    with pytest.raises(hg.DataLossError) as caught:
        bench.writer()
    assert caught.value.object == bench.entry_key(1, 3)
    assert bench.contents() == before


def test_r13_a_hole_that_was_never_acknowledged_is_no_loss(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, max_wal_buffer_size=1, max_inflight=3)
    store.add(Fault("create", "hang", key=f"{1:020d}.arrow"))
    acks = [writer.put(bench.rows(number)) for number in range(4)]
    came.wait_for(3)
    assert acks[0].wait(bench.PATIENCE)
    successor = bench.writer()  # position 2 may be there, position 1 is not: no error, a seal
    assert successor.wal_stats().next_wal_entry_position == 2
    assert bench.ids() == [0]


# -- R15


AWKWARD = [
    "plain/",
    "two//slashes",
    "with space",
    "ünïcødé-表",
    "per%20cent",
    "100%",
    "a+b&c=d",
    "quo'te",
    "#hash",
    "que?ry=1",
    "semi;colon",
]


@pytest.mark.parametrize("name", AWKWARD)
def test_r15_a_local_path_is_taken_as_it_stands(tmp_path: Path, bench: Any, name: str) -> None:
    uri = f"{tmp_path}/{name}"
    table = hg.create_table(uri, bench.SCHEMA, key="id", wal_uri=f"{tmp_path}/wal of {name.rstrip('/').replace('//', '/')}")
    with table.shard("0000").writer(hg.ShardWriterConfig(enable_memtable=False, fsync=False)) as writer:
        writer.put(bench.rows(1)).wait(bench.PATIENCE)
    plain = tmp_path / name
    assert (plain / "table").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        {plain.relative_to(tmp_path).parts[0], *_first_parts(f"wal of {name}")}
    )
    for spelling in (uri, uri + "/", plain):
        again = hg.open_table(spelling)
        assert again.uri == table.uri
        assert [entry.position for entry in again.shard("0000").tail(0, follow=False)] == [0]


def _first_parts(name: str) -> set[str]:
    return {Path(name).parts[0]}


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///data/with%20space", "/data/with space"),
        ("file:///data/100%25", "/data/100%"),
        ("file:///data/%C3%BC/", "/data/ü"),
        ("file://localhost/data", "/data"),
        ("file:///data/a#b", "/data/a#b"),
    ],
)
def test_r15_a_file_uri_is_percent_decoded(uri: str, path: str) -> None:
    location = Location.parse(uri)
    assert (location.scheme, location.path, location.uri) == ("file", path, path)


@pytest.mark.parametrize("name", ["plain/", "two//slashes", "with space", "ünïcødé-表", "per%20cent", "100%", "a+b&c=d"])
def test_r15_a_memory_uri_is_taken_as_it_stands(bench: Any, name: str) -> None:
    from headgate.clock import SYSTEM_CLOCK

    uri = f"memory://r15-{SYSTEM_CLOCK.token()}/{name}"
    table = hg.create_table(uri, bench.SCHEMA, key="id")
    with table.shard("0000").writer(hg.ShardWriterConfig(enable_memtable=False)) as writer:
        writer.put(bench.rows(1)).wait(bench.PATIENCE)
    for spelling in (uri, uri + "/", uri.rstrip("/")):
        assert hg.open_table(spelling).status().shards[0].tip == 1


@pytest.mark.parametrize(
    ("uri", "bucket", "path"),
    [
        ("s3://bucket/data/", "bucket", "data"),
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3a://bucket/a//b", "bucket", "a/b"),
        ("S3://bucket/with space", "bucket", "with space"),
        ("s3://bucket/per%20cent/ü", "bucket", "per%20cent/ü"),
        ("gcs://bucket/x", "bucket", "x"),
    ],
)
def test_r15_an_object_store_uri_keeps_its_characters(uri: str, bucket: str, path: str) -> None:
    location = Location.parse(uri)
    assert (location.bucket, location.path) == (bucket, path)
    assert Location.parse(location.uri) == location, "canonical"


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/x?versionId=1",
        "s3://bucket/x#y",
        "memory://m/x?y",
        "file:///x?y=1",
        "s3://key:secret@bucket/x",
        "s3:///x",
        "",
        " ",
        "a\0b",
        "s3://bucket/a/../b",
        "ftp://host/x",
        "file://host/x",
    ],
)
def test_r15_a_uri_that_cannot_be_honoured_is_refused(uri: str) -> None:
    with pytest.raises(hg.InvalidInputError) as caught:
        hg.open_table(uri)
    assert "secret" not in str(caught.value)


def test_r15_options_of_a_table_reach_every_open_derived_from_it() -> None:
    from headgate.shard import Places

    options = {"aws_access_key_id": "AKID", "aws_secret_access_key": "SECRET", "aws_region": "eu-1"}
    table = Location.parse("s3://bucket/table", options)
    wal = Location.parse("s3://other/wal", {"aws_region": "eu-2"})
    places = Places(table, wal)
    log = places.open_log("0000", "t")
    assert log.wal_store.inner._location.options["aws_region"] == "eu-2"  # type: ignore[attr-defined]
    assert log.manifests._store.inner._location.options["aws_secret_access_key"] == "SECRET"  # type: ignore[attr-defined]
    assert log.wal_uri == "s3://other/wal"


def test_r15_a_wal_store_of_the_same_kind_gets_the_tables_options_unless_it_has_its_own() -> None:
    from headgate.tables import _places

    options = {"aws_region": "eu-1"}
    same = _places("s3://bucket/table", options, "s3://other/wal", None)
    own = _places("s3://bucket/table", options, "s3://other/wal", {"aws_region": "eu-2"})
    other = _places("s3://bucket/table", options, "/data/wal", None)
    assert [places.wal.options.get("aws_region") for places in (same, own, other) if places.wal] == ["eu-1", "eu-2", None]


# -- R16


def abort_in_bounded_time(bench: Any, writer: hg.ShardWriter, acks: list[hg.Ack]) -> None:
    aborting = threading.Thread(target=writer.abort, daemon=True)
    aborting.start()
    aborting.join(bench.PATIENCE)
    assert not aborting.is_alive(), "abort hangs"
    for ack in acks:
        with pytest.raises(hg.ClosedError):
            ack.wait(bench.PATIENCE)
    with pytest.raises(hg.ClosedError):
        writer.put(bench.rows(99))
    writer.abort()  # can be repeated


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.writer._ABORT_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
def test_r16_abort_ends_with_puts_waiting_for_room_queued_and_in_a_hanging_request(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, max_wal_buffer_size=1, max_inflight=2, max_unflushed_memtable_bytes=10_000)
    store.add(Fault("create", "hang", key=".arrow"))
    acks = [writer.put(bench.rows(number)) for number in range(4)]
    came.wait_for(2)
    refused: list[BaseException] = []

    def blocked() -> None:
        try:
            writer.put(bench.rows(*range(100, 2100)))
        except hg.HeadgateError as error:
            refused.append(error)

    waiter = threading.Thread(target=blocked)
    waiter.start()
    while writer.backpressure_stats().blocked_puts == 0:
        waiter.join(0.001)
    abort_in_bounded_time(bench, writer, acks)
    waiter.join(bench.PATIENCE)
    assert [type(error) for error in refused] == [hg.ClosedError]
    store.clear()


@pytest.mark.parametrize("stage", ["pipeline.encoded", "pipeline.persisted"])
@pytest.mark.usefixtures("impatient")
def test_r16_abort_ends_with_entries_stuck_between_two_steps(bench: Any, stage: str) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def stop(name: str) -> None:
        if name == stage:
            reached.set()
            go_on.wait(bench.PATIENCE)

    writer = bench.writer(max_wal_buffer_size=1, max_inflight=2)
    with hooked(stop):
        acks = [writer.put(bench.rows(number)) for number in range(3)]
        assert reached.wait(bench.PATIENCE)
        abort_in_bounded_time(bench, writer, acks)
        go_on.set()


@pytest.mark.usefixtures("impatient")
def test_r16_abort_ends_while_a_failed_request_waits_for_its_retry(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, wal_persist_retry_base_delay=0.5, max_wal_persist_retries=2)
    store.add(Fault("create", "fail", key=".arrow", times=1))
    acks = [writer.put(bench.rows(1))]
    came.wait_for(1)
    abort_in_bounded_time(bench, writer, acks)


@pytest.mark.usefixtures("impatient")
def test_r16_abort_ends_with_an_entry_that_landed_before_the_one_in_front_of_it(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, max_wal_buffer_size=1, max_inflight=2)
    store.add(Fault("create", "hang", key=f"{0:020d}.arrow"))
    acks = [writer.put(bench.rows(number)) for number in range(3)]
    came.wait_for(3)  # 1 landed, 2 is on its way, 0 hangs
    abort_in_bounded_time(bench, writer, acks)
    store.clear()


@pytest.mark.usefixtures("impatient")
def test_r16_abort_ends_while_a_record_hangs_in_the_store(bench: Any, arrivals: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.writer._RECORD_IDLE_SECONDS", 0.001)
    came = arrivals("create", "/manifest/")
    store = bench.faulty(before=came)
    writer = bench.writer(store)
    opened = came.count
    store.add(Fault("create", "hang", key="/manifest/"))
    writer.put(bench.rows(1)).wait()
    came.wait_for(opened + 1)
    abort_in_bounded_time(bench, writer, [])
    store.clear()


def test_r16_abort_keeps_what_was_acknowledged(bench: Any) -> None:
    writer = bench.writer()
    for number in range(5):
        writer.put(bench.rows(number)).wait()
    writer.abort()
    assert bench.manifest.wal_position_last_seen == 4
    bench.writer()
    assert bench.ids() == [0, 1, 2, 3, 4]
