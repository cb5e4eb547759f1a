# SPDX-License-Identifier: Apache-2.0
"""Questions asked of the rows of tables: `ask` of a table in memory, `Asker` of any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Protocol

import pyarrow as pa

from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.jobs.answers import Answers
from vllm_relay.tables.jobs.checkpoint import Checkpoint
from vllm_relay.tables.jobs.estimates.estimate import Estimate, JobReport
from vllm_relay.tables.jobs.estimates.estimating import estimate_of, tokens_per_prompt
from vllm_relay.tables.jobs.job_plan import Bucket, JobPlan
from vllm_relay.tables.jobs.job_run import JobRun
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.rows.arrow_rows import ArrowAnswers, ArrowRows
from vllm_relay.tables.jobs.token_budget import TokenBudget, TokenBudgetError
from vllm_relay.tables.ordering.order import OrderChoice
from vllm_relay.tables.question import Question
from vllm_relay.tables.tracing import of_question, of_report, span


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
            texts.
        report: to which the job is added.

    Returns:
        The columns ``answer``, of the output's type, ``error`` and ``is_cut`` of each row, see
        `Answer`.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        EngineError: the engine is gone.
        TokenBudgetError: there are not enough tokens for all prompts; `answers` of the error is
            what else would be returned, in which rows that were not asked about have an error.
    """
    asker = Asker(engine, options or JobOptions(), report)
    with closing(asker), asker.report.timed():
        distinct = ArrowRows(rows)
        answers = ArrowAnswers(distinct, question.output)
        try:
            asker.ask(distinct, question, answers)
        except TokenBudgetError as error:
            error.answers = answers.table(f"not asked: {error.limit}")
            raise
        return answers.table()


class SourceRows(Protocol):
    """The different rows of a table.

    Attributes:
        num_distinct: how many.
        num_rows: of the table, with those that are equal to others.
    """

    num_distinct: int
    num_rows: int

    def buckets(self, max_rows: int, order: OrderChoice) -> Iterator[Bucket]:
        """The rows, each once.

        Where they are too many for one bucket they are sorted first, by the field that saves most
        when it comes first (Algorithm 1 of Liu et al.), unless the order is "keep".
        """
        ...


class Asker:
    """Asks an engine, with one checkpoint and one budget for all questions.

    Args:
        engine: that answers; it is its owner's.
        options: of all questions.
        report: to which they are added; None makes one.

    Raises:
        CheckpointError: the checkpoint cannot be used.
    """

    def __init__(
        self, engine: Engine, options: JobOptions, report: JobReport | None = None
    ) -> None:
        self.report = JobReport() if report is None else report
        self._engine = engine
        self._options = options
        self._checkpoint = Checkpoint(options.checkpoint)
        self._budget = TokenBudget(options.max_total_tokens)

    def ask(self, rows: SourceRows, question: Question, answers: Answers) -> None:
        """Every row has an answer, NULL or an error afterwards.

        Raises:
            CheckpointError: an answer cannot be kept.
            EngineError: the engine is gone.
            TokenBudgetError: there are not enough tokens for all prompts.
            KeyboardInterrupt: of whoever waits. In the last three cases the checkpoint has the
                answers that came, without a file until `close`, and more can be asked.
        """
        plan = self._plan(rows, self._told(question), self._checkpoint)
        run = JobRun(plan, self._engine, answers, self._checkpoint, self._budget, self.report)
        before = replace(self.report)
        self.report.num_rows += rows.num_rows
        name = getattr(self._engine, "model_name", "")
        attributes = of_question(plan.question, name)
        endpoint = self._options.otlp_traces_endpoint
        with span(endpoint, f"chat {name}".strip(), attributes, is_request=True) as record:
            try:
                run.run(rows.num_distinct, self._options.show_progress)
            finally:
                record(of_report(self.report.since(before)))

    def estimate(self, rows: SourceRows, question: Question) -> Estimate:
        """What `ask` would take; asks the engine for no answer."""
        question = self._told(question)
        plan = self._plan(rows, question, self._checkpoint)
        return estimate_of(plan, question, self._engine, rows.num_rows)

    def tokens_per_prompt(self, rows: SourceRows, question: Question) -> float:
        """Of an average prompt and its answer, about, whether it is known or not."""
        question = self._told(question)
        with closing(Checkpoint(None)) as nothing_known:
            plan = self._plan(rows, question, nothing_known)
            return tokens_per_prompt(plan, question, self._engine)

    def close(self) -> None:
        """Close the checkpoint."""
        self._checkpoint.close()

    def _plan(self, rows: SourceRows, question: Question, checkpoint: Checkpoint) -> JobPlan:
        options = self._options
        buckets = rows.buckets(options.bucket_rows, options.order)
        return JobPlan(buckets, question, self._engine, options, checkpoint)

    def _told(self, question: Question) -> Question:
        """With what is told in all questions."""
        return replace(question, request=question.request.over(self._options.request))
