# SPDX-License-Identifier: Apache-2.0
"""A question asked of the rows of a table that is in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing

import pyarrow as pa

from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.jobs.answer_length import with_max_tokens
from vllm_relay.tables.jobs.answers import ARROW_TYPES, Answer
from vllm_relay.tables.jobs.checkpoint import Checkpoint, Keys
from vllm_relay.tables.jobs.estimate import JobReport
from vllm_relay.tables.jobs.job_plan import Bucket, JobPlan
from vllm_relay.tables.jobs.job_run import JobRun
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.token_budget import TokenBudget
from vllm_relay.tables.question import Question


def ask(
    rows: pa.Table,
    question: Question,
    engine: Engine,
    options: JobOptions | None = None,
    report: JobReport | None = None,
) -> pa.Table:
    """Ask about every row; equal rows are asked about once.

    Args:
        rows: whose columns are the question's fields, in their order: JSON of their values, as
            texts. Rows are ordered in buckets as they come.
        report: to which the job is added.

    Returns:
        The columns ``answer``, of the output's type, ``error`` and ``is_cut`` of each row, see
        `Answer`.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        EngineError: the engine is gone.
        TokenBudgetError: there are not enough tokens for all prompts.
    """
    options = options or JobOptions()
    report = JobReport() if report is None else report
    answers = _Answers(rows.num_rows)
    report.num_rows += rows.num_rows
    with closing(Checkpoint(options.checkpoint)) as checkpoint:
        plan = plan_job(
            _buckets(rows, options.bucket_rows),
            question,
            engine,
            options,
            checkpoint,
            are_distinct=False,
        )
        budget = TokenBudget(options.max_total_tokens)
        run = JobRun(plan, engine, answers, checkpoint, budget, report)
        run.run(rows.num_rows, options.show_progress)
    return answers.table(ARROW_TYPES[question.output.type])


def plan_job(
    buckets: Iterable[Bucket],
    question: Question,
    engine: Engine,
    options: JobOptions,
    checkpoint: Checkpoint,
    *,
    are_distinct: bool,
) -> JobPlan:
    """See `JobPlan`.

    Args:
        question: as it was given.
    """
    keys = Keys(
        engine.identity, question, options.template, options.order == "keep", options.modules
    )
    asked = with_max_tokens(question, engine)
    return JobPlan(buckets, asked, engine, options, checkpoint, keys, are_distinct=are_distinct)


def _buckets(rows: pa.Table, bucket_rows: int) -> Iterator[Bucket]:
    for begin in range(0, rows.num_rows, bucket_rows):
        part = rows.slice(begin, bucket_rows)
        numbers = range(begin, begin + part.num_rows)
        yield Bucket(list(numbers), [1] * part.num_rows, part)


class _Answers:
    """By row."""

    def __init__(self, num_rows: int) -> None:
        self._of_row = [Answer()] * num_rows

    def add(self, numbers: list[int], answer: Answer) -> None:
        """See `Answers`."""
        for number in numbers:
            self._of_row[number] = answer

    def table(self, type: pa.DataType) -> pa.Table:
        return pa.table(
            {
                "answer": pa.array([each.value for each in self._of_row], type),
                "error": pa.array([each.error for each in self._of_row], pa.string()),
                "is_cut": pa.array([each.is_cut for each in self._of_row], pa.bool_()),
            }
        )
