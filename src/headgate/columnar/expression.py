"""SQL expressions over rows in memory, in the dialect that Lance uses: DataFusion's.

Owns: which rows match. Does not own: which rows count (query).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headgate.columnar.base import Offsets
from headgate.errors import InvalidInputError

_OFFSET = "__headgate_offset"


def matching_rows(table: pa.Table, filter: str) -> Offsets:
    """The offsets of the rows for which ``filter`` is true, in order.

    Raises:
        InvalidInputError: it is no expression over these columns.
    """
    if not table.num_rows:
        check_filter(table.schema, filter)
        return np.zeros(0, np.int64)
    numbered = table.append_column(_OFFSET, pa.array(np.arange(table.num_rows, dtype=np.int64)))
    found = _filtered(numbered, filter)
    offsets = found.column(_OFFSET).to_numpy()
    return np.sort(offsets)


def check_filter(schema: pa.Schema, filter: str) -> None:
    """Refuse what is no true-or-false expression over these columns, before anything is read."""
    _filtered(schema.empty_table().append_column(_OFFSET, pa.array([], pa.int64())), filter)


def _filtered(table: pa.Table, filter: str) -> pa.Table:
    from datafusion import SessionContext  # a second to load: only those who filter pay

    if not isinstance(filter, str) or not filter.strip():
        raise InvalidInputError(f"the filter is {filter!r}", hint="a SQL expression, e.g. \"value > 0.5 and name like 'a%'\"")
    context = SessionContext()
    context.register_record_batches("t", [table.to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]])
    try:
        parsed = context.table("t").filter(context.table("t").parse_sql_expr(filter))
        return parsed.select(_OFFSET).to_arrow_table()
    except Exception as error:  # DataFusion raises plain Exceptions
        raise InvalidInputError(
            f"the filter {filter!r} cannot be used: {_first_line(error)}", hint=f"columns are {_columns(table.schema)}"
        ) from None


def _columns(schema: pa.Schema) -> str:
    return ", ".join(name for name in schema.names if name != _OFFSET)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
