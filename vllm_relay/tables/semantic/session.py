# SPDX-License-Identifier: Apache-2.0
"""The jobs of one operator: one budget of tokens, one checkpoint, one report of each engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.engines.lazy import engine_of
from vllm_relay.tables.jobs.answers import Answer
from vllm_relay.tables.jobs.asking import Asker
from vllm_relay.tables.jobs.options import JobOptions, TokenBudgetError
from vllm_relay.tables.jobs.report import JobReport
from vllm_relay.tables.jobs.rows import Rows
from vllm_relay.tables.map_result import MapBudgetError
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
        self._asker = self._cleanup.enter_context(closing(Asker(self.options)))

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
            rows: as for `asking.ask`.
            name: of the engine's report.

        Raises:
            CheckpointError, EngineError: see `asking.ask`.
        """
        if not rows.num_rows:
            return []
        found = Rows(rows)
        if self.spent is None:
            try:
                self._asker.ask(found, question, engine, self.report(name))
            except TokenBudgetError as error:
                used = sum(
                    each.prompt_tokens + each.output_tokens for each in self.reports.values()
                )
                self.spent = TokenBudgetError(f"{error.limit} ({used:,} used)", "", error.limit)
        return found.answers("" if self.spent is None else self.spent.of_unasked)

    def check_budget(self, result: Any) -> None:
        """
        Args:
            result: of the operator, with the answers that came.

        Raises:
            MapBudgetError: the budget is spent.
        """
        if self.spent is not None:
            raise MapBudgetError(self.spent, result, self.options.checkpoint)


class AskedRows:
    """Rows that an engine was asked about, each once.

    Args:
        texts_of: JSON of the fields of some rows, by their numbers.
        rows_per_job: that are in memory at once.

    Attributes:
        answers: by number.
    """

    def __init__(
        self,
        session: Session,
        engine: Engine,
        question: Question,
        texts_of: Callable[[npt.NDArray[np.int64]], pa.Table],
        rows_per_job: int = 1 << 62,
    ) -> None:
        self._session = session
        self._engine = engine
        self._question = question
        self._texts_of = texts_of
        self._rows_per_job = rows_per_job
        self.answers: dict[int, Answer] = {}

    def about(self, numbers: npt.NDArray[np.int64]) -> None:
        """Have their answers."""
        new = np.array([each for each in np.unique(numbers) if each not in self.answers], np.int64)
        for begin in range(0, len(new), self._rows_per_job):
            part = new[begin : begin + self._rows_per_job]
            came = self._session.ask(self._texts_of(part), self._question, self._engine)
            self.answers.update(zip(part.tolist(), came, strict=True))

    def labels(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """1 and 0, and NaN without an answer."""
        self.about(numbers)
        values = [self.answers[number].value for number in numbers.tolist()]
        return np.array([np.nan if value is None else float(value) for value in values])
