# SPDX-License-Identifier: Apache-2.0
"""The jobs of one operator: one budget of tokens, one checkpoint, one report of each engine."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.engines.lazy import engine_of
from vllm_relay.tables.jobs.answers import Answer
from vllm_relay.tables.jobs.asking import ask
from vllm_relay.tables.jobs.estimates.estimate import JobReport
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.token_budget import TokenBudgetError
from vllm_relay.tables.question import Question


class Session:
    """
    Args:
        options: of the jobs; `max_total_tokens` is one limit of all of them.

    Attributes:
        reports: of each engine, by its name.
        spent: what ended asking, where the budget is spent; rows have an error that says so from
            then on.
    """

    def __init__(self, options: JobOptions | None) -> None:
        self.options = options or JobOptions()
        self.reports: dict[str, JobReport] = {}
        self.spent: TokenBudgetError | None = None
        self._cleanup = ExitStack()
        self._checkpoint = self.options.checkpoint
        if self._checkpoint is None:
            # later jobs know the answers of earlier ones
            folder = self._cleanup.enter_context(TemporaryDirectory(prefix="vllm-relay-"))
            self._checkpoint = Path(folder) / "answers.db"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def open(self, engine: Any) -> Engine:
        """See `open_engine`; what is opened here is closed with the session."""
        return engine_of(engine, self._cleanup)

    def report(self, name: str = "") -> JobReport:
        return self.reports.setdefault(name, JobReport())

    def ask(
        self, rows: pa.Table, question: Question, engine: Engine, name: str = ""
    ) -> list[Answer]:
        """The answer to each row.

        Args:
            rows: whose columns are the question's fields, in their order: JSON of their values, as
                texts.
            name: of the engine's report.

        Raises:
            CheckpointError, EngineError: see `asking.ask`.
        """
        if not rows.num_rows:
            return []
        if self.spent is not None:
            return [Answer(error=f"not asked: {self.spent.limit}")] * rows.num_rows
        try:
            return _answers(ask(rows, question, engine, self._options_left(), self.report(name)))
        except TokenBudgetError as error:
            limit = f"the budget of {self.options.max_total_tokens:,} tokens is spent"
            reason = f"{limit} ({self._num_tokens:,} used)"
            self.spent = TokenBudgetError(reason, "", limit)
            assert error.answers is not None
            answers = _answers(error.answers)
            return [
                replace(each, error=f"not asked: {limit}") if _is_unasked(each, error) else each
                for each in answers
            ]

    @property
    def _num_tokens(self) -> int:
        return sum(each.prompt_tokens + each.output_tokens for each in self.reports.values())

    def _options_left(self) -> JobOptions:
        most = self.options.max_total_tokens
        left = None if most is None else max(most - self._num_tokens, 1)
        return replace(self.options, checkpoint=self._checkpoint, max_total_tokens=left)


def _is_unasked(answer: Answer, error: TokenBudgetError) -> bool:
    return answer.error == f"not asked: {error.limit}"


def _answers(table: pa.Table) -> list[Answer]:
    columns = [table[name].to_pylist() for name in ("answer", "error", "is_cut")]
    return [Answer(*each) for each in zip(*columns, strict=True)]
