"""Dropping a table.

Owns: the order in which it goes. Does not own: what clones need of it (clone).

  1. The table's manifest says "dropping": nobody opens it, clones it or makes it anew.
  2. Pins of clones are looked for now, and not before: a cloner pins first and looks at the table's manifest then. So either
     we see its pin and put the table back, or it sees us and takes its pin away.
  3. Every shard's manifest says "dropped": writers are fenced by it, and nobody can claim (F11).
  4. Files are deleted. Of each shard the last manifest stays: t0 somebody loads version 5 to claim the shard, and stalls ·
     t1 the table is dropped, with all its manifests · t2 he creates version 6, finds it the latest, and writes to a table
     that is gone. With the last one left, he finds that his is not the latest.
  5. Pins that this table, as a clone, has in its parent go.
  6. The table's manifest says "dropped". It stays for the same reason; a table may be made there again, and goes on from it.

Whoever dies on the way leaves a table that cannot be opened; dropping again goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from headgate.errors import InvalidInputError, NotFoundError, ObjectMissingError
from headgate.failpoint import failpoint
from headgate.life.clone import drop_pins
from headgate.life.create import load_if_there
from headgate.manifest import ShardManifest, TableManifest
from headgate.manifest.model import IN_TABLE
from headgate.shard import Places
from headgate.store import ObjectInfo, Store
from headgate.wal.log import ShardLog

_DELETES_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class DropReport:
    """What was deleted."""

    objects: int
    bytes: int


def drop(places: Places) -> DropReport:
    """Drop a table, or go on with that.

    Raises:
        NotFoundError: there is none.
        InvalidInputError: clones read its files; nothing was dropped.
    """
    store = places.table_store()
    chain = places.table_manifests(store)
    found = load_if_there(chain)
    if found is None or found.state == "dropped":
        raise NotFoundError(f"there is no table at {places.table.uri}", hint="check the URI; it may have been dropped")
    table_id = found.table_id

    # 1. From here on nobody opens or clones it.
    manifest = chain.commit(lambda m: _dropping(places, m, table_id))
    failpoint("drop.begun")
    logs = [places.open_log(name, table_id) for name in (*manifest.shards, *manifest.retired)]

    # 2. Who had cloned it by then still needs it.
    clones = sorted({clone for log in logs for clone in _clones(log)})
    if clones:
        chain.commit(lambda m: m.but(state="active") if m.table_id == table_id and m.state == "dropping" else None)
        raise InvalidInputError(
            f"{places.table.uri} has clones that read its files: {', '.join(clones[:5])}{' …' if len(clones) > 5 else ''}",
            hint="detach() or drop them first",
        )
    failpoint("drop.checked")

    # 3. Fence, for good.
    last_of = {log.shard: state for log in logs if (state := _retire(log)) is not None}
    failpoint("drop.fenced")

    # 4. Delete. The log first: it is of no use without the manifests, and they say where it is.
    count = size = 0
    wal_store = places.wal_store()
    prefixes = dict.fromkeys([f"wal/{manifest.wal_id}/", *(f"wal/{state.wal.id}/" for state in last_of.values())])
    for prefix in prefixes:
        count, size = _deleted(wal_store, wal_store.list(prefix), count, size)
        wal_store.prune(prefix)
    failpoint("drop.log")
    last_keys = {log.manifests.folder: log.manifests.key(last_of[log.shard].version) for log in logs if log.shard in last_of}
    of_table = (info for info in store.list("shards/") if info.key.split("/", 2)[1].endswith(f"-{table_id}"))
    count, size = _deleted(store, (info for info in of_table if not _stays(info.key, last_keys)), count, size)
    for log in logs:
        store.prune(f"shards/{log.shard}-{table_id}/runs/")
    for prefix in ("txn/", "quarantine/"):
        # These have no table's id in their names: if another has finished this drop, they are of the table that was made since.
        now = chain.load()
        if now.table_id != table_id or now.state != "dropping":
            break
        count, size = _deleted(store, store.list(prefix), count, size)
        store.prune(prefix)
    failpoint("drop.deleted")

    # 5. As a clone it needs nothing of its parent any more.
    if manifest.parent is not None:
        drop_pins(places, table_id, manifest.parent)
    failpoint("drop.unpinned")

    # 6. Done.
    last = chain.commit(lambda m: m.but(state="dropped", parent=None) if m.table_id == table_id and m.state == "dropping" else None)
    if last.table_id == table_id:
        older = (info for info in store.list("table/") if info.key < chain.key(last.version))
        count, size = _deleted(store, older, count, size)
    return DropReport(count, size)


def _dropping(places: Places, manifest: TableManifest, table_id: str) -> TableManifest | None:
    if manifest.table_id != table_id or manifest.state == "dropped":
        raise NotFoundError(f"the table at {places.table.uri} was dropped by somebody else", hint="look what is there now")
    return manifest.but(state="dropping") if manifest.state != "dropping" else None


def _clones(log: ShardLog) -> Iterator[str]:
    try:
        manifest = log.manifests.load()
    except NotFoundError:  # a clone, or a table, that was never finished
        return
    if manifest.state == "dropped":
        return
    for record in manifest.checkpoints.values():
        if record.clone is not None and not record.clone.startswith(IN_TABLE):
            yield record.clone


def _retire(log: ShardLog) -> ShardManifest | None:
    try:
        state = log.manifests.commit(lambda m: m.but(state="dropped", checkpoints={}, attempts={}) if m.state != "dropped" else None)
    except NotFoundError:
        return None
    failpoint("drop.shard")
    return state


def _stays(key: str, last_keys: Mapping[str, str]) -> bool:
    """Is it a shard's last manifest, or a later one?

    t0 A and B drop · t1 A has seen version 5 say "dropped", others commit 6 to it, as one may, B has seen that · t2 A deletes all
    but 5, B all but 6, and none is left.
    """
    last = last_keys.get(f"{key.rpartition('/')[0]}/")
    return last is not None and key >= last


def _deleted(store: Store, infos: Iterable[ObjectInfo], count: int, size: int) -> tuple[int, int]:
    some: list[ObjectInfo] = []
    for info in infos:
        some.append(info)
        if len(some) == _DELETES_AT_ONCE:
            count, size = _delete(store, some, count, size)
            some = []
    return _delete(store, some, count, size)


def _delete(store: Store, some: list[ObjectInfo], count: int, size: int) -> tuple[int, int]:
    if some:
        try:
            store.delete([info.key for info in some])
        except ObjectMissingError:
            pass  # somebody else drops it too
        failpoint("drop.some")
    return count + len(some), size + sum(info.size_bytes for info in some)
