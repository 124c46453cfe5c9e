"""Durable, low-latency, fenced writes into columnar tables on object storage."""

from headgate import metrics
from headgate.bulk import BulkLoad, LoadedFiles, LoadReport
from headgate.change_batches import ChangeBatches
from headgate.changes import Changes
from headgate.checkpoint import Checkpoint
from headgate.compact import CompactionReport
from headgate.compact_ranges import ShardCompaction, WrittenRange
from headgate.config import ShardWriterConfig
from headgate.consumer import Consumer, ConsumerPlace, OpenConsumer
from headgate.cuts import ChangePart
from headgate.errors import (
    AlreadyExistsError,
    BackpressureTimeoutError,
    ClosedError,
    CommitConflictError,
    ConsumerTakenError,
    CorruptEntryError,
    DataLossError,
    FencedError,
    HeadgateError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    OutOfSequenceError,
    SchemaMismatchError,
    ShardSplitError,
    SnapshotExpiredError,
    StoreError,
    StoreUnavailableError,
    TransactionConflictError,
    UnsupportedFormatError,
    UnsupportedStoreError,
    WalHoleError,
    WalStoreMismatchError,
    WalTruncatedError,
    WriterPoisonedError,
)
from headgate.feed import Offset
from headgate.indexes import scalar_index, text_index, vector_index
from headgate.life.drop import DropReport
from headgate.life.gc import GcReport
from headgate.life.repair import RepairReport, RepairStep
from headgate.life.status import RunInfo, ShardStatus, SliceInfo, TableStatus
from headgate.life.verify import Problem, VerifyReport
from headgate.memtable import MemTableStats
from headgate.query.scan import Scan
from headgate.shard import Shard
from headgate.sharding import bucket, identity, unsharded
from headgate.snapshot import Snapshot
from headgate.table import Table
from headgate.table_ack import TableAck
from headgate.table_writer import TableWriter
from headgate.tables import clone, create_table, drop_table, open_table, repair_table
from headgate.wal.ack import Ack, Receipt
from headgate.wal.appender import WalAppender
from headgate.wal.entry import Entry, Put
from headgate.wal.tailer import WalTailer
from headgate.writer import ShardWriter
from headgate.writer_stats import BackpressureStats, WalStats

__version__ = "0.1.0"

__all__ = [
    "Ack",
    "AlreadyExistsError",
    "BackpressureStats",
    "BackpressureTimeoutError",
    "BulkLoad",
    "ChangeBatches",
    "ChangePart",
    "Changes",
    "Checkpoint",
    "ClosedError",
    "CommitConflictError",
    "CompactionReport",
    "Consumer",
    "ConsumerPlace",
    "ConsumerTakenError",
    "CorruptEntryError",
    "DataLossError",
    "DropReport",
    "Entry",
    "FencedError",
    "GcReport",
    "HeadgateError",
    "InvalidInputError",
    "LoadReport",
    "LoadedFiles",
    "MemTableStats",
    "NotFoundError",
    "Offset",
    "OpenConsumer",
    "OutOfSequenceError",
    "OutcomeUnknownError",
    "Problem",
    "Put",
    "Receipt",
    "RepairReport",
    "RepairStep",
    "RunInfo",
    "Scan",
    "SchemaMismatchError",
    "Shard",
    "ShardCompaction",
    "ShardSplitError",
    "ShardStatus",
    "ShardWriter",
    "ShardWriterConfig",
    "SliceInfo",
    "Snapshot",
    "SnapshotExpiredError",
    "StoreError",
    "StoreUnavailableError",
    "Table",
    "TableAck",
    "TableStatus",
    "TableWriter",
    "TransactionConflictError",
    "UnsupportedFormatError",
    "UnsupportedStoreError",
    "VerifyReport",
    "WalAppender",
    "WalHoleError",
    "WalStats",
    "WalStoreMismatchError",
    "WalTailer",
    "WalTruncatedError",
    "WriterPoisonedError",
    "WrittenRange",
    "bucket",
    "clone",
    "create_table",
    "drop_table",
    "identity",
    "metrics",
    "open_table",
    "repair_table",
    "scalar_index",
    "text_index",
    "unsharded",
    "vector_index",
]
