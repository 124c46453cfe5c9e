"""SQL expressions over rows: DataFusion's dialect, the same for rows in memory and in files.

Owns: what a filter means, and which part of that files may be asked. Does not own: which rows count
(query).

Names stand for columns as they are spelled, or else in lower case; ``\"…\"`` or backticks quote them.
Lance reads filters too, with DataFusion inside, but with rules of its own for names and for numbers
of another type. So it is only given what means the same in both: comparisons of a column with a
plain number or text of its own kind, nulls, and what joins these.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as types

from headgate.columnar.base import Offsets
from headgate.errors import InvalidInputError

_OFFSET = "__headgate_offset"
_COMPARISONS = {"=", "!=", "<", "<=", ">", ">="}
_SUBQUERIES = {"Exists", "InSubquery", "ScalarSubquery", "Subquery", "Placeholder", "ScalarVariable"}


class Filter:
    """A true-or-false expression over the columns of a table."""

    def __init__(self, text: str, schema: pa.Schema) -> None:
        """Raises InvalidInputError: it is no such expression over these columns."""
        if not isinstance(text, str) or not text.strip():
            raise InvalidInputError(f"the filter is {text!r}", hint="a SQL expression, e.g. \"value > 0.5 and name like 'a%'\"")
        self.text = text
        self._schema = schema
        self._expression = self._parsed()
        used = _columns_of(self._expression)
        self.columns = tuple(schema.names if used is None else (name for name in schema.names if name in used))
        """Those that it looks at."""
        self.pushed = _pushed(self._expression, schema)
        """The same for Lance. None: only we can evaluate it."""

    def _parsed(self) -> Any:
        empty = self._schema.empty_table().append_column(_OFFSET, pa.array([], pa.int64()))
        failure: Exception | None = None
        for normalized in (False, True):
            frame = _frame(empty, normalized)
            try:
                expression = frame.parse_sql_expr(self.text)
                if _columns_of(expression) is None:
                    raise _Refused("it holds a query or a parameter")
                frame.filter(expression).select(_OFFSET).to_arrow_table()
                return expression
            except Exception as error:  # DataFusion raises plain Exceptions
                failure = failure or error
        raise self._refused(failure) from None

    def matching(self, rows: pa.RecordBatch | pa.Table) -> Offsets:
        """The offsets of the rows for which it is true, in order; rows need have no other columns than its own."""
        if not rows.num_rows:
            return np.zeros(0, np.int64)
        table = pa.table([rows.column(name) for name in self.columns], names=list(self.columns))
        numbered = pa.table([*table.columns, pa.array(np.arange(rows.num_rows, dtype=np.int64))], names=[*self.columns, _OFFSET])
        try:
            found = _frame(numbered, False).filter(self._expression).select(_OFFSET).to_arrow_table()
        except Exception as error:  # DataFusion raises plain Exceptions; this one was found with the values
            raise self._refused(error) from None
        return np.sort(found.column(0).to_numpy())

    def _refused(self, error: Exception | None) -> InvalidInputError:
        return InvalidInputError(
            f"the filter {self.text!r} cannot be used: {_first_line(error)}", hint=f"columns are {', '.join(self._schema.names)}"
        )

    def __repr__(self) -> str:
        return f"Filter({self.text!r})"


class _Refused(Exception):
    """What we do not take although DataFusion would."""


def matching_rows(table: pa.Table, filter: str) -> Offsets:
    """The offsets of the rows for which ``filter`` is true, in order."""
    return Filter(filter, table.schema).matching(table)


def session(normalized: bool = False, partitions: int | None = 1, memory_bytes: int | None = None) -> Any:
    """A DataFusion context that reads names as we do.

    What needs more memory than is given goes to temporary files, or is refused if it cannot.
    """
    from datafusion import RuntimeEnvBuilder, SessionConfig, SessionContext  # a while to load: only those who filter pay

    config = SessionConfig().set("datafusion.sql_parser.enable_ident_normalization", "true" if normalized else "false")
    if partitions is not None:
        config = config.with_target_partitions(partitions)
    if memory_bytes is None:
        return SessionContext(config)
    return SessionContext(config, RuntimeEnvBuilder().with_disk_manager_os().with_fair_spill_pool(memory_bytes))


def _frame(table: pa.Table, normalized: bool) -> Any:
    context = session(normalized)
    context.register_record_batches("t", [table.to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]])
    return context.table("t")


def _kind(expression: Any) -> tuple[str, Any]:
    try:
        variant = expression.to_variant()
    except Exception:  # a function: it has no form of its own in Python
        return "", None
    return type(variant).__name__, variant


def _columns_of(expression: Any) -> set[str] | None:
    """The columns that an expression looks at; None: it holds something that is no expression over rows."""
    kind, variant = _kind(expression)
    if kind == "Column":
        return {variant.name()}
    if kind == "Literal":
        return set()
    if kind in _SUBQUERIES:
        return None
    try:
        parts = expression.rex_call_operands()
    except Exception:  # what it cannot take apart we do not take
        return None
    used: set[str] = set()
    for part in parts:
        found = _columns_of(part)
        if found is None:
            return None
        used |= found
    return used


def _pushed(expression: Any, schema: pa.Schema) -> str | None:
    kind, variant = _kind(expression)
    if kind == "Column":
        return _quoted(variant.name()) if types.is_boolean(schema.field(variant.name()).type) else None
    parts = expression.rex_call_operands() if kind in ("BinaryExpr", "Not", "IsNull", "IsNotNull", "InList", "Between") else []
    if kind == "BinaryExpr" and variant.op() in ("AND", "OR"):
        both = [_pushed(part, schema) for part in parts]
        return None if None in both else f"({both[0]} {variant.op()} {both[1]})"
    if kind == "Not":
        inner = _pushed(parts[0], schema)
        return None if inner is None else f"(NOT {inner})"
    if not parts or _kind(parts[0])[0] != "Column":
        return None
    name = _kind(parts[0])[1].name()
    if kind in ("IsNull", "IsNotNull"):
        return f"({_quoted(name)} IS {'NOT ' if kind == 'IsNotNull' else ''}NULL)"
    values = [_literal(part, schema.field(name).type) for part in parts[1:]]
    if not values or None in values:
        return None
    if kind == "BinaryExpr":
        return f"({_quoted(name)} {variant.op()} {values[0]})" if variant.op() in _COMPARISONS else None
    no = "NOT " if variant.negated() else ""
    if kind == "InList":
        return f"({_quoted(name)} {no}IN ({', '.join(map(str, values))}))"
    return f"({no}({_quoted(name)} >= {values[0]} AND {_quoted(name)} <= {values[1]}))" if kind == "Between" else None


def _literal(expression: Any, kind: pa.DataType) -> str | None:
    """A literal as Lance reads it, if it is of the column's own kind."""
    if _kind(expression)[0] != "Literal":
        return None
    value = expression.python_value()
    value = value.as_py() if isinstance(value, pa.Scalar) else value
    if types.is_integer(kind) and type(value) is int:
        signed = types.is_signed_integer(kind)
        most = 1 << min(63, kind.bit_width - signed)  # Lance reads what is beyond 63 bits as a float
        return str(value) if (-most if signed else -1) < value < most else None
    if types.is_float64(kind) and type(value) in (int, float):
        return repr(float(value)) if math.isfinite(value) else None
    if (types.is_string(kind) or types.is_large_string(kind)) and type(value) is str and "\\" not in value:
        return "'" + value.replace("'", "''") + "'"
    return None


def _quoted(name: str) -> str:
    return f"`{name}`"


def _first_line(error: Exception | None) -> str:
    text = str(error).strip()
    return text.splitlines()[0].removeprefix("DataFusion error: ")[:300] if text else type(error).__name__
