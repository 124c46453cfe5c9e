"""Cuts through the changes of all shards, and what lies between two of them, for workers.

Owns: what they are, and how they are written down. Does not own: where batches end (change_batches).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from headgate.errors import InvalidInputError
from headgate.feed import Offset
from headgate.snapshot import Part


class CutPlace(NamedTuple):
    """How far one shard was read. ``snapshot``: the pin whose rows were not given yet; changes go on at the offset after them."""

    position: int = 0
    load: int = 0
    snapshot: str | None = None
    given: str | None = None
    """The pin whose rows the batch before gave: whoever goes on from here lets go of it."""

    @property
    def offset(self) -> Offset:
        return Offset(self.position, self.load)


Cut = dict[str, CutPlace]


def cut_to_json(cut: Mapping[str, CutPlace]) -> dict[str, list[Any]]:
    """For JSON: the same cut is the same text."""
    return {shard: _as_list(place) for shard, place in sorted(cut.items())}


def _as_list(place: CutPlace) -> list[Any]:
    return list(place if place.given is not None else place[:3] if place.snapshot is not None else place.offset)


def cut_from_json(value: Any) -> Cut:
    """Raises InvalidInputError: it is none."""
    try:
        cut = {}
        for shard, place in value.items():
            position, load, snapshot, given = (*place, None, None)[:4]
            if len(place) < 2 or type(position) is not int or type(load) is not int or position < 0 or load < 0:
                raise ValueError(shard)
            if not isinstance(shard, str) or not all(pin is None or isinstance(pin, str) for pin in (snapshot, given)):
                raise ValueError(shard)
            cut[shard] = CutPlace(position, load, snapshot, given)
    except (ValueError, TypeError, AttributeError):
        raise InvalidInputError(f"{value!r} is no offset", hint='{"0000": [position, load]}, for each shard') from None
    return cut


class Stretch(NamedTuple):
    """Changes of one shard between two offsets; or, of its snapshot, one part."""

    shard: str
    start: Offset
    end: Offset
    snapshot: str | None = None
    part: Part | None = None


@dataclass(frozen=True)
class ChangePart:
    """What one worker reads. Pickles, and holds no rows."""

    stretches: tuple[Stretch, ...]
