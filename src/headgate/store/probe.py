"""Does this store do what the protocol needs? Asked once, before anything depends on it.

A store that lets a second create through would let two writers acknowledge at the same
position; one whose listings lag would hide a successor. Better refused than believed.
"""

from __future__ import annotations

from headgate.clock import Clock
from headgate.errors import HeadgateError, ObjectMissingError, UnsupportedStoreError
from headgate.store.base import Store
from headgate.store.exact import create_exactly
from headgate.store.retry import RetryPolicy

_FOLDER = "probe/"


def probe(store: Store, clock: Clock) -> None:
    """Create twice, read, list, delete, under a random name.

    Raises:
        UnsupportedStoreError: the store ignores create-if-absent, or does not show what was written.
    """
    key = f"{_FOLDER}{clock.token()}"
    body = key.encode()
    policy = RetryPolicy()
    try:
        create_exactly(store, key, body, clock, policy)
        if bytes(store.get(key)) != body:
            raise _refused(store, "an object read back is not what was written")
        if create_exactly(store, key, b"second", clock, policy) is None:
            raise _refused(store, "a second create of the same name succeeded")
        if store.head(key).size_bytes != len(body):
            raise _refused(store, "an object has another size than what was written")
        if key not in [info.key for info in store.list(_FOLDER)]:
            raise _refused(store, "a listing does not show an object written before it")
        if key in [info.key for info in store.list(_FOLDER, start_after=key)]:
            raise _refused(store, "a listing ignores where it should start")
    except ObjectMissingError:
        raise _refused(store, "an object is missing right after it was written") from None
    finally:
        try:
            store.delete([key])
        except HeadgateError:  # a leftover of 40 bytes; what went wrong before matters more
            pass


def _refused(store: Store, why: str) -> UnsupportedStoreError:
    return UnsupportedStoreError(
        f"{store.uri} cannot hold a table: {why}",
        hint="Headgate needs conditional creates (If-None-Match: *) and listings that see what was written; "
        "for S3-compatible stores check the server's version and the option aws_conditional_put",
    )
