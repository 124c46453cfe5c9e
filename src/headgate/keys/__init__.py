"""Keys: one total order over them, exact, and the newest row of each.

Owns: how keys compare, finding one among others, the rows that puts come to. Does not own: where
rows are kept (memtable, run) or which source of a read is newer (query).

The order, everywhere the same, of runs, merges and ranges: numbers, decimals, dates and times by
value, false before true, text by its UTF-8 bytes, bytes as they stand, shorter before longer, and
several columns one after the other. It does not change when a column's type is widened.

For work on whole columns keys take one of three forms. One column that fits 64 bits, or several that
fit together, are numbers in numpy. Several columns of whole numbers that do not are numbers by column
(columns). Everything else is bytes whose own order is the order of the keys: numbers big-endian with
the sign flipped, text and bytes in front of another column ended by 00 00 with 00 inside as 00 FF. Two
different keys never come to the same bytes: nothing is hashed.
"""

from headgate.keys.columns import ColumnKeys
from headgate.keys.form import Bools, ByteKeys, Keys, NumberKeys, Offsets
from headgate.keys.newest import RunRows, deleted_of, newest_rows, rows_of
from headgate.keys.order import KeyOrder

__all__ = [
    "Bools",
    "ByteKeys",
    "ColumnKeys",
    "KeyOrder",
    "Keys",
    "NumberKeys",
    "Offsets",
    "RunRows",
    "deleted_of",
    "newest_rows",
    "rows_of",
]
