"""Manifests: a shard's or a table's whole state in one small object, a new version for each change."""

from headgate.manifest.chain import ManifestChain
from headgate.manifest.model import ChainPoint, ShardManifest, TableManifest

__all__ = ["ChainPoint", "ManifestChain", "ShardManifest", "TableManifest"]
