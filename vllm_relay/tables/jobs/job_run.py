# SPDX-License-Identifier: Apache-2.0
"""One question on its way through an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

from vllm_relay.tables.engines.base import Completion, Engine, Prompt
from vllm_relay.tables.jobs.answer_table import AnswerTable
from vllm_relay.tables.jobs.checkpoint import Checkpoint
from vllm_relay.tables.jobs.estimate import JobReport
from vllm_relay.tables.jobs.job_plan import JobPlan, KnownRows, PlannedPrompt, RefusedRows
from vllm_relay.tables.jobs.job_rows import JobRows
from vllm_relay.tables.jobs.progress import JobProgress
from vllm_relay.tables.jobs.token_budget import TokenBudget, TokenBudgetError
from vllm_relay.tables.question import Question


class JobRun:
    """One job.

    Attributes:
        waiting_s: for the engine, while nothing was planned.
    """

    def __init__(
        self,
        plan: JobPlan,
        engine: Engine,
        answers: AnswerTable,
        checkpoint: Checkpoint,
        budget: TokenBudget,
        report: JobReport,
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._answers = answers
        self._checkpoint = checkpoint
        self._budget = budget
        self._report = report
        self._running: dict[int, PlannedPrompt] = {}
        self._max_tokens = 0
        self._is_over_budget = False
        self._planning_s = 0.0
        self.waiting_s = 0.0

    def run(self, rows: JobRows, question: Question, show_progress: bool | None) -> None:
        """Every row has an answer or an error afterwards.

        Raises:
            EngineError: the engine is gone.
            TokenBudgetError: there are not enough tokens for all prompts.
        """
        report = self._report
        self._max_tokens = question.max_tokens
        report.num_rows += rows.num_rows
        report.num_prompts += rows.num_distinct
        completions = self._engine.generate(self._prompts(), question)
        with JobProgress(rows.num_distinct, show_progress) as progress:
            try:
                while (completion := self._next(completions)) is not None:
                    self._take(completion)
                    progress.show(self._answers.num_answered, report)
            finally:
                close = getattr(completions, "close", None)
                if close is not None:
                    close()
        if self._is_over_budget:
            raise TokenBudgetError(
                f"the budget of {self._budget.max_tokens:,} tokens is spent "
                f"({self._budget.spent_tokens:,} used); {self._answers.num_answered:,} of "
                f"{rows.num_distinct:,} prompts have an answer, which the checkpoint keeps: "
                f"raise max_total_tokens and run the query again to go on"
            )

    def _next(self, completions: Iterator[Completion]) -> Completion | None:
        began_s, planned_s = time.perf_counter(), self._planning_s
        completion = next(completions, None)
        self.waiting_s += time.perf_counter() - began_s - (self._planning_s - planned_s)
        return completion

    def _prompts(self) -> Iterator[Prompt]:
        """What the engine takes; what needs no engine is answered on the way."""
        with closing(self._plan.steps()) as steps:
            while True:
                began_s = time.perf_counter()
                prompt = self._next_prompt(steps)
                self._planning_s += time.perf_counter() - began_s
                if prompt is None:
                    return
                yield prompt

    def _next_prompt(
        self, steps: Iterator[PlannedPrompt | KnownRows | RefusedRows]
    ) -> Prompt | None:
        report = self._report
        for step in steps:
            kind = step.kind
            if isinstance(step, KnownRows):
                answer = step.answer
                report.num_known += 1
                report.saved_tokens += kind.num_rows * (
                    answer.num_prompt_tokens + answer.num_output_tokens
                )
                self._answers.add_text(kind.numbers, answer.text)
            elif isinstance(step, RefusedRows):
                self._answers.add_error(kind.numbers, step.error)
            elif self._budget.reserve(self._reserved(step)):
                self._running[step.prompt.number] = step
                return step.prompt
            else:
                self._is_over_budget = True
                return None
        return None

    def _take(self, completion: Completion) -> None:
        planned = self._running.pop(completion.number)
        num_tokens = completion.num_prompt_tokens + completion.num_output_tokens
        self._budget.spend(self._reserved(planned), num_tokens)
        report, kind = self._report, planned.kind
        report.prompt_tokens += completion.num_prompt_tokens
        report.cached_tokens += completion.num_cached_tokens
        report.output_tokens += completion.num_output_tokens
        report.saved_tokens += (kind.num_rows - 1) * num_tokens
        if completion.error:
            self._answers.add_error(kind.numbers, completion.error)
        else:
            self._checkpoint.keep(kind.key, completion)
            self._answers.add_text(kind.numbers, completion.text)

    def _reserved(self, planned: PlannedPrompt) -> int:
        return len(planned.token_ids) + self._max_tokens
