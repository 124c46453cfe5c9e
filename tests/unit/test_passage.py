"""Files that are read for the last time: the system may forget what was read, and nothing else changes."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from tests.files import open_files

import headgate as hg
from headgate.columnar import Slice, passage
from headgate.columnar.lance import LanceColumnar
from headgate.compact_ranges import _Window
from headgate.store import Location

ROWS = 200_000
PATH = "runs/one/00000.lance"

Advised = list[tuple[int, int]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slice of some 22 MB: the wide column has several pages, the narrow one a single page at the end."""
    place = tmp_path_factory.mktemp("a table, 100% of ü")
    wide = pa.FixedSizeBinaryArray.from_buffers(pa.binary(100), ROWS, [None, pa.py_buffer(np.random.default_rng(1).bytes(100 * ROWS))])
    table = pa.table({"id": np.arange(ROWS), "wide": wide.cast(pa.binary())})
    LanceColumnar(Location.parse(place)).write(PATH, table.schema, iter(table.to_batches(max_chunksize=10_000)))
    return place


@pytest.fixture
def part(place: Path) -> Slice:
    return LanceColumnar(Location.parse(place)).open(PATH)


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Advised:
    """The stretches of the file that were given back, in order: first byte and the one after the last."""
    found: Advised = []

    def note(_: int, position: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        found.append((position, position + size))

    monkeypatch.setattr(passage, "_ADVISE", note)
    return found


def data_file(place: Path) -> Path:
    (file,) = (place / PATH / "data").iterdir()
    return file


def test_the_same_rows_come_and_all_of_the_file_is_given_back(place: Path, part: Slice, advised: Advised) -> None:
    rows = pa.Table.from_batches(part.read_through(batch_rows=7_000))
    assert rows.equals(pa.Table.from_batches(part.scan(["id", "wide"], batch_rows=7_000)))
    stretches = sorted(advised)
    assert all(end <= start for (_, end), (start, _) in pairwise(stretches)), "no byte twice"
    assert sum(end - start for start, end in stretches) > 0.95 * data_file(place).stat().st_size


def test_nothing_is_given_back_before_it_was_read(place: Path, part: Slice, advised: Advised) -> None:
    """The wide column's bytes are most of the file: so many of them as rows were taken, and a page less."""
    size, taken = data_file(place).stat().st_size, 0
    for batch in part.read_through(batch_rows=5_000):
        assert sum(end - start for start, end in advised) <= 1.02 * size * taken / ROWS
        taken += batch.num_rows
    assert len(advised) > 4
    assert advised[0][0] == 0, "the first page goes first"


def test_of_a_part_only_the_part_is_given_back(part: Slice, advised: Advised) -> None:
    window = _Window(part, ROWS // 2, ROWS)
    assert pa.Table.from_batches(window.read_through(batch_rows=5_000)).column("id").to_pylist() == list(range(ROWS // 2, ROWS))
    second = set(advised)
    advised.clear()
    for _ in _Window(part, 0, ROWS // 2).read_through(batch_rows=5_000):
        pass
    assert second
    assert advised
    assert not second & set(advised)


def test_whoever_stops_reading_leaves_no_file_open(place: Path, part: Slice) -> None:
    batches = part.read_through(batch_rows=5_000)
    next(batches)
    del batches
    assert open_files(place) == 0


def test_a_system_that_takes_no_advice_reads_all_the_same(part: Slice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError("not here")

    for advise in (refuse, None):
        monkeypatch.setattr(passage, "_ADVISE", advise)
        assert sum(batch.num_rows for batch in part.read_through(batch_rows=9_000)) == ROWS


@pytest.mark.parametrize("strange", [None, SimpleNamespace(), SimpleNamespace(num_rows=1, columns=None), SimpleNamespace(num_rows=len)])
def test_a_file_that_tells_nothing_about_its_pages_is_read_all_the_same(
    part: Slice, monkeypatch: pytest.MonkeyPatch, strange: object
) -> None:
    monkeypatch.setattr("lance.file.LanceFileReader.metadata", lambda _: strange)
    assert sum(batch.num_rows for batch in part.read_through(batch_rows=9_000)) == ROWS


def test_an_empty_page_is_not_the_rest_of_the_file(place: Path, advised: Advised) -> None:
    def buffer(position: int, size: int) -> SimpleNamespace:
        return SimpleNamespace(position=position, size=size)

    pages = [SimpleNamespace(buffers=[buffer(0, 100), buffer(100, 0)]), SimpleNamespace(buffers=[buffer(100, 100)])]
    empty = [SimpleNamespace(buffers=[buffer(50, 0)])]
    columns = [SimpleNamespace(pages=pages), SimpleNamespace(pages=empty), SimpleNamespace(pages=[])]
    way = passage.Passage(str(data_file(place)), SimpleNamespace(num_rows=10, columns=columns))
    for row in range(11):
        way.passed(row)
    way.close()
    assert advised == [(0, 100), (100, 200)]


def test_files_that_others_may_read_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone's compaction merges files of its parent, which goes on with them."""
    monkeypatch.setattr("headgate.columnar.lance._READER_BYTES_MAX", 0)
    read: list[str] = []
    monkeypatch.setattr("headgate.columnar.lance.passage", lambda path, *_: read.append(path))
    parent = hg.create_table(tmp_path / "parent", pa.schema([pa.field("id", pa.int64(), False)]), key="id")
    parent.load(pa.table({"id": [1, 2, 3]}))
    clone = hg.clone(parent.uri, tmp_path / "clone")
    for table in (clone, parent):
        table.load(pa.table({"id": [2, 4]}))
        table.compact(full=True)
        assert sorted(table.scan().to_arrow().column("id").to_pylist()) == [1, 2, 3, 4]
    own = [path for path in read if path.startswith(str(tmp_path / "clone"))]
    assert own, "what the clone has itself is given back"
    assert len(read) - len(own) == 2, "and the parent's by the parent only"


def test_pages_really_go(place: Path, part: Slice) -> None:
    if not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("this system does not tell what it keeps")
    file = os.open(data_file(place), os.O_RDONLY)

    def is_kept(at: int) -> bool:
        try:
            return os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False

    try:
        for _ in part.scan(["id", "wide"]):
            pass
        ats = range(0, data_file(place).stat().st_size, 1 << 16)
        try:
            before = sum(map(is_kept, ats))
        except OSError:
            pytest.skip("this file system does not tell what it keeps")
        for _ in part.read_through(batch_rows=5_000):
            pass
        assert sum(map(is_kept, ats)) < before // 2
    finally:
        os.close(file)
