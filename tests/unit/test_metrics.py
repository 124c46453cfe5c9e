"""What is counted, under which names, and how it leaves the process."""

from __future__ import annotations

import gc
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate import meters
from headgate.store.faulty import Fault, FaultyStore
from headgate.wal.appender import WalAppender

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("note", pa.string())])
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture(autouse=True)
def _room_for_this_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of the same process have made tables, too: more than are counted one by one."""
    monkeypatch.setattr(meters, "SERIES_MAX", 1_000_000)


@pytest.fixture
def table(tmp_path: Path) -> hg.Table:
    return hg.create_table(tmp_path / "t", SCHEMA, key="id")


def value(name: str, uri: str, **labels: str) -> float:
    """The sum of a metric's numbers for one table (or store) and these labels."""
    rows = hg.metrics.snapshot()[name]
    wanted = [row for row in rows if uri in (row["labels"].get("table"), row["labels"].get("store"))]
    return sum(row.get("value", row.get("count")) for row in wanted if labels.items() <= row["labels"].items())


def rows(*ids: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"id": id, "note": f"n{id}"} for id in ids], schema=SCHEMA)


def test_the_names_in_the_docs_are_the_names_that_are_exported() -> None:
    written = dict(re.findall(r"^\| `(headgate_\w+)` \| (\w+) \|", DOCS.read_text(), re.M))
    assert written == {metric.name: metric.kind for metric in hg.metrics.catalogue()}
    assert set(hg.metrics.snapshot()) == set(written)


def test_the_labels_and_meanings_in_the_docs_are_those_of_the_catalogue() -> None:
    text = DOCS.read_text()
    for metric in hg.metrics.catalogue():
        assert f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |" in text


def test_a_name_says_what_it_counts_in() -> None:
    for metric in hg.metrics.catalogue():
        assert re.fullmatch(r"headgate_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.name.endswith("_seconds") == (metric.kind == "histogram")


def test_puts_flushes_and_reads_are_counted(table: hg.Table) -> None:
    uri = table.uri
    with table.writer() as writer:
        for id in range(3):
            writer.put(rows(id, id + 10)).wait()
        writer.delete(pa.table({"id": [0]})).wait()
        assert value("headgate_writers", uri) == 1
        assert value("headgate_memtable_rows", uri, state="active") == 7
        assert value("headgate_lag_entries", uri) == 4
        writer.flush()
        assert value("headgate_memtable_rows", uri, state="active") == 0
        assert value("headgate_lag_entries", uri) == 0
        assert value("headgate_pending_generations", uri) == 1
    assert value("headgate_puts_total", uri) == 4
    assert value("headgate_rows_total", uri) == 7
    assert value("headgate_ack_seconds", uri) == 4
    assert value("headgate_wal_entries_total", uri, shard="0000") == 4
    assert value("headgate_wal_bytes_total", uri) > 4 * 1024
    assert value("headgate_flush_seconds", uri) == 1
    assert value("headgate_flush_rows_total", uri) == 6
    assert value("headgate_claim_seconds", uri) == value("headgate_walk_seconds", uri) == 1
    assert value("headgate_writers", uri) == 0
    assert table.scan().count() == 5
    assert sum(batch.num_rows for batch in table.scan().to_batches()) == 5
    table.lookup([1, 2])
    table.sql("select 1 from t")
    assert value("headgate_read_seconds", uri, kind="scan") == 2
    assert value("headgate_read_rows_total", uri, kind="scan") == 5
    assert value("headgate_read_rows_total", uri, kind="lookup") == 2
    assert value("headgate_read_seconds", uri, kind="sql") == 1


def test_compaction_and_collection_are_counted(table: hg.Table) -> None:
    uri = table.uri
    for id in range(3):
        with table.writer() as writer:
            writer.put(rows(id, 9)).wait()
    table.compact(full=True)
    assert value("headgate_compaction_seconds", uri) == 1
    assert value("headgate_compaction_rows_read_total", uri) == 6
    assert value("headgate_compaction_rows_written_total", uri) == 4
    table.gc(min_age=0)
    assert value("headgate_gc_objects_total", uri) == 0, "a dry run deletes nothing"
    report = table.gc(dry_run=False, min_age=0)
    for kind, count in report.objects.items():
        assert value("headgate_gc_objects_total", uri, kind=kind) == count
        assert value("headgate_gc_bytes_total", uri, kind=kind) == report.bytes[kind]
    assert value("headgate_manifest_commits_total", uri) > 6


def test_loads_are_counted(table: hg.Table) -> None:
    table.load(pa.Table.from_batches([rows(1, 2, 3)]), app="backfill", version=1)
    table.load(pa.Table.from_batches([rows(1, 2, 3)]), app="backfill", version=1)
    assert value("headgate_loads_total", table.uri) == 1, "the same again is no other load"
    assert value("headgate_load_rows_total", table.uri) == 3


def test_a_status_shows_the_state_to_a_process_that_does_not_write(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1)).wait()
    table.checkpoint("kept")
    table.status()
    assert value("headgate_runs", table.uri) == 1
    assert value("headgate_checkpoints", table.uri) == 1
    table.drop_checkpoint("kept")
    table.status()
    assert value("headgate_checkpoints", table.uri) == 0


