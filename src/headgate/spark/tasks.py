"""Work by Spark's tasks: one task for each number, and what it answers.

Owns: how work gets to tasks, and answers back. Does not own: what is done (jobs).

A job here is a DataFrame of numbers that ``mapInArrow`` turns into answers: nothing of it needs more than a session, so
it runs the same through Spark Connect. What a task gets is pickled by Spark, and so small; what it answers is JSON.
A task that fails is run again by Spark, so work must be such that doing it twice does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from pydantic import TypeAdapter

from headgate.spark.worker import begin_task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Answer = TypeVar("Answer")


def answers(spark: SparkSession, work: Callable[[int], Answer], count: int, kind: type[Answer]) -> list[Answer]:
    """What ``work`` answers for each number below ``count``, in order. Answers are dataclasses, of this kind."""
    if not count:
        return []
    adapter: Any = TypeAdapter(kind)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begin_task()
        form: Any = TypeAdapter(kind)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                said = form.dump_json(work(number)).decode()
                yield pa.RecordBatch.from_pydict({"number": [number], "answer": [said]})

    rows = spark.range(0, count, 1, count).mapInArrow(run, "number long, answer string").collect()
    found = {row["number"]: adapter.validate_json(row["answer"]) for row in rows}
    return [found[number] for number in range(count)]
