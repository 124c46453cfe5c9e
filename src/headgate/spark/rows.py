"""Rows from Spark as a table takes them.

Owns: which columns and types of Spark's a table takes, and making its rows of them. Does not own: the types
themselves (types), who writes (sink).

What can be known from the types is refused in the driver, before any task writes. What only values tell (a
number that is too large, a vector of another length, a null in the key) fails the task, or with
``onBadRows=quarantine`` sets the row aside, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as types

from headgate import InvalidInputError, SchemaMismatchError
from headgate.spark.types import arrow_schema, carried_type, check_columns, to_table

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Op = Literal["upsert", "delete"]
OP = "_op"
_REASON = "_reason"


@dataclass(frozen=True)
class Incoming:
    """How rows of Spark's become a table's. Pickles."""

    op: Op = "upsert"
    sets_aside: bool = False
    """Bad rows do not fail; they come back with their reasons."""

    def check(self, given: StructType, schema: pa.Schema, key: Sequence[str]) -> None:
        """Refuse, by names and types alone, what can never be written.

        Raises:
            SchemaMismatchError: a column is not the table's, is missing, or has a type that does not fit.
            InvalidInputError: deletes, of a table without a key.
        """
        has_op = any(name.casefold() == OP for name in given.names)
        if (self.op == "delete" or has_op) and not key:
            raise InvalidInputError(
                "the table has no key, so nothing can be deleted by key", hint=f"leave out the option op, and the column {OP}"
            )
        twice = [name for number, name in enumerate(given.names) if name.casefold() in {n.casefold() for n in given.names[:number]}]
        if twice:
            raise SchemaMismatchError(f"there are two columns {twice[0]!r}", hint="names are matched whatever their case; see df.drop")
        wanted = _only(schema, key) if self.op == "delete" and not has_op else schema
        known = {field.name for field in schema}
        check_columns(given.names, wanted, also=[OP, *known])
        there = {field.name.casefold(): field for field in schema}
        for field in given.fields:
            if field.name.casefold() == OP:
                if field.dataType.simpleString() != "string":
                    raise SchemaMismatchError(
                        f"the column {OP!r} is {field.dataType.simpleString()}", hint='a string: "upsert" or "delete"'
                    )
                continue
            mine = there[field.name.casefold()]
            if field.name.casefold() not in {f.name.casefold() for f in wanted}:
                continue
            if types.is_map(mine.type):
                continue
            carried = carried_type(mine.type, mine.name)
            arrow = arrow_schema(type(given)([field])).field(0).type
            if not _fits(arrow, carried):
                raise SchemaMismatchError(
                    f"the column {mine.name!r} is {field.dataType.simpleString()}, and the table's is {mine.type}",
                    hint=f"cast it, e.g. df.withColumn({mine.name!r}, df[{field.name!r}].cast(…))",
                )

    def __call__(
        self, rows: pa.RecordBatch, schema: pa.Schema, key: tuple[str, ...]
    ) -> tuple[pa.RecordBatch | None, pa.RecordBatch | None]:
        """The rows with the table's columns, and with ``_op`` where they have one; and those that cannot be, with reasons."""
        place = next((number for number, name in enumerate(rows.schema.names) if name.casefold() == OP), None)
        ops = None if place is None else rows.column(place)
        if place is not None:
            rows = rows.remove_column(place)
        if ops is None and self.op == "delete":
            folded = {name.casefold() for name in key}
            rows, schema = rows.select([name for name in rows.schema.names if name.casefold() in folded]), _only(schema, key)
        bad = None
        try:
            fitting: pa.RecordBatch | None = to_table(rows, schema)
        except SchemaMismatchError:
            if not self.sets_aside:
                raise
            reasons = _reasons(rows, schema)
            is_bad = np.array([reason is not None for reason in reasons])
            if not is_bad.any():
                raise
            bad = _with_reasons(rows, ops, is_bad, reasons)
            good = pa.array(~is_bad)
            rows, ops = rows.filter(good), None if ops is None else ops.filter(good)
            fitting = to_table(rows, schema) if rows.num_rows else None
        if fitting is not None and ops is not None:
            fitting = fitting.append_column(OP, ops)
        return fitting, bad


def _only(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    return pa.schema([schema.field(name) for name in names])


def _fits(given: pa.DataType, carried: pa.DataType) -> bool:
    """May values of a type be the table's? If they may be too large for it, the values tell."""
    if types.is_null(given) or given.equals(carried):
        return True
    if types.is_integer(given) or types.is_decimal(given):
        return bool(types.is_integer(carried) or types.is_decimal(carried) or (types.is_integer(given) and types.is_floating(carried)))
    if types.is_floating(given):
        return bool(types.is_floating(carried))
    if types.is_time(given):
        return bool(types.is_time(carried))
    if types.is_list(given) and types.is_list(carried):
        return _fits(given.value_type, carried.value_type)
    if types.is_struct(given) and types.is_struct(carried):
        mine = {carried.field(n).name: carried.field(n).type for n in range(carried.num_fields)}
        theirs = {given.field(n).name: given.field(n).type for n in range(given.num_fields)}
        return list(mine) == list(theirs) and all(_fits(theirs[name], mine[name]) for name in mine)
    return False


# -- which rows are to blame


def _reasons(rows: pa.RecordBatch, schema: pa.Schema) -> list[str | None]:
    """Why each row cannot be the table's; None: it can."""
    there = {name.casefold(): number for number, name in enumerate(rows.schema.names)}
    reasons: list[str | None] = [None] * rows.num_rows
    for field in schema:
        number = there.get(field.name.casefold())
        if number is None or rows.column(number).type.equals(field.type):
            continue
        for row, why in _misfits(rows.column(number), field.type, 0):
            reasons[row] = reasons[row] or f"the column {field.name!r} cannot be {field.type}: {why}"
    return reasons


def _misfits(column: pa.Array, kind: pa.DataType, first: int) -> list[tuple[int, str]]:
    """The values that cannot be cast: by halves, since most can."""
    try:
        column.cast(kind)
        return []
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        if len(column) == 1:
            return [(first, str(error).splitlines()[0])]
    half = len(column) // 2
    return _misfits(column.slice(0, half), kind, first) + _misfits(column.slice(half), kind, first + half)


def _with_reasons(
    rows: pa.RecordBatch, ops: pa.Array | None, is_bad: npt.NDArray[np.bool_], reasons: Sequence[str | None]
) -> pa.RecordBatch:
    if ops is not None:
        rows = rows.append_column(OP, ops)
    found = rows.filter(pa.array(is_bad))
    return found.append_column(_REASON, pa.array([reason for reason in reasons if reason is not None], pa.string()))
