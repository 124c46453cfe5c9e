"""Places to put tables: in memory, on disk, in S3, in Azure, and in S3 through a proxy."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from stores_support import SCHEMA

import headgate as hg
from headgate.store import Location, Store

sys.path.insert(0, str(Path(__file__).parent.parent))  # servers.py, whichever way pytest imports this
from servers import Proxy, Server, ServerMissing, azurite_server, fault_proxy, moto_server

_numbers = itertools.count()


@dataclass(frozen=True)
class Place:
    """Somewhere to put things. Each has a part of its server to itself."""

    kind: str
    root: str
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    def uri(self, path: str = "t") -> str:
        return f"{self.root}/{path}"

    def store(self, path: str = "t") -> Store:
        return Location.parse(self.uri(path), self.options).open()

    def create_table(self, path: str = "t", **more: Any) -> hg.Table:
        return hg.create_table(self.uri(path), SCHEMA, key="id", storage_options=self.options, **more)

    def open_table(self, path: str = "t", **more: Any) -> hg.Table:
        return hg.open_table(self.uri(path), self.options, **more)


def place_on(server: Server, kind: str) -> Place:
    return Place(kind, server.uri(f"place-{next(_numbers)}"), server.options)


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def azure() -> Iterator[Server]:
    try:
        with azurite_server() as server:
            yield server
    except ServerMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def _proxy(s3: Server) -> Iterator[Proxy]:
    with fault_proxy(s3) as proxy:
        yield proxy


@pytest.fixture
def proxy(_proxy: Proxy) -> Iterator[Proxy]:
    """Before the S3 server; calm when a test begins and when it ends."""
    _proxy.calm()
    yield _proxy
    _proxy.calm()


def _place(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if kind == "memory":
        return Place(kind, f"memory://place-{next(_numbers)}")
    if kind == "local":
        return Place(kind, str(tmp_path / "place"))
    if kind == "s3":
        return place_on(request.getfixturevalue("s3"), kind)
    if kind == "azure":
        return place_on(request.getfixturevalue("azure"), kind)
    return place_on(request.getfixturevalue("proxy").server, kind)


@pytest.fixture(params=["memory", "local", "s3", "azure"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """One after another, each kind of store that there is, asked directly."""
    return _place(request.param, request, tmp_path)


@pytest.fixture(params=["memory", "local", "s3-one-put-at-a-time", "azure"])
def racing_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """The same for those who race for a name: S3 through the proxy, see servers.py."""
    return _place(request.param, request, tmp_path)
