# SPDX-License-Identifier: Apache-2.0
"""One question on its way through an engine, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace

from rich.progress import MofNCompleteColumn, TextColumn

from vllm_relay.progress import TerminalProgress
from vllm_relay.tables.engines.base import Completion, Engine, EngineError, Prompt
from vllm_relay.tables.jobs.answers import Answer, error_answer, read_answer
from vllm_relay.tables.jobs.checkpoint import Checkpoint
from vllm_relay.tables.jobs.job_plan import (
    AskedRows,
    EqualRows,
    JobPlan,
    Kind,
    NullRows,
    SettledRows,
    Step,
)
from vllm_relay.tables.jobs.options import TokenBudget, TokenBudgetError
from vllm_relay.tables.jobs.report import JobReport
from vllm_relay.tables.jobs.rows import Rows
from vllm_relay.tables.outputs import well_formed

Steps = Generator[Step, None, None]


class JobRun:
    """One job.

    Args:
        rows: that are asked about, and have the answers after it.
        budget: of tokens, of this job and others.
        report: to which this job is added.
    """

    def __init__(
        self,
        plan: JobPlan,
        engine: Engine,
        rows: Rows,
        checkpoint: Checkpoint,
        budget: TokenBudget,
        report: JobReport,
    ) -> None:
        self._plan = plan
        self._question = plan.question
        self._engine = engine
        self._rows = rows
        self._checkpoint = checkpoint
        self._budget = budget
        self._report = report
        self._running: dict[int, AskedRows] = {}
        self._postponed: AskedRows | None = None
        self._max_answer_tokens = engine.max_answer_tokens(plan.question)
        self._num_answered = 0
        self._planning_s = 0.0

    def run(self, num_distinct: int, show_progress: bool | None) -> None:
        """Every row has an answer, NULL or an error afterwards.

        Raises:
            CheckpointError: an answer cannot be kept.
            EngineError: the engine is gone.
            TokenBudgetError: there are not enough tokens for all prompts.
        """
        with (
            JobProgress(num_distinct, show_progress) as progress,
            closing(self._plan.steps()) as steps,
        ):
            try:
                self._ask(steps, progress)
                while self._postponed is not None:
                    # answers were shorter than they might have been: there may be tokens left
                    if not self._budget.has(self._reserved(self._postponed)):
                        raise self._budget_error(num_distinct)
                    self._ask(steps, progress)
            finally:
                self._report.num_by_rules += self._plan.num_by_rules
                self._budget.release()

    def _budget_error(self, num_distinct: int) -> TokenBudgetError:
        limit = f"the budget of {self._budget.max_tokens:,} tokens is spent"
        reason = (
            f"{limit} ({self._budget.spent_tokens:,} used): {self._num_answered:,} of "
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
        return TokenBudgetError(reason, advice, limit)

    def _ask(self, steps: Steps, progress: JobProgress) -> None:
        """Until there is nothing more to ask, or a prompt is postponed."""
        with (
            closing(self._prompts(steps)) as prompts,
            closing(self._engine.generate(prompts, self._question)) as completions,
        ):
            while (completion := self._next(completions)) is not None:
                self._take(completion)
                progress.show(self._num_answered, self._report)
        if self._running:
            raise EngineError(
                f"the engine has left {len(self._running)} prompts without a completion"
            )

    def _next(self, completions: Iterator[Completion]) -> Completion | None:
        began_s, planned_s = time.perf_counter(), self._planning_s
        try:
            return next(completions, None)
        finally:
            planning_s = self._planning_s - planned_s
            self._report.waiting_seconds += time.perf_counter() - began_s - planning_s

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
        asked = self._next_asked(steps)
        if asked is None:
            return None
        if not self._budget.reserve(self._reserved(asked)):
            self._postponed = asked
            return None
        prompt = asked.planned.prompt
        self._running[prompt.number] = asked
        return prompt

    def _next_asked(self, steps: Steps) -> AskedRows | None:
        if self._postponed is not None:
            asked, self._postponed = self._postponed, None
            return asked
        for step in steps:
            if isinstance(step, AskedRows):
                self._report.num_prompts += 1
                return step
            self._settle(step)
        return None

    def _settle(self, step: SettledRows | NullRows | EqualRows) -> None:
        """What needs no engine."""
        report = self._report
        if isinstance(step, NullRows):
            report.num_null += len(step.numbers)
            self._add(step.numbers, 0, Answer())
        elif isinstance(step, EqualRows):
            kind = step.kind
            if kind.answer is None:
                # it is asked, or about to be
                kind.numbers += step.numbers
                kind.num_rows += step.num_rows
            else:
                report.saved_tokens += step.num_rows * kind.num_tokens
                self._add(step.numbers, step.num_rows, kind.answer)
        else:
            report.num_prompts += 1
            kind, known = step.kind, step.known
            if known is not None:
                report.num_known += 1
                kind.num_tokens = known.num_prompt_tokens + known.num_output_tokens
                report.saved_tokens += kind.num_rows * kind.num_tokens
            self._answer(kind, step.answer)

    def _take(self, completion: Completion) -> None:
        asked = self._running.pop(completion.number)
        if not completion.text.isascii():
            completion = replace(completion, text=well_formed(completion.text))
        num_tokens = completion.num_prompt_tokens + completion.num_output_tokens
        self._budget.spend(self._reserved(asked), num_tokens)
        report, kind = self._report, asked.kind
        report.prompt_tokens += completion.num_prompt_tokens
        report.cached_tokens += completion.num_cached_tokens
        report.output_tokens += completion.num_output_tokens
        if completion.error:
            answer = error_answer(completion.error)
            self._answer(kind, replace(answer, is_cut=completion.is_cut))
            return
        # modules are always cached when a prompt begins, also if they were computed for it
        report.cached_tokens -= asked.planned.num_encoded_tokens
        report.saved_tokens += (kind.num_rows - 1) * num_tokens
        kind.num_tokens = num_tokens
        self._checkpoint.keep(kind.key, completion)
        self._answer(
            kind,
            read_answer(
                self._question.output,
                completion.text,
                completion.num_output_tokens,
                completion.is_cut,
            ),
        )

    def _answer(self, kind: Kind, answer: Answer) -> None:
        kind.answer = answer
        self._add(kind.numbers, kind.num_rows, answer)

    def _add(self, numbers: list[int], num_rows: int, answer: Answer) -> None:
        self._num_answered += len(numbers)
        self._report.num_errors += num_rows * (answer.error is not None)
        self._report.num_cut += num_rows * answer.is_cut
        self._rows.add(numbers, answer)

    def _reserved(self, asked: AskedRows) -> int:
        return len(asked.planned.token_ids) + self._max_answer_tokens


class JobProgress(TerminalProgress):
    """Of rows, with the hit rate and the tokens saved."""

    def __init__(self, num_rows: int, show: bool | None) -> None:
        super().__init__(MofNCompleteColumn(), TextColumn("{task.fields[figures]}"), show=show)
        self._asking = self.add_task("asking, rows", total=num_rows, figures="")

    def show(self, num_answered: int, report: JobReport) -> None:
        """Rows that have an answer or an error, and what the job took so far."""
        if self.disable:
            return
        rate = report.cached_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
        figures = (
            f"hit rate {rate:.0%}, {report.saved_tokens + report.cached_tokens:,} tokens saved"
        )
        if report.num_errors:
            figures += f", {report.num_errors:,} errors"
        self.update(self._asking, completed=num_answered, figures=figures)
