# SPDX-License-Identifier: Apache-2.0
"""Questions asked of the rows of a DuckDB query."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice

import duckdb
import numpy as np

from vllm_relay.tables.engines.base import Engine, PromptShape
from vllm_relay.tables.jobs.answer_length import expected_tokens, likely_cut
from vllm_relay.tables.jobs.answer_table import AnswerTable
from vllm_relay.tables.jobs.asking import plan_job
from vllm_relay.tables.jobs.checkpoint import Checkpoint
from vllm_relay.tables.jobs.estimate import Estimate, JobReport
from vllm_relay.tables.jobs.job_plan import AskedRows, JobPlan, KnownRows, RefusedRows, Step
from vllm_relay.tables.jobs.job_rows import JobRows
from vllm_relay.tables.jobs.job_run import JobRun
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.token_budget import TokenBudget, TokenBudgetError
from vllm_relay.tables.ordering.cached_tokens import cached_tokens
from vllm_relay.tables.ordering.sequences import TokenSequences
from vllm_relay.tables.question import Question

_PROMPTS_PER_PART = 4096


class JobRunner:
    """Runs and estimates jobs on one DuckDB connection; answers are asked once.

    Args:
        connection: on which sources are read and answers become temporary tables.
        engine: that answers.
        options: of all jobs.

    Attributes:
        report: of all jobs so far.

    Raises:
        CheckpointError: the checkpoint cannot be used.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, engine: Engine, options: JobOptions
    ) -> None:
        self.engine = engine
        self.options = options
        self.report = JobReport()
        self._connection = connection
        self._checkpoint = Checkpoint(options.checkpoint)
        self._budget = TokenBudget(options.max_total_tokens)

    def answer(
        self,
        source: str,
        question: Question,
        target: str,
        *,
        keep_partial: bool = False,
        tells_cut: bool = False,
    ) -> None:
        """Ask about every distinct row.

        Args:
            source: a query whose columns are the question's fields, by name.
            target: the temporary table that is made: the distinct rows of the source in the order
                in which they first come, with the columns ``relay_answer``, of the output's SQL
                type, and ``relay_error``, VARCHAR. Both are NULL where all fields are; neither is
                where a text was cut.
            keep_partial: whether the target is made also where a TokenBudgetError is raised; rows
                that were not asked about have an error there.
            tells_cut: whether the target has a column ``relay_is_cut``, BOOLEAN: whether the answer
                ended at its last token.

        Raises:
            ValueError: the source has other columns than the question fields, the target is there
                already, or a field has the name of an answer's column.
            CheckpointError: an answer cannot be kept.
            EngineError: the engine is gone.
            TokenBudgetError: there are not enough tokens for all prompts.
            KeyboardInterrupt: of whoever waits. In the last three cases the checkpoint has the
                answers that came, without a file until `close`, and the runner can be used again.
        """
        question = self._told(question)
        began_s = time.perf_counter()
        waiting_s = 0.0
        try:
            with ExitStack() as cleanup:
                rows = JobRows(self._connection, source, question)
                cleanup.callback(rows.drop)
                answers = AnswerTable(self._connection, rows, question.output, target)
                cleanup.callback(answers.drop)
                plan = self._plan(rows, question)
                run = JobRun(
                    plan, self.engine, answers, self._checkpoint, self._budget, self.report
                )
                self.report.num_rows += rows.num_rows
                try:
                    run.run(rows.num_distinct, self.options.show_progress)
                except TokenBudgetError:
                    if keep_partial:
                        answers.add_error_to_rest(
                            f"not asked: the budget of {self._budget.max_tokens:,} tokens is spent"
                        )
                        answers.write(tells_cut=tells_cut)
                    raise
                finally:
                    self._budget.release()
                    waiting_s = run.waiting_s
                answers.write(tells_cut=tells_cut)
        finally:
            seconds = time.perf_counter() - began_s
            self.report.seconds += seconds
            self.report.planning_seconds += seconds - waiting_s

    def estimate(self, source: str, question: Question) -> Estimate:
        """What `answer` would take; asks the engine for no answer."""
        question = self._told(question)
        with ExitStack() as cleanup:
            rows = JobRows(self._connection, source, question)
            cleanup.callback(rows.drop)
            plan = self._plan(rows, question)
            counted = _Counted(plan)
            cache = self.engine.cache
            if cache is None:
                cached = None
                for _ in counted.prompts():
                    pass
            else:
                cached = int(np.sum(cached_tokens(counted.prompts(), cache)))
                cached += counted.cached_module_tokens
        output_tokens = counted.num_asked * expected_tokens(question, self.engine)
        return Estimate(
            num_rows=rows.num_rows,
            num_prompts=counted.num_asked + counted.num_known + counted.num_refused,
            num_known=counted.num_known,
            prompt_tokens=counted.prompt_tokens,
            cached_tokens=cached,
            output_tokens=output_tokens,
            order=plan.order_name,
            seconds=self._seconds(
                plan.question, counted.num_asked, counted.prompt_tokens, cached, output_tokens
            ),
            tokens_are_exact=self.engine.tokenizer is not None,
            num_refused=counted.num_refused,
            num_modular=counted.num_modular,
            warning=likely_cut(question, self.engine, counted.longest_prompt_tokens),
        )

    def tokens_per_prompt(self, source: str, question: Question) -> float:
        """Of an average prompt and its answer, about, whether it is known or not."""
        question = self._told(question)
        with ExitStack() as cleanup:
            rows = JobRows(self._connection, source, question)
            cleanup.callback(rows.drop)
            nothing_known = Checkpoint(None)
            cleanup.callback(nothing_known.close)
            counted = _Counted(self._plan(rows, question, nothing_known))
            for _ in counted.prompts():
                pass
        per_prompt = counted.prompt_tokens / max(counted.num_asked, 1)
        return per_prompt + expected_tokens(question, self.engine)

    def _plan(
        self, rows: JobRows, question: Question, checkpoint: Checkpoint | None = None
    ) -> JobPlan:
        options = self.options
        return plan_job(
            rows.buckets(options.bucket_rows, options.order),
            question,
            self.engine,
            options,
            checkpoint or self._checkpoint,
            are_distinct=True,
        )

    def close(self) -> None:
        """Close the checkpoint; the engine is its owner's."""
        self._checkpoint.close()

    def _told(self, question: Question) -> Question:
        """With what is told in all questions."""
        return replace(question, request=question.request.over(self.options.request))

    def _seconds(
        self,
        question: Question,
        num_prompts: int,
        prompt_tokens: int,
        cached: int | None,
        output_tokens: int,
    ) -> float | None:
        if num_prompts == 0:
            return 0.0
        shape = PromptShape(
            num_cached_tokens=(cached or 0) // num_prompts,
            num_new_tokens=(prompt_tokens - (cached or 0)) // num_prompts,
            num_output_tokens=output_tokens // num_prompts,
        )
        speed = self.engine.prompts_per_s(shape, question)
        return None if speed is None else num_prompts / speed


