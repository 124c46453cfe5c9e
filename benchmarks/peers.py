"""The others, each set up for its best at the guarantee that is asked for.

Owns: how a peer is opened and written. Does not own: what is measured.

Nothing here syncs to disk: none of the peers does.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from harness import NotHere
from rows import rows

os.environ.setdefault("LANCE_LOG", "error")  # before it is imported: its planner warns of itself in every search
LANCE_KEY = {b"lance-schema:unenforced-primary-key": b"true"}


def lance_schema(schema: pa.Schema, key: str | None) -> pa.Schema:
    """Without a key it takes no column that is not nullable."""
    if key is None:
        return pa.schema([field.with_nullable(True) for field in schema])
    return pa.schema([field.with_metadata(LANCE_KEY) if field.name == key else field for field in schema])


def lance_table(batch: pa.RecordBatch, key: str | None = None) -> pa.Table:
    """Its fastest form of input: a table."""
    return pa.Table.from_batches([batch.cast(lance_schema(batch.schema, key))])


def lance_rows(count: int, first_id: int = 0, key: str | None = None) -> pa.Table:
    return lance_table(rows(count, first_id), key)


def lance_dataset(folder: Path, base: pa.Table, indexes: Mapping[str, str] | None = None, maintained: bool = True) -> Any:
    """A dataset with MemWAL, ``indexes`` (column -> kind) on its base, and kept up to date in MemTables if ``maintained``."""
    try:
        import lance
    except ImportError as error:
        raise NotHere("pylance is not installed") from error
    dataset = lance.write_dataset(base, str(folder / "lance"))
    for column, kind in (indexes or {}).items():
        if kind in ("BTREE", "INVERTED"):
            dataset.create_scalar_index(column, cast(Any, kind))
        else:
            dataset.create_index(column, kind, num_partitions=max(1, base.num_rows // 4096))
    dataset.initialize_mem_wal(maintained_indexes=[index["name"] for index in dataset.list_indices()] if maintained else [])
    return dataset


def lance_shard(dataset: Any, shard: str | None = None, **options: Any) -> Any:
    """Its writer of a shard, a new one unless it is named."""
    return dataset.mem_wal_writer(shard or str(uuid.uuid4()), stats_log_interval_ms=0, **options)


def lance_writer(folder: Path, **options: Any) -> Any:
    """A Lance MemWAL writer. No primary key, no indexes: that is its fastest."""
    return lance_shard(lance_dataset(folder, lance_rows(1)), **options)


def lance_generations(dataset: Any, shard: str) -> list[tuple[int, str]]:
    """Number and folder name of what it has flushed, oldest first. Its Python interface does not tell."""
    folder = Path(dataset.uri.removeprefix("file://")) / "_mem_wal" / shard
    return sorted((int(path.name.rsplit("_", 1)[1]), path.name) for path in folder.iterdir() if "_gen_" in path.name)


def lance_flushed_rows(dataset: Any, shard: str) -> int:
    import lance

    folder = Path(dataset.uri.removeprefix("file://")) / "_mem_wal" / shard
    return sum(lance.dataset(str(folder / name)).count_rows() for _, name in lance_generations(dataset, shard))


Pairs = Sequence[tuple[bytes, bytes]]


def slate_rows(count: int, first_id: int = 0) -> Pairs:
    """The same rows as keys and values."""
    value = bytes(129)
    return [(i.to_bytes(8, "big"), value) for i in range(first_id, first_id + count)]


def with_slate(folder: Path, flush_interval: str, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    """Open SlateDB, do ``work`` with it, close it."""
    try:
        import slatedb.uniffi as slate
    except ImportError as error:
        raise NotHere("slatedb is not installed") from error

    async def run() -> Any:
        settings = slate.Settings.default()
        settings.set("flush_interval", json.dumps(flush_interval))
        builder = slate.DbBuilder(str(folder / "slate").lstrip("/"), slate.ObjectStore.resolve("file:///"))
        builder.with_settings(settings)
        db = await builder.build()
        try:
            return await work(db)
        finally:
            await db.shutdown()

    return asyncio.run(run())


async def slate_put(db: Any, pairs: Pairs) -> Any:
    """One atomic write; returns its handle."""
    if len(pairs) == 1:
        return await db.put(*pairs[0])
    import slatedb.uniffi as slate

    batch = slate.WriteBatch()
    for key, value in pairs:
        batch.put(key, value)
    return await db.write(batch)


def in_threads(count: int, seconds: float, put: Callable[[int], None]) -> float:
    """``count`` threads that put again and again; puts per second of all together."""
    done = [0] * count
    barrier = threading.Barrier(count + 1)
    stop = False
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            put(number)  # warm
            barrier.wait()
            while not stop:
                put(number)
                done[number] += 1
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    barrier.wait()
    start = time.perf_counter()
    time.sleep(seconds)
    stop = True
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - start
    if errors:
        raise errors[0]
    return sum(done) / elapsed


async def in_tasks(count: int, seconds: float, put: Callable[[int], Coroutine[Any, Any, None]]) -> float:
    """The same with coroutines, for a peer that has no blocking calls."""
    done = 0
    for number in range(count):
        await put(number)
    start = time.perf_counter()

    async def run(number: int) -> None:
        nonlocal done
        while time.perf_counter() - start < seconds:
            await put(number)
            done += 1

    await asyncio.gather(*(run(number) for number in range(count)))
    return done / (time.perf_counter() - start)
