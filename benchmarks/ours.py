"""Headgate, set up for a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

import headgate as hg
from headgate.clock import SYSTEM_CLOCK
from headgate.shard import Shard
from headgate.store import Location, RetryingStore, Store
from headgate.wal.appender import EpochWriter
from headgate.wal.fence import open_epoch
from headgate.wal.log import ShardLog
from headgate.writer import ShardWriter
from rows import KEY, SCHEMA

Wrap = Callable[[Store], Store]


def new_shard(folder: Path, schema: pa.Schema = SCHEMA, key: str | None = KEY, **options: Any) -> Shard:
    return hg.create_table(folder / "table", schema, key, **options).shards[0]


def config(**options: Any) -> hg.ShardWriterConfig:
    return hg.ShardWriterConfig(**{"enable_memtable": False, "fsync": False, **options})


def writer(folder: Path, **options: Any) -> ShardWriter:
    """A WAL-only writer of a new table."""
    return new_shard(folder).writer(config(**options))


def with_memtable(**options: Any) -> hg.ShardWriterConfig:
    return config(**{"enable_memtable": True, **options})


def log_on(shard: Shard, wrap_wal: Wrap, wrap_manifests: Wrap = lambda store: store) -> ShardLog:
    """The shard's log over wrapped stores, so that requests can be delayed and counted."""
    place: Location = shard.places.table
    manifests = shard.places.manifests(RetryingStore(wrap_manifests(place.open(fsync=False)), SYSTEM_CLOCK), shard.id, shard.table_id)
    return ShardLog(shard.table_id, shard.id, manifests, RetryingStore(wrap_wal(place.open(fsync=False)), SYSTEM_CLOCK), None, SYSTEM_CLOCK)


def writer_on(shard: Shard, wrap_wal: Wrap, wrap_manifests: Wrap = lambda store: store, **options: Any) -> ShardWriter:
    return ShardWriter(log_on(shard, wrap_wal, wrap_manifests), shard.rules, config(**options))


def entry_bytes(shard: Shard) -> bytes:
    """The bytes of an entry that was just written: what a plain PUT of the same would send."""
    folder = next((Path(shard.places.table.path) / "wal").glob("*/*/*/"))
    return max((path for path in folder.iterdir() if path.suffix == ".arrow"), key=lambda path: path.name).read_bytes()


def opened_shard(folder: Path) -> Shard:
    return hg.open_table(folder / "table").shards[0]


def epoch_writer(log: ShardLog) -> EpochWriter:
    return EpochWriter(log, open_epoch(log))