def test_counters_never_fall_when_writers_come_and_go(table: hg.Table) -> None:
    for round in range(3):
        writer = table.shard("0000").writer()
        writer.put(rows(round)).wait()
        writer.abort()
        del writer
        gc.collect()
        assert value("headgate_puts_total", table.uri) == round + 1
        assert value("headgate_ack_seconds", table.uri) == round + 1


def test_fences_are_counted(table: hg.Table) -> None:
    first = table.shard("0000").writer()
    with table.shard("0000").writer():
        with pytest.raises(hg.FencedError):
            first.put(rows(1)).wait()
        first.abort()
    assert value("headgate_fences_total", table.uri) == 1
    assert value("headgate_poisonings_total", table.uri) == 0


def test_retries_errors_and_poison_are_counted(bench: Any) -> None:
    store: FaultyStore = bench.store
    writer = bench.writer(max_wal_persist_retries=2)
    before = value("headgate_store_retries_total", store.uri, operation="create")
    store.add(Fault("create", "fail", key=".arrow", times=1))
    writer.put(bench.rows(1)).wait()
    assert value("headgate_store_retries_total", store.uri, operation="create") == before + 1
    store.add(Fault("create", "fail", key=".arrow"))
    with pytest.raises(hg.WriterPoisonedError):
        writer.put(bench.rows(2)).wait()
    store.clear()
    assert value("headgate_store_retries_total", store.uri, operation="create") == before + 3
    assert value("headgate_store_errors_total", store.uri, kind="StoreUnavailableError") >= 4
    assert value("headgate_poisonings_total", store.uri) == 1


def test_waiting_for_room_is_counted(bench: Any) -> None:
    store: FaultyStore = bench.store
    writer = bench.writer(max_unflushed_memtable_bytes=1, put_timeout=0.01)
    store.add(Fault("create", "hang", key=".arrow"))
    first = writer.put(bench.rows(1))
    writer._pipeline.nudge()
    with pytest.raises(hg.BackpressureTimeoutError):
        writer.put(bench.rows(2))
    store.release()
    first.wait()
    assert value("headgate_backpressure_waits_total", store.uri) == 1
    assert value("headgate_backpressure_timeouts_total", store.uri) == 1
    assert value("headgate_backpressure_seconds_total", store.uri) >= 0.01


def test_quarantined_rows_are_counted(table: hg.Table) -> None:
    with table.writer(hg.ShardWriterConfig(on_bad_rows="quarantine")) as writer:
        writer.put([{"id": None, "note": "x"}, {"id": 1, "note": "y"}]).wait()
    assert value("headgate_quarantined_rows_total", table.uri) == 1


def test_a_consumer_that_is_gone_leaves_no_number_behind() -> None:
    about: dict[str, Any] = {"lag": 0, "runs": (), "generations": 0, "checkpoints": 0}
    meters.show_shard("some table", "0000", **about, consumers={"a": 5, "b": 7})
    assert value("headgate_consumer_lag_entries", "some table", consumer="b") == 7
    meters.show_shard("some table", "0000", **about, consumers={"a": 6})
    assert value("headgate_consumer_lag_entries", "some table") == 6
    assert value("headgate_consumers", "some table") == 1


