"""``hgs.partition_by_shard``: rows of one shard to one task, so that a write makes few and large files.

Owns: the partitions. Does not own: which shard a row belongs to (sharding), the write (sink).

Only the column that decides goes to Python and back, as Arrow, to be hashed there at once; the rows are
shuffled by Spark as they are. A task gets rows of one shard and, where a shard has several tasks, all rows of a key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from headgate import InvalidInputError, SchemaMismatchError, open_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NUMBER = "__headgate_partition"


def partition_by_shard(
    df: DataFrame,
    uri: str | os.PathLike[str],
    *,
    tasks_per_shard: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    wal_uri: str | os.PathLike[str] | None = None,
    wal_storage_options: Mapping[str, Any] | None = None,
) -> DataFrame:
    """The same rows, shuffled so that each task has rows of one shard: a write of them makes few, large files.

    Worth it where there are many shards, or many small partitions. Without it each task writes a file for every shard.

    Args:
        tasks_per_shard: how many tasks share the rows of a shard; None: so that all shards together keep Spark busy.

    Raises:
        SchemaMismatchError: the column that the table is sharded by is missing.

    Example:
        >>> hgs.partition_by_shard(df, uri).write.format("headgate").mode("append").save(uri)
    """
    from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it
    from pyspark.sql.pandas.functions import arrow_udf

    if tasks_per_shard is not None and (isinstance(tasks_per_shard, bool) or not isinstance(tasks_per_shard, int) or tasks_per_shard < 1):
        raise InvalidInputError(f"tasks_per_shard is {tasks_per_shard!r}", hint="a whole number, 1 or more")
    table = open_table(uri, storage_options=storage_options, wal_uri=wal_uri, wal_storage_options=wal_storage_options)
    names = {name.casefold(): name for name in df.columns}
    key = [df[f"`{names[name.casefold()]}`"] for name in table.key if name.casefold() in names]
    at_once = int(df.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
    column = table.sharding.column
    if column is not None and column.casefold() not in names:
        raise SchemaMismatchError(
            f"the column {column!r} is missing, by which the table is sharded", hint="add it, or write without shuffling"
        )
    if table.sharding.kind == "identity":  # a shard for each value, also for those that are not there yet
        assert column is not None
        chosen = [df[f"`{names[column.casefold()]}`"]]
        if tasks_per_shard is not None and tasks_per_shard > 1:
            chosen.append(F.pmod(F.hash(*key), F.lit(tasks_per_shard)))
        return df.repartition(*chosen)
    shards = [shard.id for shard in table.shards]
    tasks = tasks_per_shard or max(1, -(-at_once // len(shards)))
    number = F.lit(0)
    if len(shards) > 1:
        assert column is not None
        field, numbers = table.schema.field(column), pa.array(shards)

        def shard_numbers(values: pa.Array) -> pa.Array:
            found = table.shard_ids(pa.RecordBatch.from_arrays([values.cast(field.type)], names=[field.name]))
            return pc.index_in(found.dictionary, numbers).take(found.indices)

        hashed: Any = arrow_udf  # its overloads do not know functions of one array
        number = hashed(shard_numbers, "int")(df[f"`{names[column.casefold()]}`"])
    if tasks > 1:
        spread = F.pmod(F.hash(*key), F.lit(tasks)) if key else F.pmod(F.monotonically_increasing_id(), F.lit(tasks))
        number = number * tasks + spread
    return df.repartitionById(len(shards) * tasks, number.cast("int"))
