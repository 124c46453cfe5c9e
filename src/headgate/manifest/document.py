"""A small JSON document that knows whether it is whole.

    {"crc32":"1a2b3c4d","body":{…}}\\n

Valid JSON for any reader; the checksum covers the exact bytes of the body, so a flipped bit,
a cut tail or anything appended is noticed. Used for manifests, table manifests and markers.
"""

from __future__ import annotations

import zlib
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from headgate.errors import CorruptEntryError, UnsupportedFormatError

FORMAT_VERSION = 1

_HEAD, _MIDDLE, _TAIL = b'{"crc32":"', b'","body":', b"}\n"
_BODY_AT = len(_HEAD) + 8 + len(_MIDDLE)

Model = TypeVar("Model", bound=BaseModel)


def encode_document(model: BaseModel) -> bytes:
    """The bytes to store."""
    body = model.model_dump_json(exclude_defaults=False).encode()
    return b"%s%08x%s%s%s" % (_HEAD, zlib.crc32(body), _MIDDLE, body, _TAIL)


def decode_document(data: memoryview | bytes, kind: type[Model], key: str) -> Model:
    """Check and read what ``encode_document`` made.

    Raises:
        CorruptEntryError: the bytes are not those that were written.
        UnsupportedFormatError: a newer version of Headgate wrote it.
    """
    raw = bytes(data)
    body = raw[_BODY_AT : -len(_TAIL)]
    if raw != b"%s%08x%s%s%s" % (_HEAD, zlib.crc32(body), _MIDDLE, body, _TAIL):
        raise CorruptEntryError(f"{key} is damaged: its checksum does not fit its {len(raw)} bytes", object=key)
    try:
        found = kind.model_validate_json(body)
    except ValidationError as error:
        _check_version(body, key)  # a newer format need not be valid in ours
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CorruptEntryError(f"{key} is not a valid {kind.__name__}: {where}: {first['msg']}", object=key) from None
    if getattr(found, "format_version", 0) > FORMAT_VERSION:
        _check_version(body, key)
    return found


def _check_version(body: bytes, key: str) -> None:
    try:
        version = _Versioned.model_validate_json(body).format_version
    except ValidationError:
        raise CorruptEntryError(f"{key} is no document of Headgate", object=key) from None
    if version > FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"{key} has format version {version}; this version reads up to {FORMAT_VERSION}", hint="upgrade headgate to read this table"
        )


class _Versioned(BaseModel):
    format_version: int
