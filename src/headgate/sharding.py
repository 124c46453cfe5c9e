"""How rows find their shard.

Owns: the rules and their names. Does not own: the shards themselves.
"""

from __future__ import annotations

import pyarrow as pa

from headgate.errors import InvalidInputError
from headgate.manifest.model import ShardingRule

SHARDS_MAX = 10_000


def unsharded() -> ShardingRule:
    """One shard for all rows."""
    return ShardingRule()


def bucket(column: str, buckets: int) -> ShardingRule:
    """``buckets`` shards, chosen by a hash of a key column."""
    if isinstance(buckets, bool) or not isinstance(buckets, int) or not 1 <= buckets <= SHARDS_MAX:
        raise InvalidInputError(f"{buckets!r} buckets", hint=f"1 to {SHARDS_MAX}")
    return ShardingRule(kind="bucket", column=column, buckets=buckets)


def identity(column: str) -> ShardingRule:
    """A shard for each value of a key column, made on first use."""
    return ShardingRule(kind="identity", column=column)


def check_sharding(rule: ShardingRule, schema: pa.Schema, key: tuple[str, ...]) -> None:
    """Refuse a rule by which two versions of a key could land in different shards."""
    if rule.kind == "unsharded":
        return
    if rule.column not in schema.names:
        raise InvalidInputError(f"the sharding column {rule.column!r} is not in the schema", hint=f"columns are {', '.join(schema.names)}")
    if key and rule.column not in key:
        raise InvalidInputError(
            f"the sharding column {rule.column!r} is not part of the key",
            hint="shard by a key column, or an update could land in another shard",
        )


def first_shards(rule: ShardingRule) -> tuple[str, ...]:
    """The shards a new table starts with."""
    return tuple(f"{number:04d}" for number in range(rule.buckets if rule.kind == "bucket" else 0 if rule.kind == "identity" else 1))
