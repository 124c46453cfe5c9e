"""Who may import whom: data flows down the list of rooms and never up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import headgate

ROOT = Path(headgate.__file__).parent
ORDER = [
    "errors",
    "failpoint",
    "clock",
    "ahead",
    "meters",
    "store",
    "manifest",
    "columnar",
    "wal",
    ("config", "schema", "sharding", "indexes"),
    ("keys", "watch", "quarantine"),
    "memtable",
    "run",
    "view",
    ("checkpoint", "attempt"),
    "load",
    "transaction",
    "change_rows",
    "feed",
    "consumer",
    "merge",
    "run_writer",
    "compact",
    "query",
    "flush",
    ("admission", "cleanness", "auto_compact", "writer_stats"),
    "writer",
    "shard",
    ("new_shards", "table_ack", "snapshot", "changes", "bulk_files", "compact_ranges", "retired"),
    "cuts",
    "change_batches",
    ("bulk", "heirs"),
    "table_writer",
    "life",
    "table",
    "tables",
    "metrics",
]
OUTSIDE = {"cli", "demo", "spark", "simulation"}
"""Stand above everything; the public names are what cli, demo and spark may use."""
BELOW = {"cli": {"simulation", "demo", "spark"}, "demo": {"spark"}}


def level(room: str) -> int:
    for number, rooms in enumerate(ORDER):
        if room == rooms or (isinstance(rooms, tuple) and room in rooms):
            return number
    raise AssertionError(f"the room {room!r} has no place in the order of layers: give it one here")


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the dotted name of everything of ours that a module imports, wherever it does so."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "headgate")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they lead"
            if node.module and node.module.split(".")[0] == "headgate":
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    is_module = (ROOT.parent / whole.replace(".", "/")).is_dir() or (
                        ROOT.parent / (whole.replace(".", "/") + ".py")
                    ).exists()
                    yield node.lineno, whole if is_module else node.module


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_nothing_from_above_it(path: Path) -> None:
    room = room_of(path)
    for line, name in imports_of(path):
        target = name.split(".")[1] if "." in name else "the public API"
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        if room in ("cli", "demo", "spark"):
            assert target in (room, "the public API") or target in BELOW.get(room, ()), f"{where}: the public API only"
        elif room == "simulation":
            assert target not in ("cli", "spark", "the public API"), where
        else:
            assert target != "the public API", f"{where}: a circle"
            assert target not in OUTSIDE, where
            assert target == room or level(target) < level(room), f"{where}: upward"


def test_the_wal_knows_stores_manifests_and_the_seams_only() -> None:
    known = {name.split(".")[1] for path in (ROOT / "wal").glob("*.py") for _, name in imports_of(path)}
    assert known == {"wal", "store", "manifest", "clock", "errors", "failpoint", "meters"}


def test_only_the_store_for_object_stores_knows_obstore() -> None:
    users = {str(path.relative_to(ROOT)) for path in modules() if "obstore" in {n.split(".")[0] for n in _third_parties(path)}}
    assert users == {"store/object.py"}


def _third_parties(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_time_threads_and_randomness_come_from_the_clock_alone() -> None:
    seams = {"time", "threading", "random", "secrets", "_thread", "datetime"}
    allowed = {"clock.py", "config.py", "store/local.py", "store/memory.py", "store/object.py", "store/faulty.py"}
    for path in modules():
        name = str(path.relative_to(ROOT))
        if room_of(path) in OUTSIDE or name in allowed:
            continue
        used = seams & {module.split(".")[0] for module in _third_parties(path)}
        assert not used, f"{name} uses {used}, not the Clock"


def test_nothing_stored_is_ever_unpickled_or_evaluated() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), path
        assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & {m.split(".")[0] for m in _third_parties(path)}, path


def test_a_module_of_the_package_says_what_it_is_for() -> None:
    for path in modules():
        assert ast.get_docstring(ast.parse(path.read_text())), path
