"""The names of one shard's WAL, and the store they are in.

    wal/<wal id>/<shard>/<epoch:010d>/<position:020d>.arrow     entries and seals
    wal/<wal id>/<shard>.json                                   the marker

Owns: names. The entries of an epoch live under the epoch's own prefix, so a writer can only
ever collide with a seal, or with itself. The WAL id is random, so no two tables share a name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headgate.manifest import ChainPoint
from headgate.store import ObjectInfo, Store


@dataclass(frozen=True)
class WalSpace:
    """Where the entries of one shard are."""

    store: Store
    wal_id: str
    table_id: str
    shard: str

    @property
    def folder(self) -> str:
        return f"wal/{self.wal_id}/{self.shard}/"

    @property
    def marker_key(self) -> str:
        return f"wal/{self.wal_id}/{self.shard}.json"

    def epoch_folder(self, epoch: int) -> str:
        return f"wal/{self.wal_id}/{self.shard}/{epoch:010d}/"

    def key(self, epoch: int, position: int) -> str:
        return f"wal/{self.wal_id}/{self.shard}/{epoch:010d}/{position:020d}.arrow"

    def point_of(self, key: str) -> ChainPoint | None:
        """The epoch and position of a name; None for anything that is no entry's name."""
        folder = self.folder
        name = key[len(folder) :]
        epoch, position = name[:10], name[11:31]
        if len(name) != 37 or name[10] != "/" or name[31:] != ".arrow" or not key.startswith(folder):
            return None
        return ChainPoint(int(epoch), int(position)) if (epoch + position).isdecimal() and name.isascii() else None

    def list_from(self, epoch: int, position: int = 0) -> Iterator[tuple[ChainPoint, ObjectInfo]]:
        """All entries from a name on, this epoch's and later ones', by epoch, then position."""
        before = f"{self.epoch_folder(epoch)}{position - 1:020d}.arrow" if position > 0 else self.epoch_folder(epoch)
        for info in self.store.list(self.folder, start_after=before):
            point = self.point_of(info.key)
            if point is not None:
                yield point, info

    def names_from(self, epoch: int, position: int = 0) -> list[tuple[ChainPoint, str]]:
        """The names alone: all entries from a name on, by epoch, then position."""
        before = f"{self.epoch_folder(epoch)}{position - 1:020d}.arrow" if position > 0 else self.epoch_folder(epoch)
        found: list[tuple[ChainPoint, str]] = []
        cut, folder = len(self.folder) + 11, ""
        for key in self.store.keys(self.folder, start_after=before):
            if key[:cut] != folder:
                point = self.point_of(key)
                if point is None:
                    continue
                folder, epoch = key[:cut], point.epoch
            number = key[cut:-6]
            if len(number) == 20 and number.isdecimal() and number.isascii() and key.endswith(".arrow"):
                found.append((ChainPoint(epoch, int(number)), key))
        return found

    def list_epoch(self, epoch: int, position: int = 0) -> Iterator[tuple[ChainPoint, ObjectInfo]]:
        """The entries of one epoch from a position on."""
        folder = self.epoch_folder(epoch)
        for info in self.store.list(folder, start_after=f"{folder}{position - 1:020d}.arrow" if position > 0 else ""):
            point = self.point_of(info.key)
            if point is not None:
                yield point, info
