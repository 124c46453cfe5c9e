"""A schema from a file: a JSON description, or a Parquet or Arrow file whose columns are taken.

{"fields": [{"name": "id", "type": "int64", "nullable": false}, {"name": "note", "type": "string"}]}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from headgate import InvalidInputError
from headgate.cli.type_names import parse, spell

_EXAMPLE = '{"fields": [{"name": "id", "type": "int64", "nullable": false}, {"name": "note", "type": "string"}]}'


def read_schema(path: Path) -> pa.Schema:
    """The schema that a file describes or has.

    Raises:
        InvalidInputError: it describes none.
    """
    suffix = path.suffix.lower()
    try:
        if suffix in (".parquet", ".pq"):
            import pyarrow.parquet as parquet  # only those who need it pay for loading it

            return parquet.read_schema(path).remove_metadata()
        if suffix in (".arrow", ".feather", ".ipc"):
            with pa.memory_map(str(path)) as file:
                return pa.ipc.open_file(file).schema.remove_metadata()
        document = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"{path} is not JSON: {error}", hint=f"write {_EXAMPLE}, or pass a .parquet file") from None
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"no schema can be read from {path}: {error}", hint="pass a .json description, or a .parquet or .arrow file"
        ) from None
    return schema_of(document, str(path))


def schema_of(document: Any, where: str) -> pa.Schema:
    """The schema that a JSON description means."""
    fields = document.get("fields") if isinstance(document, dict) else None
    if not isinstance(fields, list) or not fields:
        raise InvalidInputError(f"{where} has no list of fields", hint=f"write {_EXAMPLE}")
    return pa.schema([_field(field, number, where) for number, field in enumerate(fields)])


def _field(field: Any, number: int, where: str) -> pa.Field:
    name, kind = (field.get("name"), field.get("type")) if isinstance(field, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(kind, str):
        raise InvalidInputError(f"{where}: field {number} lacks a name or a type", hint=f"write {_EXAMPLE}")
    unknown = sorted(set(field) - {"name", "type", "nullable"})
    if unknown:
        raise InvalidInputError(
            f"{where}: the field {name!r} has {unknown[0]!r}, which means nothing here", hint="name, type and nullable are known"
        )
    nullable = field.get("nullable", True)
    if not isinstance(nullable, bool):
        raise InvalidInputError(f"{where}: nullable of the field {name!r} is {nullable!r}", hint="true or false")
    try:
        return pa.field(name, parse(kind), nullable)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: the field {name!r}: {error.message}", hint=error.hint) from None
    except ValueError as error:  # for example a column of nothing that may not be null
        raise InvalidInputError(f"{where}: the field {name!r}: {error}", hint=f"write {_EXAMPLE}") from None


def describe(schema: pa.Schema) -> list[dict[str, Any]]:
    """The fields of a schema, as a schema file has them."""
    return [{"name": field.name, "type": spell(field.type), "nullable": field.nullable} for field in schema]
