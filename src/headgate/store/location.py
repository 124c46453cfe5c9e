"""Where things are: URIs, the options that open them, and the store behind them.

Owns: reading a URI, hiding what is secret in its options, making the store.
Does not own: what is kept there.

A plain path is taken as it stands; ``file://`` is percent-decoded; object stores are
``s3://bucket/prefix``, ``gs://…``, ``az://container/prefix``; ``memory://name/prefix`` is a
store shared within the process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from headgate.errors import InvalidInputError
from headgate.store.base import Store
from headgate.store.local import LocalStore
from headgate.store.memory import MemoryStore

_OBJECT_SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "azure": "az", "abfs": "az", "abfss": "az"}
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")


class Options(dict[str, str]):
    """Storage options. Their values, often secrets, never show in a repr."""

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name!r}: '…'" for name in sorted(self)) + "}"

    __str__ = __repr__


@dataclass(frozen=True)
class Location:
    """A URI, taken apart and made canonical, with the options to open it."""

    uri: str
    scheme: str
    bucket: str
    path: str
    options: Options = field(default_factory=Options, repr=False)

    @classmethod
    def parse(cls, uri: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Location:
        """Read a URI; refuses what it cannot honour.

        Raises:
            InvalidInputError: an unknown scheme, credentials or a query in the URI, or options
                that are not strings.
        """
        text = _text(uri)
        checked = _check_options(options)
        if not text or text.isspace():
            raise InvalidInputError("the table's URI is empty", hint="pass a path such as 'data/events' or 's3://bucket/events'")
        match = _SCHEME.match(text)
        if match is None:
            path = os.path.abspath(text)
            return cls(path, "file", "", path, checked)
        scheme = match.group(1).lower()
        if scheme == "file":
            host, slash, path = text[match.end() :].partition("/")
            path = unquote(slash + path, errors="surrogateescape")
            if host.lower() not in ("", "localhost") or not path or "?" in text or not _is_text(path):
                raise InvalidInputError(f"{_shown(text)} is not a local file URI", hint="write file:///folder, or a plain path")
            path = os.path.abspath(path)
            return cls(path, "file", "", path, checked)
        rest = text[match.end() :]
        bucket, _, path = rest.partition("/")
        if scheme != "memory" and scheme not in _OBJECT_SCHEMES:
            known = ", ".join(sorted({"file", "memory", *_OBJECT_SCHEMES}))
            raise InvalidInputError(f"{_shown(text)}: the scheme {scheme!r} is not known", hint=f"one of {known}, or a plain path")
        if scheme in ("abfs", "abfss") and "@" in bucket:
            container, _, host = bucket.partition("@")
            checked.setdefault("azure_storage_account_name", host.split(".", 1)[0])
            bucket = container
        if "@" in bucket or (":" in bucket and scheme != "memory"):  # a secret may hold a slash: "key:se/cret@bucket"
            raise InvalidInputError(
                f"{_shown(text)} carries credentials", hint="pass them in storage_options or in the environment, never in a URI"
            )
        if "?" in rest or "#" in rest:
            raise InvalidInputError(f"{_shown(text)} has a query or a fragment", hint="pass settings in storage_options")
        path = "/".join(part for part in path.split("/") if part)
        if not bucket:
            raise InvalidInputError(f"{_shown(text)} names no bucket", hint=f"write {scheme}://bucket/path")
        if any(part in (".", "..") for part in path.split("/")):
            raise InvalidInputError(f"{_shown(text)} has a '.' or '..' in it", hint="object stores have no such thing")
        scheme = _OBJECT_SCHEMES.get(scheme, scheme)
        if scheme == "az" and "\\" in path:
            raise InvalidInputError(f"{_shown(text)} has a backslash in it", hint="Azure takes it for a slash: choose another name")
        return cls(f"{scheme}://{bucket}/{path}".rstrip("/"), scheme, bucket, path, checked)

    def beside(self, uri: str) -> Location:
        """Another place, opened with these options if it is of the same kind."""
        other = Location.parse(uri)
        return Location.parse(uri, self.options) if other.scheme == self.scheme else other

    def open(self, *, fsync: bool = True) -> Store:
        """The store at this place, without retries and unprobed."""
        if self.scheme == "file":
            return LocalStore(self.path, fsync=fsync)
        prefix = f"{self.path}/" if self.path else ""
        if self.scheme == "memory":
            return MemoryStore(self.bucket, prefix)
        from headgate.store.object import ObjectStore  # obstore loads a runtime: only those who need it pay

        return ObjectStore(self)


def _text(uri: str | os.PathLike[str]) -> str:
    try:
        text: object = os.fspath(uri)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise InvalidInputError(f"the URI is a {type(uri).__name__}", hint="pass a string or a pathlib.Path")
    if not _is_text(text):
        raise InvalidInputError("the URI holds a NUL, or bytes that are no text", hint="name it in UTF-8")
    return text


def _is_text(name: str) -> bool:
    """Can it be written into a manifest and asked of a file system?"""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in name


def _shown(uri: str) -> str:
    """The URI without what may be secret in it."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return repr(uri)
    rest = rest.partition("?")[0].partition("#")[0]
    host, slash, path = rest.partition("/")
    if ":" in host and "@" in path:  # the secret goes on past a slash of its own
        host, slash, path = path.rpartition("@")[2].partition("/")
    host = host.rpartition("@")[2]
    return repr(f"{scheme}://{'…' if ':' in host else host}{slash}{path}")


def _check_options(options: Mapping[str, Any] | None) -> Options:
    checked = Options()
    if options is not None and not isinstance(options, Mapping):
        raise InvalidInputError(f"the storage options are a {type(options).__name__}", hint="pass a dict of names and strings")
    for name, value in (options or {}).items():
        if not isinstance(name, str) or not isinstance(value, str | int | float | bool):
            raise InvalidInputError(
                f"storage option {name!r} is not a string", hint="options are names and strings, as object_store has them"
            )
        checked[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return checked
