"""A commit is what is read back, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headgate.clock import SYSTEM_CLOCK
from headgate.errors import CorruptEntryError
from headgate.manifest import chain as chains
from headgate.manifest.chain import ManifestChain
from headgate.manifest.document import encode_document
from headgate.manifest.model import ShardManifest, WalState
from headgate.store.memory import MemoryStore

FOLDER = "shards/0000-t/manifest/"


class Swapping(MemoryStore):
    """Shows other bytes than were created, once."""

    swap: Callable[[bytes], bytes] | None = None

    def get(self, key: str) -> memoryview:
        data = super().get(key)
        if self.swap is not None:
            swap, self.swap = self.swap, None
            return memoryview(swap(bytes(data)))
        return data


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Swapping:
    return Swapping(f"chain-{request.node.name}", "")


def chain_on(store: MemoryStore) -> ManifestChain[ShardManifest]:
    return ManifestChain(store, FOLDER, ShardManifest, SYSTEM_CLOCK)


def begun(store: MemoryStore) -> ManifestChain[ShardManifest]:
    chain = chain_on(store)
    assert chain.create_first(
        ShardManifest(shard="0000", table_id="t", version=0, id="first", folder=FOLDER, wal=WalState(id="w", uri="memory://w"))
    )
    return chain


def test_what_comes_back_as_it_was_sent_is_not_read_twice(store: Swapping, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = begun(store)
    chain.load()
    monkeypatch.setattr(chains, "decode_document", lambda *_: pytest.fail("it was read again"))
    made = chain.commit(lambda manifest: manifest.but(splits_begun=3))
    assert chain.seen is made
    assert chain.commit(lambda _: None) is made
    monkeypatch.undo()
    assert chain_on(store).load() == made, "others read the same"


def test_bytes_that_came_back_damaged_are_no_commit(store: Swapping) -> None:
    chain = begun(store)
    chain.load()
    store.swap = lambda data: data.replace(b'"0000"', b'"0001"', 1)
    with pytest.raises(CorruptEntryError):
        chain.commit(lambda manifest: manifest.but(splits_begun=3))


def test_another_ones_manifest_of_the_same_version_is_no_commit_of_ours(store: Swapping) -> None:
    chain, tries = begun(store), 0
    first = chain.load()

    def change(manifest: ShardManifest) -> ShardManifest:
        nonlocal tries
        tries += 1
        if tries == 1:
            other = first.but(version=1, id="other", history=(first.id,), splits_begun=7)
            store.create(f"{FOLDER}{1:020d}.json", encode_document(other))
        return manifest.but(splits_begun=manifest.splits_begun + 1)

    made = chain.commit(change)
    assert tries == 2
    assert (made.version, made.splits_begun, made.history) == (2, 8, (first.id, "other"))
