# SPDX-License-Identifier: Apache-2.0
"""One question on its way through an engine."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace

from vllm_relay.tables.engines.base import Completion, Engine, EngineError, Prompt
from vllm_relay.tables.jobs.answer_table import AnswerTable
from vllm_relay.tables.jobs.checkpoint import Checkpoint
from vllm_relay.tables.jobs.estimate import JobReport
from vllm_relay.tables.jobs.job_plan import JobPlan, Kind, KnownRows, PlannedPrompt, RefusedRows
from vllm_relay.tables.jobs.job_rows import JobRows
from vllm_relay.tables.jobs.progress import JobProgress
from vllm_relay.tables.jobs.token_budget import TokenBudget, TokenBudgetError
from vllm_relay.tables.outputs import well_formed
from vllm_relay.tables.question import Question

Steps = Generator[PlannedPrompt | KnownRows | RefusedRows, None, None]


class JobRun:
    """One job.

    Args:
        plan: of its prompts.
        engine: that answers them.
        answers: that are there after it.
        checkpoint: where answers go at once.
        budget: of tokens, of this job and others.
        report: to which this job is added.

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
        self._postponed: PlannedPrompt | None = None
        self._max_answer_tokens = 0
        self._planning_s = 0.0
        self.waiting_s = 0.0

    def run(self, rows: JobRows, question: Question, show_progress: bool | None) -> None:
        """Every row has an answer or an error afterwards.

        Raises:
            CheckpointError: an answer cannot be kept.
            EngineError: the engine is gone.
            TokenBudgetError: there are not enough tokens for all prompts.
        """
        self._max_answer_tokens = self._engine.max_answer_tokens(question)
        self._report.num_rows += rows.num_rows
        with (
            JobProgress(rows.num_distinct, show_progress) as progress,
            closing(self._plan.steps()) as steps,
        ):
            try:
                self._ask(steps, question, progress)
                while self._postponed is not None:
                    # answers were shorter than they might have been: there may be tokens left
                    if not self._budget.has(self._reserved(self._postponed)):
                        raise self._budget_error(rows.num_distinct)
                    self._ask(steps, question, progress)
            finally:
                self._report.num_by_rules += self._plan.num_by_rules

    def _budget_error(self, num_distinct: int) -> TokenBudgetError:
        reason = (
            f"the budget of {self._budget.max_tokens:,} tokens is spent "
            f"({self._budget.spent_tokens:,} used): {self._answers.num_answered:,} of "
            f"{num_distinct:,} different rows are done"
        )
        path = self._checkpoint.path
        if path is not None:
            advice = (
                f"the checkpoint {path} keeps their answers: raise max_total_tokens and run the "
                f"query again to go on"
            )
        else:
            advice = (
                "without a checkpoint their answers are kept only as long as this connection, "
                "whose budget stays spent: raise max_total_tokens, and give a checkpoint, a file, "
                "so that a query that is stopped can go on"
            )
        return TokenBudgetError(reason, advice)

    def _ask(self, steps: Steps, question: Question, progress: JobProgress) -> None:
        """Until there is nothing more to ask, or a prompt is postponed."""
        with (
            closing(self._prompts(steps)) as prompts,
            closing(self._engine.generate(prompts, question)) as completions,
        ):
            while (completion := self._next(completions)) is not None:
                self._take(completion)
                progress.show(self._answers.num_answered, self._report)
        if self._running:
            raise EngineError(
                f"the engine has left {len(self._running)} prompts without a completion"
            )

    def _next(self, completions: Iterator[Completion]) -> Completion | None:
        began_s, planned_s = time.perf_counter(), self._planning_s
        try:
            return next(completions, None)
        finally:
            self.waiting_s += time.perf_counter() - began_s - (self._planning_s - planned_s)

    def _prompts(self, steps: Steps) -> Generator[Prompt, None, None]:
        """What the engine takes; what needs no engine is answered on the way."""
        while True:
            began_s = time.perf_counter()
            try:
                prompt = self._next_prompt(steps)
            finally:
                self._planning_s += time.perf_counter() - began_s
            if prompt is None:
                return
            yield prompt

    def _next_prompt(self, steps: Steps) -> Prompt | None:
        planned = self._next_planned(steps)
        if planned is None:
            return None
        if not self._budget.reserve(self._reserved(planned)):
            self._postponed = planned
            return None
        self._running[planned.prompt.number] = planned
        return planned.prompt

    def _next_planned(self, steps: Steps) -> PlannedPrompt | None:
        if self._postponed is not None:
            planned, self._postponed = self._postponed, None
            return planned
        report = self._report
        for step in steps:
            kind = step.kind
            report.num_prompts += 1
            if isinstance(step, PlannedPrompt):
                return step
            if isinstance(step, KnownRows):
                answer = step.answer
                report.num_known += 1
                report.saved_tokens += kind.num_rows * (
                    answer.num_prompt_tokens + answer.num_output_tokens
                )
                self._add_text(kind, answer.text, answer.is_cut)
            else:
                self._add_error(kind, step.error)
        return None

    def _take(self, completion: Completion) -> None:
        planned = self._running.pop(completion.number)
        if not completion.text.isascii():
            completion = replace(completion, text=well_formed(completion.text))
        num_tokens = completion.num_prompt_tokens + completion.num_output_tokens
        self._budget.spend(self._reserved(planned), num_tokens)
        report, kind = self._report, planned.kind
        report.prompt_tokens += completion.num_prompt_tokens
        report.cached_tokens += completion.num_cached_tokens
        report.output_tokens += completion.num_output_tokens
        if completion.error:
            self._add_error(kind, completion.error)
            return
        # modules are always cached when a prompt begins, also if they were computed for it
        report.cached_tokens -= planned.num_encoded_tokens
        report.saved_tokens += (kind.num_rows - 1) * num_tokens
        self._checkpoint.keep(kind.key, completion)
        self._add_text(kind, completion.text, completion.is_cut)

    def _add_text(self, kind: Kind, text: str, is_cut: bool) -> None:
        if not self._answers.add_text(kind.numbers, text, is_cut):
            self._report.num_errors += kind.num_rows

    def _add_error(self, kind: Kind, error: str) -> None:
        self._answers.add_error(kind.numbers, well_formed(error))
        self._report.num_errors += kind.num_rows

    def _reserved(self, planned: PlannedPrompt) -> int:
        return len(planned.token_ids) + self._max_answer_tokens
