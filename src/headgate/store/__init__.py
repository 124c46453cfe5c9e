"""Storage: one seam, and what stands behind it.

| file | owns |
| --- | --- |
| base | the contract |
| local · memory · object | the stores |
| location | URIs, options, which store |
| retry | bounded retries of what can be repeated |
| exact | a create that happens once, whatever the reply |
| probe | refusing a store that lacks what is needed |
| faulty | failing on purpose |
"""

from headgate.store.base import Data, ObjectInfo, Store, sized
from headgate.store.exact import create_exactly
from headgate.store.location import Location, Options
from headgate.store.probe import probe
from headgate.store.retry import RetryingStore, RetryPolicy

__all__ = ["Data", "Location", "ObjectInfo", "Options", "RetryPolicy", "RetryingStore", "Store", "create_exactly", "probe", "sized"]
