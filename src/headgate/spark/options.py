"""Options, as Spark hands them over: strings, whatever case their names were written in.

Owns: reading them, and refusing, before anything is read or written, what is not known or makes no sense.
Does not own: what they mean (source, and whoever else has options).

The options that say where a table is are the same everywhere: ``path``, ``storage.<name>``, ``walUri``,
``wal.storage.<name>``. Each use adds its own, by name and by how its value is read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headgate import InvalidInputError, Table, open_table

Parse = Callable[[str], Any]

_STORAGE, _WAL_STORAGE = "storage.", "wal.storage."
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")
_UNITS = {
    0.001: "ms millisecond milliseconds",
    1.0: "s sec second seconds",
    60.0: "m min minute minutes",
    3600.0: "h hour hours",
    86400.0: "d day days",
    604800.0: "w week weeks",
}
_SECONDS = {"": 1.0} | {name: seconds for seconds, names in _UNITS.items() for name in names.split()}
_BYTES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True)
class Place:
    """Where a table is, and how to open it. Pickles."""

    uri: str
    storage_options: dict[str, str] | None = field(default=None, repr=False)
    wal_uri: str | None = None
    wal_storage_options: dict[str, str] | None = field(default=None, repr=False)

    def open(self) -> Table:
        return open_table(
            self.uri, storage_options=self.storage_options, wal_uri=self.wal_uri, wal_storage_options=self.wal_storage_options
        )


def parsed(options: Mapping[str, str], known: Mapping[str, Parse]) -> tuple[Place, dict[str, Any]]:
    """Where the table is, and the value of each option that was given, by its name as it is in ``known``.

    Raises:
        InvalidInputError: an option is not known, or its value cannot be read.
    """
    names = {name.lower(): name for name in (*known, "path", "walUri")}
    storage: dict[str, str] = {}
    wal_storage: dict[str, str] = {}
    values: dict[str, Any] = {}
    for given, value in options.items():
        lower = given.lower()
        if lower.startswith(_WAL_STORAGE):
            wal_storage[_part(given, _WAL_STORAGE)] = value
        elif lower.startswith(_STORAGE):
            storage[_part(given, _STORAGE)] = value
        elif lower in names:
            name = names[lower]
            try:
                values[name] = known.get(name, text)(value)
            except InvalidInputError as error:
                raise InvalidInputError(f"the option {name!r} is {value!r}", hint=error.hint or error.message) from None
        else:
            raise _unknown(given, [*names.values(), "storage.<name>", "wal.storage.<name>"])
    uri, wal_uri = values.pop("path", None), values.pop("walUri", None)
    if uri is None:
        raise InvalidInputError("no table is named", hint='pass its URI: load("…"), save("…"), start("…")')
    return Place(uri, storage or None, wal_uri, wal_storage or None), values


def _part(given: str, prefix: str) -> str:
    name = given[len(prefix) :].lower()
    if not name:
        raise InvalidInputError(f"the option {given!r} names nothing", hint=f"write {prefix}<name>, e.g. {prefix}aws_region")
    return name


def _unknown(given: str, names: Sequence[str]) -> InvalidInputError:
    near = difflib.get_close_matches(given.lower(), [name.lower() for name in names], n=1, cutoff=0.5)
    closest = next((name for name in names if near and name.lower() == near[0]), None)
    hint = f"did you mean {closest!r}?" if closest else f"options are {', '.join(sorted(names))}"
    return InvalidInputError(f"there is no option {given!r}", hint=hint)


# -- how values are read


def text(value: str) -> str:
    if not value.strip():
        raise InvalidInputError("it is empty", hint="give it a value, or leave it out")
    return value


def names(value: str) -> list[str]:
    """Names with commas between them; a name that has one itself is written in backquotes."""
    found = [
        quoted.replace("``", "`") if quoted else plain.strip()
        for quoted, plain in re.findall(r"\s*(?:`((?:[^`]|``)+)`\s*|([^,`]+))(?:,|$)", value)
    ]
    left = re.sub(r"\s*(?:`(?:[^`]|``)+`\s*|[^,`]+)(?:,|$)", "", value)
    if not found or left.strip() or not all(found):
        raise InvalidInputError("these are no names", hint="names with commas between them: id,value")
    return found


def duration(value: str) -> float:
    """Seconds of "24h", "90 s", "500ms" or "30"."""
    match = _DURATION.fullmatch(value.lower())
    if match is None or match.group(2) not in _SECONDS:
        raise InvalidInputError("it is no length of time", hint="a number and ms, s, m, h, d or w: 24h, 30m, 500ms; 0 for none")
    return float(match.group(1)) * _SECONDS[match.group(2)]


def size(value: str) -> int:
    """Bytes of "64m", "1g", "512 kb" or "1000"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?\s*", value.lower())
    if match is None:
        raise InvalidInputError("it is no size", hint="a number and k, m, g or t: 64m")
    return int(float(match.group(1)) * _BYTES[match.group(2)])


def whole(value: str) -> int:
    """A whole number, 1 or more."""
    if not value.strip().isdecimal() or int(value) < 1:
        raise InvalidInputError("it is no such number", hint="a whole number, 1 or more")
    return int(value)


def number(value: str) -> int:
    """A whole number, 0 or more."""
    if not value.strip().isdecimal():
        raise InvalidInputError("it is no such number", hint="a whole number, 0 or more")
    return int(value)


def truth(value: str) -> bool:
    if value.strip().lower() not in ("true", "false"):
        raise InvalidInputError("it is neither true nor false", hint="true or false")
    return value.strip().lower() == "true"


def one_of(*choices: str) -> Parse:
    """One of these words, in any case."""

    def parse(value: str) -> str:
        if value.strip().lower() not in choices:
            raise InvalidInputError("it is none of the choices", hint=f"one of {', '.join(choices)}")
        return value.strip().lower()

    return parse
