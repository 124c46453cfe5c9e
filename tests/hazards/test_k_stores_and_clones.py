"""K. Checkpoints, clones, stores: what the log alone can show of it; the rest comes with them."""

from __future__ import annotations

import pyarrow as pa

import headgate as hg
from headgate.failpoint import hooked
from headgate.wal.collect import collect_entries

CONFIG = hg.ShardWriterConfig(enable_memtable=False)
SCHEMA = pa.schema([("id", pa.int64())])


def test_k12_a_trim_between_claim_and_verify_keeps_its_producers_and_theirs(tmp_path):
    """Found by the simulation: verify wrote the producers it had read before, over those that a trim had saved."""
    table = hg.create_table(tmp_path / "t", SCHEMA)
    shard = table.shard("0000")
    incumbent = shard.writer(CONFIG)
    done = []

    def trim_once(name: str) -> None:
        if name == "fence.claimed" and not done:
            done.append(name)
            incumbent.put([{"id": 1}], producer="p", sequence=0).wait()
            incumbent.put([{"id": 2}], producer="q", sequence=0).wait()
            table.trim(1)
            collect_entries(shard.log, dry_run=False)

    with hooked(trim_once):
        successor = shard.writer(CONFIG)
    receipt = successor.put([{"id": 1}], producer="p", sequence=0).wait()
    successor.close()
    incumbent.abort()

    assert done
    assert receipt.duplicate
    assert shard.log.manifests.load().producers.keys() == {"p", "q"}
