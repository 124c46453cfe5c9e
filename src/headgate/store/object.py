"""Object stores through obstore: S3, Google Cloud Storage, Azure.

Owns: turning obstore's answers into ours. Does not own: retries. obstore's own are switched
off: they would hide a lost reply behind "already exists", and the layers above resend the
same bytes themselves and then read what stands there.

Every write is ``mode="create"``: conditional, and never multipart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore
from obstore import exceptions as obstore_errors
from obstore.store import AzureStore, GCSStore, S3Store

from headgate.errors import (
    DeleteIncompleteError,
    InvalidInputError,
    ObjectExistsError,
    ObjectMissingError,
    StoreError,
    StoreUnavailableError,
)
from headgate.store.base import Data, ObjectInfo, Store

if TYPE_CHECKING:
    from headgate.store.location import Location

_PAGE = 1000
_RETRY_NONE: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
_CLIENT_DEFAULTS: dict[str, str] = {"timeout": "30s", "connect_timeout": "5s"}
_ALLOW_HTTP = ("allow_http", "aws_allow_http", "azure_allow_http", "google_allow_http")
_YES = ("true", "1", "yes")
_FINAL = (
    obstore_errors.PermissionDeniedError,
    obstore_errors.UnauthenticatedError,
    obstore_errors.InvalidPathError,
    obstore_errors.NotSupportedError,
    obstore_errors.UnknownConfigurationKeyError,
)


class ObjectStore(Store):
    """Objects below a prefix of a bucket."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._store = _open(location)

    @property
    def uri(self) -> str:
        return self._location.uri

    def __getstate__(self) -> Location:
        return self._location

    def __setstate__(self, location: Location) -> None:
        self.__init__(location)  # type: ignore[misc]

    def create(self, key: str, data: Data) -> None:
        try:
            # A view over foreign memory goes in without a copy once it is wrapped.
            obstore.put(self._store, key, obstore.Bytes(data), mode="create", use_multipart=False)
        except (obstore_errors.AlreadyExistsError, obstore_errors.PreconditionError):
            raise ObjectExistsError(f"{key} exists", object=key) from None
        except (obstore_errors.NotFoundError, FileNotFoundError) as error:
            # A create needs no object to be there, so it is the bucket that is missing.
            message = f"cannot create {key} in {self.uri}: {self._redacted(error)}"
            raise StoreError(message, object=key, hint="does the bucket exist? Headgate makes none") from None
        except Exception as error:
            raise self._error("create", key, error) from None

    def get(self, key: str) -> memoryview:
        try:
            return memoryview(obstore.get(self._store, key).bytes())
        except Exception as error:
            raise self._error("read", key, error) from None

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        if length > 0:
            try:
                return memoryview(obstore.get_range(self._store, key, start=start, length=length))
            except Exception as error:
                failure = self._error("read", key, error)
                if not isinstance(failure, StoreUnavailableError):
                    raise failure from None
        else:
            failure = None
        # A range that is empty, or begins at the end or beyond, is refused by the stores, each in words
        # of its own; the size says whether that was it. Zero bytes are the answer then, as on a disk.
        if self.head(key).size_bytes <= start or failure is None:
            return memoryview(b"")
        raise failure

    def head(self, key: str) -> ObjectInfo:
        try:
            meta = obstore.head(self._store, key)
        except Exception as error:
            raise self._error("look at", key, error) from None
        return ObjectInfo(key, meta["size"], meta["last_modified"].timestamp())

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        if start_after and not start_after.startswith(prefix):
            if start_after > prefix:
                return
            start_after = ""
        try:
            for page in obstore.list(self._store, prefix.rstrip("/") or None, offset=start_after or None, chunk_size=_PAGE):
                for meta in page:
                    # Azure takes the offset as the first name wanted, and servers that are asked to
                    # start somewhere may not know how: what was not asked for is dropped here.
                    if meta["path"] <= start_after:
                        continue
                    yield ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())
        except Exception as error:
            raise self._error("list", prefix, error) from None

    def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _PAGE):
            chunk = list(keys[start : start + _PAGE])
            try:
                obstore.delete(self._store, chunk)
                continue
            except Exception as error:  # which of them went is not said: one at a time tells
                cause: Exception = error
            failed = []
            for key in chunk:
                try:
                    obstore.delete(self._store, key)
                except (obstore_errors.NotFoundError, FileNotFoundError):
                    continue
                except Exception as error:
                    cause = error
                    failed.append(key)
            if failed:
                raise DeleteIncompleteError(failed + list(keys[start + _PAGE :]), self._redacted(cause))

    def _error(self, verb: str, key: str, error: Exception) -> StoreError:
        if isinstance(error, obstore_errors.NotFoundError | FileNotFoundError):
            return ObjectMissingError(f"{key} does not exist in {self.uri}", object=key)
        message = f"cannot {verb} {key} in {self.uri}: {self._redacted(error)}"
        if isinstance(error, _FINAL):
            return StoreError(message, object=key, hint="check the credentials, the endpoint and the bucket's policy")
        if "builder error" in message:  # refused before anything was sent: a plain http endpoint, most likely
            return StoreError(message, object=key, hint="an http:// endpoint needs the storage option allow_http=true")
        return StoreUnavailableError(message, object=key, hint="check the network, the endpoint and the store's state, then try again")

    def _redacted(self, error: Exception) -> str:
        """The first line of what obstore says, without any option's value in it."""
        text = str(error).strip().split("\n", 1)[0][:300]
        for value in self._location.options.values():
            if len(value) > 3:
                text = text.replace(value, "…")
        return text


def _open(location: Location) -> Any:
    options: dict[str, Any] = dict(location.options)
    client: dict[str, Any] = dict(_CLIENT_DEFAULTS)
    for name in _ALLOW_HTTP:  # obstore reads it from the environment only when it is given no client options at all
        if os.environ.get(name.upper(), "").lower() in _YES:
            client["allow_http"] = True
    for name in list(options):
        plain = name.lower()
        if plain in _ALLOW_HTTP:
            client["allow_http"] = options.pop(name).lower() in _YES
        elif plain in ("timeout", "connect_timeout", "pool_idle_timeout", "proxy_url", "user_agent"):
            client[plain] = options.pop(name)
        elif plain == "allow_invalid_certificates":
            client[plain] = options.pop(name).lower() in _YES
    kinds: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    try:
        return kinds[location.scheme](
            location.bucket, prefix=location.path or None, config=options, client_options=client, retry_config=_RETRY_NONE
        )
    except Exception as error:
        text = str(error).split("\n", 1)[0][:200]
        for value in location.options.values():
            text = text.replace(value, "…") if len(value) > 3 else text
        raise InvalidInputError(
            f"{location.uri} cannot be opened: {text}",
            hint="storage_options take object_store's names, e.g. aws_access_key_id, azure_storage_account_name, google_service_account",
        ) from None
