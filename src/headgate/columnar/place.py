"""Which columnar files a place gets."""

from __future__ import annotations

from headgate.columnar.arrow import ArrowColumnar
from headgate.columnar.base import Columnar
from headgate.columnar.lance import LanceColumnar
from headgate.store import Location, Store


def open_columnar(place: Location, store: Store, *, fsync: bool = True) -> Columnar:
    """Lance, except in memory, where Lance has no place that two handles could share."""
    if place.scheme == "memory":
        return ArrowColumnar(store)
    return LanceColumnar(place, fsync=fsync)
