"""Which columnar files a place gets."""

from __future__ import annotations

from headgate.columnar.arrow import ArrowColumnar
from headgate.columnar.base import Columnar
from headgate.columnar.lance import LanceColumnar
from headgate.store import Location, Store


def open_columnar(place: Location, store: Store, *, fsync: bool = True) -> Columnar:
    """Lance, except in memory, where Lance has no place that two handles could share."""
    columnar: Columnar = ArrowColumnar(store) if place.scheme == "memory" else LanceColumnar(place, fsync=fsync)
    columnar.elsewhere = _Elsewhere(place)
    return columnar


class _Elsewhere:
    """Files of other tables, for reading; each opened once."""

    def __init__(self, place: Location) -> None:
        self._place = place
        self._known: dict[str, Columnar] = {}

    def __call__(self, uri: str) -> Columnar:
        known = self._known.get(uri)
        if known is None:
            place = self._place.beside(uri)
            known = ArrowColumnar(place.open()) if place.scheme == "memory" else LanceColumnar(place)
            self._known[uri] = known  # of two threads one is forgotten: both are right
        return known
