# SPDX-License-Identifier: Apache-2.0
"""Questions asked of the rows of tables: `ask` once, `Asker` again and again."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pyarrow as pa

from vllm_relay.progress import showing_progress
from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.jobs.checkpoint import Checkpoint
from vllm_relay.tables.jobs.estimating import estimate_of, tokens_per_prompt
from vllm_relay.tables.jobs.job_plan import JobPlan
from vllm_relay.tables.jobs.job_run import JobRun
from vllm_relay.tables.jobs.options import JobOptions, TokenBudget, TokenBudgetError
from vllm_relay.tables.jobs.report import Estimate, JobReport
from vllm_relay.tables.jobs.rows import Rows
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
    with closing(Asker(options or JobOptions())) as asker:
        report = JobReport() if report is None else report
        with report.timed():
            distinct = Rows(rows)
        try:
            asker.ask(distinct, question, engine, report)
        except TokenBudgetError as error:
            error.answers = distinct.table(question.output, error.of_unasked)
            raise
        return distinct.table(question.output)


class Asker:
    """Asks engines, with one checkpoint and one budget for all questions.

    Raises:
        CheckpointError: the checkpoint cannot be used.
    """

    def __init__(self, options: JobOptions) -> None:
        self._options = options
        self._checkpoint = Checkpoint(options.checkpoint)
        self._budget = TokenBudget(options.max_total_tokens)

    def ask(self, rows: Rows, question: Question, engine: Engine, report: JobReport) -> None:
        """Every row has an answer, NULL or an error afterwards.

        Args:
            report: to which the job is added.

        Raises:
            CheckpointError: an answer cannot be kept.
            EngineError: the engine is gone.
            TokenBudgetError: there are not enough tokens for all prompts.
            KeyboardInterrupt: of whoever waits. In the last three cases the checkpoint has the
                answers that came, without a file until `close`, and more can be asked.
        """
        before = replace(report)
        with report.timed():
            plan = self._plan(rows, self._told(question), engine, self._checkpoint)
            run = JobRun(plan, engine, rows, self._checkpoint, self._budget, report)
            report.num_rows += rows.num_rows
            name = getattr(engine, "model_name", "")
            attributes = of_question(plan.question, name)
            endpoint = self._options.otlp_traces_endpoint
            with span(endpoint, f"chat {name}".strip(), attributes, is_request=True) as record:
                try:
                    run.run(rows.num_distinct, self._options.show_progress)
                finally:
                    record(of_report(report.since(before)))

    def estimate(self, rows: Rows, question: Question, engine: Engine) -> Estimate:
        """What `ask` would take; asks the engine for no answer."""
        question = self._told(question)
        with showing_progress("getting ready", self._options.show_progress) as show:

            def on_counted(num_prompts: int) -> None:
                show("counting tokens", num_prompts / max(rows.num_distinct, 1))

            plan = self._plan(rows, question, engine, self._checkpoint)
            return estimate_of(plan, question, engine, rows.num_rows, on_counted)

    def tokens_per_prompt(self, rows: Rows, question: Question, engine: Engine) -> float:
        """Of an average prompt and its answer, about, whether it is known or not."""
        question = self._told(question)
        with closing(Checkpoint(None)) as nothing_known:
            plan = self._plan(rows, question, engine, nothing_known)
            return tokens_per_prompt(plan, question, engine)

    def close(self) -> None:
        """Close the checkpoint."""
        self._checkpoint.close()

    def _plan(
        self, rows: Rows, question: Question, engine: Engine, checkpoint: Checkpoint
    ) -> JobPlan:
        options = self._options
        buckets = rows.buckets(options.bucket_rows, options.order)
        return JobPlan(buckets, question, engine, options, checkpoint)

    def _told(self, question: Question) -> Question:
        """With what is told in all questions."""
        return replace(question, request=question.request.over(self._options.request))
