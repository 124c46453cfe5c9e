"""How rows find their shard.

Owns: the rules, the hash behind ``bucket``, the names behind ``identity``, taking a batch apart.
Does not own: the shards themselves, making one for a new value (new_shards).

The hash and the names are part of the format: the same value lands in the same shard in every
version, on every machine (docs/format.md has test vectors). The hash is 64 bits wide; n buckets
cut the space of its upper 32 bits into n equal ranges, so a shard is a range, and half a shard
is half a range: a shard that is split has its range cut in two, and no row of another shard moves.
The hash sees values, not layouts: an int32 and an int64, a string and a large_string, a slice and a
copy of it hash the same, so widening a column moves no row.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as types

from headgate.errors import InvalidInputError
from headgate.manifest.model import ShardingRule, ShardRange

SHARDS_MAX = 10_000
IDENTITY_BYTES_MAX = 512
"""Each value of an identity-sharded table stands in the table manifest, so it is short."""

_KIND_CHECKS: tuple[Callable[[pa.DataType], bool], ...] = (
    types.is_integer, types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary,
    types.is_date, types.is_timestamp, types.is_boolean, types.is_decimal128,
)  # fmt: skip


def unsharded() -> ShardingRule:
    """One shard for all rows."""
    return ShardingRule()


def bucket(column: str, buckets: int) -> ShardingRule:
    """``buckets`` shards, chosen by a hash of a key column."""
    if isinstance(buckets, bool) or not isinstance(buckets, int) or not 1 <= buckets <= SHARDS_MAX:
        raise InvalidInputError(f"{buckets!r} buckets", hint=f"1 to {SHARDS_MAX}")
    return ShardingRule(kind="bucket", column=column, buckets=buckets)


def identity(column: str) -> ShardingRule:
    """A shard for each value of a key column, made on first use."""
    return ShardingRule(kind="identity", column=column)


def check_sharding(rule: ShardingRule, schema: pa.Schema, key: tuple[str, ...]) -> None:
    """Refuse a rule by which two versions of a key could land in different shards."""
    if rule.kind == "unsharded":
        return
    if rule.column not in schema.names:
        raise InvalidInputError(f"the sharding column {rule.column!r} is not in the schema", hint=f"columns are {', '.join(schema.names)}")
    if key and rule.column not in key:
        raise InvalidInputError(
            f"the sharding column {rule.column!r} is not part of the key",
            hint="shard by a key column, or an update could land in another shard",
        )
    kind = schema.field(rule.column).type
    if not any(check(kind) for check in _KIND_CHECKS):
        raise InvalidInputError(
            f"the sharding column {rule.column!r} has type {kind}",
            hint="shard by integers, strings, binary, booleans, dates, timestamps or decimals",
        )


def keeps_shards(old: pa.DataType, new: pa.DataType) -> bool:
    """Does a sharding column that becomes ``new`` leave every row in its shard?"""
    if old.equals(new):
        return True
    pairs = (
        (types.is_integer, types.is_integer),
        (types.is_string, types.is_large_string),
        (types.is_binary, types.is_large_binary),
    )
    if types.is_decimal128(old) and types.is_decimal128(new):
        return bool(old.scale == new.scale)
    return any(a(old) and b(new) for a, b in pairs)


def first_shards(rule: ShardingRule) -> tuple[str, ...]:
    """The shards a new table starts with."""
    return tuple(map(_bucket_name, range(rule.buckets if rule.kind == "bucket" else 0 if rule.kind == "identity" else 1)))


def _bucket_name(number: int) -> str:
    return f"{number:04d}"


# -- the hash

Hashes = npt.NDArray[np.uint64]
Lengths = npt.NDArray[np.int64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_WORDS_AT_ONCE = 1 << 16
"""So that what is worked on stays in the cache, however much text there is."""


def _mixed(words: Hashes) -> Hashes:
    """SplitMix64's finaliser: one to one, and every bit of the input reaches every bit of the output."""
    words = words + _GAMMA
    words ^= words >> np.uint64(30)
    words *= _MIX_1
    words ^= words >> np.uint64(27)
    words *= _MIX_2
    words ^= words >> np.uint64(31)
    return words