class _Counted:
    """The prompts of a plan, counted while they are gone through."""

    def __init__(self, plan: JobPlan) -> None:
        self._plan = plan
        self.num_asked = 0
        self.num_known = 0
        self.num_refused = 0
        self.num_modular = 0
        self.prompt_tokens = 0
        self.longest_prompt_tokens = 0
        self.cached_module_tokens = 0

    def prompts(self) -> Iterator[TokenSequences]:
        """Those without modules, in parts, so that not all tokens are in memory at once."""
        yield TokenSequences.from_lists([])
        steps = self._plan.steps()
        while chunk := list(islice(self._asked(steps), _PROMPTS_PER_PART)):
            yield TokenSequences.from_lists(chunk)

    def _asked(self, steps: Iterator[Step]) -> Iterator[list[int]]:
        for step in steps:
            if isinstance(step, AskedRows):
                planned = step.planned
                self.num_asked += 1
                self.prompt_tokens += len(planned.token_ids)
                self.longest_prompt_tokens = max(self.longest_prompt_tokens, len(planned.token_ids))
                modules = planned.prompt.modules
                if modules is None:
                    yield planned.token_ids
                    continue
                self.num_modular += 1
                self.cached_module_tokens += (
                    sum(modules.module_tokens.values()) - planned.num_encoded_tokens
                )
            elif isinstance(step, KnownRows):
                self.num_known += 1
            elif isinstance(step, RefusedRows):
                self.num_refused += 1
