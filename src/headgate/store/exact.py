"""Creating an object exactly once, whatever the store replies.

Owns: the answers to "name taken". Does not own: what a foreign object there means.

A create's request or its reply may be lost, delayed or repeated, and S3 answers 409 for a
race that left nothing behind. So the reply alone decides nothing; what stands under the name
does:

    our own bytes       the reply was lost: it happened
    nothing             409, or collected since it was read: send the same bytes again, bounded
    other bytes         the caller judges: a seal means fenced, anything else a broken store

A retry sends the same bytes, so it does not matter which of the copies arrived.
"""

from __future__ import annotations

from headgate.clock import Clock
from headgate.errors import ObjectExistsError, ObjectMissingError, StoreError, StoreUnavailableError
from headgate.failpoint import failpoint
from headgate.meters import STORE_ERRORS, STORE_RETRIES
from headgate.store.base import Data, Store
from headgate.store.retry import RetryPolicy


def create_exactly(store: Store, key: str, body: Data, clock: Clock, policy: RetryPolicy) -> memoryview | None:
    """Create ``key`` with ``body``. None: it stands there. Otherwise: what stands there instead.

    Raises:
        StoreUnavailableError: the retries are used up and the outcome is unknown.
        StoreSyncError: a failed fsync, never retried.
    """
    last: StoreUnavailableError | None = None
    for attempt in range(policy.retries + 1):
        try:
            store.create(key, body)
            return None
        except ObjectExistsError:
            failpoint("create.name-taken")
            try:
                occupant = store.get(key)
            except ObjectMissingError:
                last = StoreUnavailableError(
                    f"{store.uri} says that {key} exists, and has nothing there", object=key, hint="the store answers 409 to a lone writer"
                )
            except StoreUnavailableError as error:
                last = error
            else:
                return None if occupant == memoryview(body).cast("B") else occupant
        except StoreUnavailableError as error:
            last = error
        except StoreError as error:
            STORE_ERRORS.add(1, store.uri, type(error).__name__)
            raise
        STORE_ERRORS.add(1, store.uri, type(last).__name__)
        if attempt < policy.retries:
            STORE_RETRIES.add(1, store.uri, "create")
            clock.sleep(policy.delay(attempt, clock))
    assert last is not None
    raise last
