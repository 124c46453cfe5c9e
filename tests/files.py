"""What a process holds open."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


def open_files(place: Path, at_most: int = 0) -> int:
    """How many below ``place`` are open; more than ``at_most`` only if they stay so for seconds: Lance's own threads close them."""
    deadline = time.monotonic() + 10
    while (found := _open_now(place)) > at_most and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _open_now(place: Path) -> int:
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(place))
    return found
