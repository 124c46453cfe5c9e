"""Reading a file for the last time: the system need not keep what was read.

Owns: what of a Lance file can go from the page cache when so many of its rows were read. Does not own: the reading (lance).

Compaction reads files that it replaces and writes as much anew. If both stayed, each compaction would push twice its size of
other things out of memory; and pages that are given back are the next to be written to, so that no fresh ones have to be
found, which costs more than all the rest of writing where memory is lent by a host.

This is advice and nothing else. Whoever still reads an older snapshot finds the same bytes on the disk. Pages are taken to
have rows by their share of their column's bytes, which is nearly so; a wrong guess costs one read of a page.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from typing import Any

_ADVISE = getattr(os, "posix_fadvise", None)  # not everywhere


def passage(path: str, metadata: Callable[[], Any], start: int) -> Passage | None:
    """None: advice is not taken here, or the file tells nothing that we understand."""
    if _ADVISE is None:
        return None
    try:
        return Passage(path, metadata(), start)
    except Exception:  # whatever it is: whoever reads the file finds out, if it matters
        return None


class Passage:
    """A file, given back page by page while it is read from the first row to the last.

    Args:
        metadata: the file's, as Lance tells it.
        start: the row at which reading begins; what lies before it stays.
    """

    def __init__(self, path: str, metadata: Any, start: int = 0) -> None:
        self._rows = max(1, metadata.num_rows)
        pages: list[tuple[float, int, int]] = []
        for column in metadata.columns:
            sizes = [sum(buffer.size for buffer in page.buffers) for page in column.pages]
            ends = [end / max(1, sum(sizes)) for end in accumulate(sizes)]
            for end, page in zip(ends, column.pages, strict=True):
                # An empty one would mean: to the end of the file.
                pages += [(end, buffer.position, buffer.size) for buffer in page.buffers if buffer.size > 0 and end > start / self._rows]
        self._pages = sorted(pages, reverse=True)
        self._file = -1
        if _ADVISE is not None:
            with suppress(OSError):
                self._file = os.open(path, os.O_RDONLY)

    def passed(self, row: int) -> None:
        """All rows before this one were read."""
        while self._pages and self._pages[-1][0] <= row / self._rows:
            _, position, size = self._pages.pop()
            if _ADVISE is not None and self._file >= 0:
                with suppress(OSError, OverflowError):
                    _ADVISE(self._file, position, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)
