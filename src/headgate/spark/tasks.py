"""Work by Spark's tasks: one task for each number, and what it answers.

Owns: how work gets to tasks, and answers back. Does not own: what is done (jobs).

A job here is a list of numbers that tasks turn into answers. Where there is a Spark context it is just that: to plan a query
takes longer than many a task, and its planner would take the tasks' cores meanwhile. Through Spark Connect, where there is
none, it is a DataFrame of numbers and ``mapInArrow``. What a task gets is pickled by Spark, and so small; what it answers is
JSON. A task that fails is run again by Spark, so work must be such that doing it twice does no harm.
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

    def said(number: int) -> str:
        begin_task()
        form: Any = TypeAdapter(kind)
        text: str = form.dump_json(work(number)).decode()
        return text

    context = getattr(spark, "sparkContext", None)
    texts = _by_query(spark, said, count) if context is None else context.parallelize(range(count), count).map(said).collect()
    form: Any = TypeAdapter(kind)
    return [form.validate_json(text) for text in texts]


def _by_query(spark: SparkSession, said: Callable[[int], str], count: int) -> list[str]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield pa.RecordBatch.from_pydict({"number": [number], "answer": [said(number)]})

    rows = spark.range(0, count, 1, count).mapInArrow(run, "number long, answer string").collect()
    found = {row["number"]: row["answer"] for row in rows}
    return [found[number] for number in range(count)]
