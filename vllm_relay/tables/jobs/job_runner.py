# SPDX-License-Identifier: Apache-2.0
"""Questions asked of the rows of a DuckDB query."""

from __future__ import annotations

import time

import duckdb
import numpy as np

from vllm_relay.tables.engines.base import Engine, PromptShape
from vllm_relay.tables.jobs.answer_table import AnswerTable
from vllm_relay.tables.jobs.checkpoint import Checkpoint
from vllm_relay.tables.jobs.estimate import Estimate, JobReport
from vllm_relay.tables.jobs.job_plan import JobPlan, KnownRows, PlannedPrompt
from vllm_relay.tables.jobs.job_rows import JobRows
from vllm_relay.tables.jobs.job_run import JobRun
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.prompt_format import PromptFormat
from vllm_relay.tables.jobs.token_budget import TokenBudget
from vllm_relay.tables.ordering.cached_tokens import cached_tokens
from vllm_relay.tables.ordering.sequences import TokenSequences
from vllm_relay.tables.question import Question


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

    def answer(self, source: str, question: Question, target: str) -> None:
        """Ask about every distinct row.

        Args:
            source: a query whose columns are the question's fields, by name.
            target: the temporary table that is made: the distinct rows of the source in the order
                in which they first come, with the columns ``answer``, of the output's SQL type, and
                ``error``, VARCHAR; one of these is NULL.

        Raises:
            EngineError: the engine is gone.
            TokenBudgetError: there are not enough tokens for all prompts.
            KeyboardInterrupt: of whoever waits. In all three cases answers that came are in the
                checkpoint.
        """
        began_s = time.perf_counter()
        rows = JobRows(self._connection, source, question)
        answers = AnswerTable(self._connection, rows, question.output)
        run = JobRun(
            self.plan(rows, question),
            self.engine,
            answers,
            self._checkpoint,
            self._budget,
            self.report,
        )
        try:
            run.run(rows, question, self.options.show_progress)
            answers.write_to(target)
        finally:
            self._budget.release()
            self.report.num_errors += answers.num_errors
            answers.drop()
            rows.drop()
            seconds = time.perf_counter() - began_s
            self.report.seconds += seconds
            self.report.planning_seconds += seconds - run.waiting_s

    def estimate(self, source: str, question: Question) -> Estimate:
        """What `answer` would take; asks the engine for no answer."""
        rows = JobRows(self._connection, source, question)
        try:
            plan = self.plan(rows, question)
            num_known, parts = 0, [TokenSequences.from_lists([])]
            chunk: list[list[int]] = []
            for step in plan.steps():
                if isinstance(step, KnownRows):
                    num_known += 1
                elif isinstance(step, PlannedPrompt):
                    chunk.append(step.token_ids)
                    if len(chunk) == 4096:
                        parts.append(TokenSequences.from_lists(chunk))
                        chunk = []
            parts.append(TokenSequences.from_lists(chunk))
            num_prompts = sum(map(len, parts))
            prompt_tokens = sum(len(part.tokens) for part in parts)
            cache = self.engine.cache
            cached = None if cache is None else int(np.sum(cached_tokens(parts, cache)))
            output_tokens = num_prompts * self._answer_tokens(question)
            return Estimate(
                num_rows=rows.num_rows,
                num_prompts=num_prompts + num_known,
                num_known=num_known,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached,
                output_tokens=output_tokens,
                order=plan.order_name,
                seconds=self._seconds(question, num_prompts, prompt_tokens, cached, output_tokens),
                tokens_are_exact=self.engine.tokenizer is not None,
            )
        finally:
            rows.drop()

    def plan(self, rows: JobRows, question: Question) -> JobPlan:
        prompt_format = PromptFormat(question, self.engine.tokenizer, self.options.template)
        return JobPlan(rows, question, self.engine, prompt_format, self.options, self._checkpoint)

    def close(self) -> None:
        """Close the checkpoint and let go of the engine."""
        self._checkpoint.close()
        self.engine.close()

    def _answer_tokens(self, question: Question) -> int:
        """Of an answer with its end, about: as long as it may be where any text is allowed."""
        output, tokenizer = question.output, self.engine.tokenizer
        texts = output.choices or {"int": ("10",), "float": ("10.5",), "bool": ("true",)}.get(
            output.type, ()
        )
        if not texts:
            return question.max_tokens
        if tokenizer is None:
            lengths = [len(text) // 4 + 1 for text in texts]
        else:
            encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
            lengths = [len(token_ids) for token_ids in encoded]
        return min(round(sum(lengths) / len(lengths)) + 1, question.max_tokens)

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