def hash_values(column: pa.Array) -> Hashes:
    """A 64-bit hash of each value; nulls hash as 0.

    Integers, booleans, dates and timestamps by their 64-bit value, text, bytes and decimals by their bytes.
    """
    if not len(column):
        return np.zeros(0, np.uint64)
    kind = column.type
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_date(kind) or types.is_timestamp(kind):
        hashes = _mixed(_as_words(column))
    else:
        hashes = _hash_bytes(*_bytes_of(column))
    if column.null_count:
        hashes[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return hashes


def _as_words(column: pa.Array) -> Hashes:
    kind = column.type
    if types.is_boolean(kind):
        column = column.cast(pa.uint8())
    elif types.is_date32(kind):
        column = column.cast(pa.int32())
    elif not types.is_integer(kind):
        column = column.cast(pa.int64())
    values: npt.NDArray[np.generic] = (column.fill_null(0) if column.null_count else column).to_numpy(zero_copy_only=False)
    return values.astype(np.int64 if values.dtype.kind == "i" else np.uint64).view(np.uint64)


def _bytes_of(column: pa.Array) -> tuple[npt.NDArray[np.uint8], Lengths, Lengths]:
    """Where the bytes are, where each value starts, and how long it is."""
    kind, first, count, buffers = column.type, column.offset, len(column), column.buffers()
    if types.is_fixed_size_binary(kind) or types.is_decimal(kind):
        width = kind.byte_width
        starts = np.arange(first, first + count, dtype=np.int64) * width
        lengths = np.full(count, width, dtype=np.int64)
    else:
        wide = types.is_large_string(kind) or types.is_large_binary(kind)
        offsets = np.frombuffer(buffers[1], dtype=np.int64 if wide else np.int32)[first : first + count + 1].astype(np.int64)
        starts, lengths = offsets[:-1], np.diff(offsets)
    data = buffers[-1]
    body = np.frombuffer(data, dtype=np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    return body, starts, lengths


def _hash_bytes(body: npt.NDArray[np.uint8], starts: Lengths, lengths: Lengths) -> Hashes:
    """A word is eight bytes, little endian, the last one filled with zeros. Each is mixed with its number, then they are added.

    So the words of all values are worked on at once, and one long value costs no more than its bytes.
    """
    counts = (lengths + 7) >> 3
    sums = np.zeros(len(starts), np.uint64)
    for low, high in _portions(counts):
        sums[low:high] = _sums(body, starts[low:high], lengths[low:high], counts[low:high])
    return _mixed(sums + lengths.astype(np.uint64))


def _portions(counts: Lengths) -> Iterator[tuple[int, int]]:
    """Rows in a row with about ``_WORDS_AT_ONCE`` words, or one row with more."""
    ends = np.cumsum(counts)
    low = done = 0
    while low < len(counts):
        high = max(low + 1, int(np.searchsorted(ends, done + _WORDS_AT_ONCE, side="right")))
        yield low, high
        low, done = high, int(ends[high - 1])


def _sums(body: npt.NDArray[np.uint8], starts: Lengths, lengths: Lengths, counts: Lengths) -> Hashes:
    sums = np.zeros(len(starts), np.uint64)
    some = np.flatnonzero(counts)
    if not len(some):
        return sums
    starts, lengths, counts = starts[some], lengths[some], counts[some]
    first, end = int(starts[0]), int(starts[-1] + lengths[-1])
    padded = np.zeros(end - first + 8, np.uint8)
    padded[: end - first] = body[first:end]
    at_every_byte: npt.NDArray[np.uint64] = np.ndarray((len(padded) - 7,), dtype="<u8", buffer=padded.data, strides=(1,))
    begins = np.cumsum(counts) - counts
    numbers = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(begins, counts)
    words = at_every_byte[np.repeat(starts - first, counts) + (numbers << 3)].astype(np.uint64)
    # The last word of a value is cut to the bytes that belong to it: 1 to 8 of them.
    words[begins + counts - 1] &= np.uint64(0xFFFFFFFFFFFFFFFF) >> (((counts << 3) - lengths).astype(np.uint64) << np.uint64(3))
    keys = _mixed(np.arange(int(counts.max()), dtype=np.uint64))
    sums[some] = np.add.reduceat(_mixed(words ^ keys[numbers]), begins)
    return sums


def bucket_of(column: pa.Array, buckets: int) -> npt.NDArray[np.int64]:
    """Which of the equal ranges of the hash space each value falls into."""
    return (((hash_values(column) >> _HALF) * np.uint64(buckets)) >> _HALF).astype(np.int64)


# -- ranges: what shards become when they are split

HASHES = 1 << 32
"""How many there are, of the upper 32 bits."""


def ranges_of(rule: ShardingRule) -> tuple[ShardRange, ...]:
    """The part of the hash space that each shard has. Buckets are equal parts, so no row moves when they are written down as ranges."""
    if rule.ranges:
        return rule.ranges
    count = rule.buckets if rule.kind == "bucket" else 1
    return tuple(ShardRange(-(-number * HASHES // count), _bucket_name(number)) for number in range(count))


def range_of(rule: ShardingRule, shard: str) -> tuple[int, int] | None:
    """From which hash, and up to which, rows belong to a shard. None: it is none of the rule's."""
    parts = ranges_of(rule)
    for number, part in enumerate(parts):
        if part.shard == shard:
            return part.low, parts[number + 1].low if number + 1 < len(parts) else HASHES
    return None


def with_children(rule: ShardingRule, parent: str, children: Sequence[tuple[int, str]], column: str) -> ShardingRule:
    """The rule once a shard was split: its range is cut where the children begin, all others are as they were."""
    kept = [part for part in ranges_of(rule) if part.shard != parent]
    return rule.but(column=column, ranges=tuple(sorted([*kept, *(ShardRange(low, shard) for low, shard in children)])))


def is_inside(column: pa.Array, low: int, high: int) -> npt.NDArray[np.bool_]:
    """Which values belong to a range."""
    hashes = hash_values(column) >> _HALF
    return np.asarray((hashes >= np.uint64(low)) & (hashes < np.uint64(high)), np.bool_)


def _range_numbers(column: pa.Array, ranges: Sequence[ShardRange]) -> npt.NDArray[np.int64]:
    lows = np.array([part.low for part in ranges], np.uint64)
    return np.searchsorted(lows, hash_values(column) >> _HALF, side="right").astype(np.int64) - 1


# -- the names of identity's shards

_PLAIN = re.compile(r"(?!x-)[a-z0-9][a-z0-9_-]{0,47}")


def identity_shard(value: str | None) -> str:
    """The shard of a value (as ``identity_values`` spells it), by its name.

    A short value of lower-case letters, digits, ``_`` and ``-`` is its own name. Any other gets
    ``x-``, something to recognise it by, and 128 bits of a hash; the table manifest says which value
    a shard is for. No two names differ in case only, and none begins with a dash.
    """
    if value is None:
        return "x-null"
    if _PLAIN.fullmatch(value):
        return value
    digest = hashlib.blake2b(value.encode(), digest_size=16).hexdigest()
    words = re.sub("[^a-z0-9]+", "-", value[:64].lower())[:24].strip("-")
    return f"x-{words}-{digest}" if words else f"x-{digest}"


def identity_values(column: pa.Array) -> list[str | None]:
    """Each value as text, one text per value: what the table manifest keeps.

    Text as it is, bytes in hex, dates and decimals as people write them, timestamps as their number.

    Raises:
        InvalidInputError: a value is too long, or is no text.
    """
    texts = _spelled(column)
    longest = max((len(text.encode()) for text in texts if text is not None), default=0)
    if longest > IDENTITY_BYTES_MAX:
        raise InvalidInputError(
            f"a value to shard by is {longest} bytes long", hint=f"{IDENTITY_BYTES_MAX} at most; shard by bucket, or by a shorter column"
        )
    return texts


def _spelled(column: pa.Array) -> list[str | None]:
    kind = column.type
    try:
        if types.is_decimal(kind):
            return [None if value is None else f"{value:f}" for value in column.to_pylist()]
        if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
            return [None if value is None else value.hex() for value in column.to_pylist()]
        if not types.is_string(kind) and not types.is_large_string(kind):
            column = (column.cast(pa.int64()) if types.is_timestamp(kind) or types.is_date64(kind) else column).cast(pa.string())
        texts: list[str | None] = column.to_pylist()
    except UnicodeError as error:
        raise InvalidInputError(f"a value to shard by is no text: {error}", hint="encode it in UTF-8") from None
    return texts


# -- taking a batch apart


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one shard, in the order they came."""

    shard: str
    rows: pa.RecordBatch = field(repr=False)
    value: str | None = None
    """With identity sharding: what the shard is for."""


def split_rows(rule: ShardingRule, rows: pa.RecordBatch) -> list[Part]:
    """The rows of each shard, ordered by its name. All for one shard: without a copy.

    Raises:
        InvalidInputError: with identity sharding, a value that no shard can be made for.
    """
    if rule.ranges:
        grouped = _grouped(rows, _range_numbers(rows.column(rule.column), rule.ranges))
        return sorted((Part(rule.ranges[number].shard, part) for number, part in grouped), key=lambda part: part.shard)
    if rule.kind == "unsharded" or (rule.kind == "bucket" and rule.buckets == 1):
        return [Part(_bucket_name(0), rows)] if rows.num_rows else []
    column = rows.column(rule.column)
    if rule.kind == "bucket":
        numbers = bucket_of(column, rule.buckets)
        return [Part(_bucket_name(number), part) for number, part in _grouped(rows, numbers)]
    encoded = column.dictionary_encode(null_encoding="encode")
    if len(encoded.dictionary) > SHARDS_MAX:
        raise InvalidInputError(
            f"the rows have {len(encoded.dictionary)} values of {rule.column!r}, and each would be a shard",
            hint=f"{SHARDS_MAX} shards at most; shard by bucket",
        )
    values = identity_values(encoded.dictionary)
    numbers = encoded.indices.to_numpy(zero_copy_only=False)
    parts = [Part(identity_shard(values[number]), part, values[number]) for number, part in _grouped(rows, numbers)]
    return sorted(parts, key=lambda part: part.shard)


def shards_of(rule: ShardingRule, rows: pa.RecordBatch) -> set[str]:
    """Where rows with these values are, if they are anywhere; the shards of identity may not be there."""
    if rule.ranges and rows.num_rows:
        return {rule.ranges[number].shard for number in np.unique(_range_numbers(rows.column(rule.column), rule.ranges))}
    if rule.kind == "unsharded" or not rows.num_rows:
        return {_bucket_name(0)} if rows.num_rows else set()
    column = rows.column(rule.column)
    if rule.kind == "bucket":
        return {_bucket_name(int(number)) for number in np.unique(bucket_of(column, rule.buckets))}
    return {identity_shard(value) for value in _spelled(column.unique())}


def _grouped(rows: pa.RecordBatch, numbers: npt.NDArray[np.integer]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each number, in their order. Copies, so that no part keeps the others in memory."""
    if not len(numbers):
        return
    if (numbers == numbers[0]).all():
        yield int(numbers[0]), rows
        return
    order = np.argsort(numbers.astype(np.uint16), kind="stable")  # 16 bits are enough for SHARDS_MAX, and sort by radix
    ordered = numbers[order]
    cuts = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(order)]
    for start, end in itertools.pairwise(cuts):
        yield int(ordered[start]), rows.take(pa.array(order[start:end]))
