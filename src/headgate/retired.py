"""Shards that were split: what the table makes of them.

Owns: telling the table, and what a table is in which that was not told yet. Does not own: splitting (life).

A shard's own manifest decides whether it was split, by one commit that says "retired" and names the parts. The table's
manifest only publishes it: whoever meets a retired shard may do that, and nobody writes to the parts before it is done.
So a reader that still finds the whole shard in the table has begun before anything was written to its parts.
"""

from __future__ import annotations

from headgate.errors import InvalidInputError
from headgate.failpoint import failpoint
from headgate.manifest.model import ShardManifest, TableManifest
from headgate.sharding import range_of, with_children
from headgate.watch import SchemaWatch, rules_of


def published(manifest: TableManifest, parent: ShardManifest) -> TableManifest | None:
    """The table with the parts of a shard in its place. None: it has not got that shard, or not any more."""
    split = parent.split
    if parent.state != "retired" or split is None or parent.shard not in manifest.shards:
        return None
    rules, children = rules_of(manifest), split.children
    column = rules.schema.names[rules.field_ids.index(children[0].range.column)]
    low = (range_of(manifest.sharding, parent.shard) or (0, 0))[0]
    at = manifest.shards.index(parent.shard)
    return manifest.but(
        shards=(*manifest.shards[:at], *(child.shard for child in children), *manifest.shards[at + 1 :]),
        sharding=with_children(manifest.sharding, parent.shard, [(child.range.low, child.shard) for child in children], column),
        retired={**manifest.retired, parent.shard: low},
    )


def publish(watch: SchemaWatch, parent: ShardManifest) -> TableManifest:
    """Tell the table that a shard was split. Can be repeated, by anyone."""
    failpoint("split.publish")
    return watch.commit(lambda manifest: published(manifest, parent))


def column_to_split_by(manifest: TableManifest, column: str | None) -> tuple[str, int]:
    """The column whose hash tells the parts of a shard apart: its name and its id.

    Raises:
        InvalidInputError: there is none, or another was asked for.
    """
    rule, rules = manifest.sharding, rules_of(manifest)
    if rule.kind == "identity":
        raise InvalidInputError(
            "shards of single values are not split", hint="a table with identity sharding makes a shard for each value; shard by bucket"
        )
    if rule.column is not None and column not in (None, rule.column):
        raise InvalidInputError(f"rows find their shard by {rule.column!r}, not by {column!r}", hint="leave out column=")
    name = rule.column or column or (rules.key[0] if len(rules.key) == 1 else None)
    if name is None:
        hint = f"column= one of {', '.join(rules.key)}" if rules.key else "column= whose values are spread evenly"
        raise InvalidInputError("by which column is the shard to be split?", hint=hint)
    if name not in rules.schema.names:
        raise InvalidInputError(f"the table has no column {name!r}", hint=f"columns are {', '.join(rules.schema.names)}")
    return name, rules.field_ids[rules.schema.names.index(name)]
