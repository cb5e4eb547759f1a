# SPDX-License-Identifier: Apache-2.0
"""Questions asked of the rows of a DuckDB query."""

from __future__ import annotations

from contextlib import ExitStack, closing

import duckdb

from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.jobs.asking import Asker
from vllm_relay.tables.jobs.estimates.estimate import Estimate
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.rows.duckdb_rows import AnswerTable, JobRows
from vllm_relay.tables.question import Question


class JobRunner:
    """Asks about sources of one DuckDB connection; answers are asked once.

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
        self._connection = connection
        self._asker = Asker(engine, options)
        self.report = self._asker.report

    def answer(self, source: str, question: Question, target: str) -> None:
        """Ask about every distinct row.

        Args:
            source: a query whose columns are the question's fields, by name.
            target: the temporary table that is made: the distinct rows of the source in the order
                in which they first come, with the columns ``relay_answer``, of the output's SQL
                type, and ``relay_error``, VARCHAR. Both are NULL where all fields are; neither is
                where a text was cut.

        Raises:
            ValueError: the source has other columns than the question fields, the target is there
                already, or a field has the name of an answer's column.
            CheckpointError, EngineError, TokenBudgetError, KeyboardInterrupt: see `Asker.ask`.
        """
        with ExitStack() as cleanup:
            cleanup.enter_context(self.report.timed())
            rows = cleanup.enter_context(closing(self._rows(source, question)))
            answers = AnswerTable(self._connection, rows, question.output, target)
            cleanup.callback(answers.drop)
            self._asker.ask(rows, question, answers)
            answers.write()

    def estimate(self, source: str, question: Question) -> Estimate:
        """What `answer` would take; asks the engine for no answer."""
        with closing(self._rows(source, question)) as rows:
            return self._asker.estimate(rows, question)

    def tokens_per_prompt(self, source: str, question: Question) -> float:
        """Of an average prompt and its answer, about, whether it is known or not."""
        with closing(self._rows(source, question)) as rows:
            return self._asker.tokens_per_prompt(rows, question)

    def close(self) -> None:
        """Close the checkpoint; the engine is its owner's."""
        self._asker.close()

    def _rows(self, source: str, question: Question) -> JobRows:
        return JobRows(self._connection, source, question)
