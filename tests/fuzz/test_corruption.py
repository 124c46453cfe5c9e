"""Every byte of every kind of object, flipped, cut, swapped, appended to: a typed error, or no effect.

HEADGATE_FUZZ_LONG=1: every bit pattern through every path.
"""

from __future__ import annotations

import itertools
import random

import pytest
from fuzz_table import LONG, Judge, Objects, tables

PATTERNS = (0x01, 0x80, 0xFF, 0x20, 0x55)


@pytest.fixture(scope="module")
def right() -> Objects:
    return tables()


@pytest.fixture
def judge(right: Objects) -> Judge:
    return Judge(right)


def _keys(right: Objects, part: str) -> list[str]:
    return sorted(key for key in right if key.startswith("t/") and part in key)


def kinds(right: Objects) -> dict[str, str]:
    """One of each kind of object that shard 0000 needs now."""
    entries = _keys(right, "/0000/")
    seals = [key for key in entries if len(right[key]) == 1024]
    data = [key for key in entries if key not in seals]
    return {
        "first-entry": data[0],
        "delete": data[-2],
        "last-entry": data[-1],
        "seal": seals[0],
        "marker": _keys(right, "/0000.json")[0],
        "shard-manifest": _keys(right, "shards/0000-")[-1],
        "table-manifest": _keys(right, "t/table/")[-1],
    }


KINDS = ("first-entry", "delete", "last-entry", "seal", "marker", "shard-manifest", "table-manifest")


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_is_noticed(right, judge, kind):
    key = kinds(right)[kind]
    body = right[key]
    for at in range(len(body)):
        for pattern in PATTERNS if LONG else (PATTERNS[at % len(PATTERNS)],):
            changed = bytearray(body)
            changed[at] ^= pattern
            # Readers do not ask for the marker; whoever verifies or writes does.
            every = LONG or kind == "marker"
            noticed = judge.look(
                f"flipped byte {at} of {key} by {pattern:#x}",
                {**right, key: bytes(changed)},
                deep=every or at % 7 == 0,
                write=every or at % 13 == 0,
            )
            assert noticed, f"byte {at} of {key}"
    judge.report(f"flips of a {kind}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_object_is_noticed(right, judge, kind):
    key = kinds(right)[kind]
    body = right[key]
    step = 1 if LONG or len(body) < 500 else 3
    for length in sorted({*range(0, len(body), step), len(body) - 1, len(body) - 2, len(body) - 16}):
        every = LONG or kind == "marker"
        what = f"cut {key} to {length}"
        assert judge.look(what, {**right, key: body[:length]}, deep=every, write=every or length % 17 == 0), what
    judge.report(f"cuts of a {kind}")


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_appended_are_noticed(right, judge, kind):
    key = kinds(right)[kind]
    body = right[key]
    for more in (b"\0", b"\n", b" ", b"}", b"\0" * 8, b"\0" * 4096, body, body[-16:], body[-2:], b"x" * 17):
        what = f"appended {more[:8]!r} × {len(more)} to {key}"
        assert judge.look(what, {**right, key: body + more}, deep=True, write=True), what
    judge.report(f"appended to a {kind}")


def test_an_object_that_is_gone_is_noticed_or_not_needed(right, judge):
    for key in sorted(right):
        if not key.startswith("t/"):
            continue
        less = dict(right)
        del less[key]
        latest = [keys[-1] for keys in (_keys(right, "shards/0000-"), _keys(right, "shards/0001-"), _keys(right, "t/table/"))]
        if key in latest:
            continue  # the version before is then the latest, and nothing can tell; only compare-and-swap protects it
        judge.look(f"gone {key}", less, deep=True, write=False, shards=("0000", "0001"))
    judge.report("objects gone")


def _twins(one: str, other: str) -> bool:
    """Manifests of the same version of two shards."""
    return "/shards/" in one and "/shards/" in other and one.rsplit("/", 1)[1] == other.rsplit("/", 1)[1]


def _kin(one: str, other: str) -> bool:
    """May one be mistaken for the other?"""
    return one.startswith("t/") and (one.rsplit("/", 1)[1] == other.rsplit("/", 1)[1] or one.rsplit("/", 1)[0] == other.rsplit("/", 1)[0])


def test_two_objects_swapped_are_noticed_or_not_needed(right, judge):
    """Of the same table, of its shards, of another table."""
    pairs = [pair for pair in itertools.combinations(sorted(right), 2) if not _twins(*pair)]
    if not LONG:
        strangers = [pair for pair in pairs if not _kin(*pair)]
        pairs = [pair for pair in pairs if _kin(*pair)] + random.Random(7).sample(strangers, 50)
    for one, other in pairs:
        swapped = {**right, one: right[other], other: right[one]}
        judge.look(f"swapped {one} and {other}", swapped, deep=LONG, write=True, shards=("0000", "0001"))
    judge.report("pairs swapped")


def test_an_object_put_under_another_name_is_noticed_or_not_needed(right, judge):
    """A copy in the place of another: a restore gone wrong."""
    pairs = [pair for pair in itertools.permutations(sorted(right), 2) if not _twins(*pair)]
    for one, other in pairs if LONG else random.Random(8).sample(pairs, 150):
        judge.look(f"copied {one} over {other}", {**right, other: right[one]}, deep=LONG, write=True, shards=("0000", "0001"))
    judge.report("copies under other names")


def test_a_manifest_of_another_shard_is_noticed(right, judge):
    twins = [(one, other) for one, other in itertools.permutations(sorted(right), 2) if _twins(one, other)]
    for one, other in twins:
        judge.look(f"copied {one} over {other}", {**right, other: right[one]}, deep=True, write=True, shards=("0000", "0001"))
        judge.look(f"swapped {one} and {other}", {**right, one: right[other], other: right[one]}, deep=True, write=True)
    judge.report("manifests of another shard")


def test_random_bytes_are_noticed(right, judge):
    chance = random.Random(9)
    for kind, key in kinds(right).items():
        for size in [0, 1, 16, 1024, 1032, len(right[key])] * (10 if LONG else 2):
            what = f"random {size} bytes as {kind}"
            assert judge.look(what, {**right, key: chance.randbytes(size)}, deep=True, write=True), what
    judge.report("random bytes")