def test_the_number_of_label_sets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "SERIES_MAX", 5)
    monkeypatch.setattr(meters.STORE_ERRORS, "values", {})
    for number in range(100):
        meters.STORE_ERRORS.add(1, f"store-{number}", "StoreError")
    assert len(meters.STORE_ERRORS.values) == 6
    assert meters.STORE_ERRORS.values["other", "other"] == 95


def test_buckets_add_up(table: hg.Table) -> None:
    with table.writer() as writer:
        for ack in [writer.put(rows(id)) for id in range(50)]:
            ack.wait()
    (row,) = [r for r in hg.metrics.snapshot()["headgate_ack_seconds"] if r["labels"]["table"] == table.uri]
    counts = list(row["buckets"].values())
    assert row["count"] == counts[-1] == 50
    assert counts == sorted(counts)
    assert 0 < row["sum"] < 60
    assert list(row["buckets"])[-1] == "+Inf"


def test_prometheus_sees_every_name_and_the_same_numbers(table: hg.Table) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    collector = hg.metrics.register_prometheus(registry)
    with table.writer() as writer:
        writer.put(rows(1, 2)).wait()
        labels = {"table": table.uri, "shard": "0000"}
        assert registry.get_sample_value("headgate_puts_total", labels) == 1
        assert registry.get_sample_value("headgate_rows_total", labels) == 2
        assert registry.get_sample_value("headgate_ack_seconds_count", labels) == 1
        assert registry.get_sample_value("headgate_ack_seconds_bucket", {**labels, "le": "+Inf"}) == 1
        assert registry.get_sample_value("headgate_lag_entries", labels) == 1
    text = prometheus.generate_latest(registry).decode()
    for metric in hg.metrics.catalogue():
        assert f"# TYPE {metric.name} {metric.kind}" in text
    registry.unregister(collector)
    assert prometheus.generate_latest(registry) == b""


def test_a_port_can_be_asked() -> None:
    pytest.importorskip("prometheus_client")
    meters.STORE_ERRORS.add(1, "asked on a port", "StoreError")
    stop, port = None, 0
    for port in range(19_400, 19_440):
        try:
            stop = hg.metrics.serve(port)
            break
        except OSError:
            continue
    assert stop is not None
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            assert 'headgate_store_errors_total{kind="StoreError",store="asked on a port"} 1.0' in answer.read().decode()
    finally:
        stop()


def test_opentelemetry_observes_the_same_numbers(table: hg.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    for instrument in meters.INSTRUMENTS:  # the SDK keeps 2,000 series of each, and tests before this one made more
        monkeypatch.setattr(instrument, "values", {})
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    hg.metrics.register_opentelemetry(sdk.MeterProvider([reader]))
    with table.writer() as writer:
        writer.put(rows(1, 2)).wait()
        data = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    found = {metric.name: metric.data.data_points for metric in data}

    def of(name: str, **labels: str) -> list[float]:
        return [p.value for p in found[name] if p.attributes.get("table") == table.uri and labels.items() <= dict(p.attributes).items()]

    assert of("headgate_rows_total") == [2]
    assert of("headgate_lag_entries") == [1]
    assert of("headgate_ack_seconds_count") == [1]
    assert of("headgate_ack_seconds_bucket", le="+Inf") == [1]
    assert of("headgate_ack_seconds_sum")[0] > 0


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("prometheus_client", hg.metrics.register_prometheus),
        ("prometheus_client", lambda: hg.metrics.serve(0)),
        ("opentelemetry", hg.metrics.register_opentelemetry),
    ],
)
def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, module: str, call: Any) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(hg.InvalidInputError) as refused:
        call()
    assert "headgate[metrics]" in refused.value.hint


def test_the_appender_is_not_measured_as_a_writer(bench: Any) -> None:
    """It has no queue: what it writes counts as requests of its store only."""
    with WalAppender.open(bench.fresh()) as appender:
        appender.append([bench.rows(1)])
    assert value("headgate_puts_total", bench.store.uri) == 0
