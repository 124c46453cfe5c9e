"""SQL over the merged table, by DataFusion.

Owns: giving DataFusion the rows of one state, only the columns it asks for, as a stream. Does not
own: which rows count (sources).

Filters stay in DataFusion: what it would hand down, it hands down as Arrow's expressions, which
order NaN and signed zeros in another way than it does itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.types as types

from headgate.columnar.expression import session
from headgate.errors import HeadgateError, InvalidInputError
from headgate.query.scan import Load, all_sources, exactly, result_schema, visible_rows, whole
from headgate.query.sources import Source
from headgate.schema import RowRules
from headgate.view import ReadView

NAME = "t"
MEMORY_BYTES_MAX = 4 << 30


def sql(load: Load, rules: RowRules, query: str, *, memory_bytes: int = MEMORY_BYTES_MAX) -> pa.Table:
    """The result of a query in which the table is called ``t``; all of its parts see one state.

    Sorts and groups that need more than ``memory_bytes`` go to temporary files.

    Raises:
        InvalidInputError: it is no query, or not over this table.
    """
    if not isinstance(query, str) or not query.strip():
        raise InvalidInputError(f"the query is {query!r}", hint=f'e.g. "select count(*) from {NAME}"')
    normalized = _reads_names_in_lower_case(rules, query)
    return whole(load, lambda views: _result(views, rules, query, normalized, memory_bytes))


def _reads_names_in_lower_case(rules: RowRules, query: str) -> bool:
    """Planned over no rows: names as they are spelled, or else in lower case. Refuses what is no query."""
    failure: Exception | None = None
    for normalized in (False, True):
        context = session(normalized)
        context.register_record_batches(NAME, [[pa.RecordBatch.from_pylist([], schema=rules.schema)]])
        try:
            _planned(context, query)
            return normalized
        except Exception as error:  # DataFusion raises plain Exceptions
            failure = failure or error
    raise _refused(failure, rules) from None


def _planned(context: Any, query: str) -> Any:
    from datafusion import SQLOptions

    return context.sql_with_options(query, SQLOptions().with_allow_ddl(False).with_allow_dml(False).with_allow_statements(False))


def _result(views: Sequence[ReadView], rules: RowRules, query: str, normalized: bool, memory_bytes: int) -> pa.Table:
    table = _Merged(list(all_sources(views, rules)), rules)
    context = session(normalized, partitions=None, memory_bytes=memory_bytes)
    context.remove_optimizer_rule("push_down_filter")
    context.register_dataset(NAME, table)
    try:
        return _plain(_planned(context, query).to_arrow_table())
    except Exception as error:  # DataFusion raises plain Exceptions, also for what it was told by us
        raise table.failure or _refused(error, rules) from None


def _refused(error: Exception | None, rules: RowRules) -> InvalidInputError:
    text = str(error).strip().splitlines()[0].removeprefix("DataFusion error: ")[:300] if str(error).strip() else type(error).__name__
    return InvalidInputError(
        f"the query cannot be answered: {text}", hint=f"the table is called {NAME}; its columns are {', '.join(rules.schema.names)}"
    )


def _plain(table: pa.Table) -> pa.Table:
    """Views are for DataFusion's own use: text and bytes as everybody else has them."""
    fields = [
        field.with_type(pa.string() if types.is_string_view(field.type) else pa.binary())
        if types.is_string_view(field.type) or types.is_binary_view(field.type)
        else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields)) if fields != list(table.schema) else table


class _Merged(pyarrow.dataset.Dataset):  # type: ignore[misc]  # pyarrow has no types
    """What DataFusion asks a dataset for: a part per source, each read as a stream."""

    def __init__(self, sources: list[Source], rules: RowRules) -> None:
        self._sources, self._rules = sources, rules
        self.failure: HeadgateError | None = None

    @property
    def schema(self) -> pa.Schema:
        return self._rules.schema.remove_metadata()

    def scanner(self, columns: Sequence[str] | None = None, **_: Any) -> _Rows:
        return self.part(self._sources, columns)

    def get_fragments(self, filter: Any = None) -> list[_Part]:
        return [_Part(self, [source]) for source in self._sources if source.mask.count] or [_Part(self, [])]

    def part(self, sources: Sequence[Source], columns: Sequence[str] | None) -> _Rows:
        wanted = self._rules.schema.names if columns is None else list(columns)
        schema = result_schema(self._rules, wanted).remove_metadata()

        def read() -> Iterator[pa.RecordBatch]:
            try:
                for source in sources:
                    for rows in visible_rows(source, wanted, None):
                        yield exactly(rows, schema)
            except HeadgateError as error:  # it would reach the caller as a text
                self.failure = self.failure or error
                raise

        return _Rows(schema, read)


class _Part:
    def __init__(self, table: _Merged, sources: Sequence[Source]) -> None:
        self._table, self._sources = table, sources

    def scanner(self, schema: pa.Schema | None = None, columns: Sequence[str] | None = None, **_: Any) -> _Rows:
        return self._table.part(self._sources, columns)


class _Rows:
    def __init__(self, schema: pa.Schema, read: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        self.projected_schema, self.to_batches = schema, read
