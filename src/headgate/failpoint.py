"""Named points between the steps of the protocol, where a test may stop, crash or look.

Owns: the hook. Does not own: what happens there; production code has no hook and pays one
comparison. Names read ``room.step``, e.g. ``claim.committed``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_hook: Callable[[str], None] | None = None


def failpoint(name: str) -> None:
    """Tell the hook, if there is one, that the step called ``name`` is done."""
    if _hook is not None:
        _hook(name)


@contextmanager
def hooked(hook: Callable[[str], None]) -> Iterator[None]:
    """Install ``hook`` for the time of a ``with`` block; for tests."""
    global _hook
    before, _hook = _hook, hook
    try:
        yield
    finally:
        _hook = before
