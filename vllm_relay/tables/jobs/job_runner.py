# SPDX-License-Identifier: Apache-2.0
"""Questions asked of the rows of a DuckDB query."""

from __future__ import annotations

import duckdb

from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.jobs.estimate import Estimate, JobReport
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.question import Question


class JobRunner:
    """Runs and estimates jobs on one DuckDB connection; answers are asked once.

    Args:
        connection: on which sources are read and answers become temporary tables.
        engine: that answers.
        options: of all jobs.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, engine: Engine, options: JobOptions
    ) -> None:
        self.engine = engine
        self.options = options
        self.report = JobReport()

    def answer(self, source: str, question: Question, target: str) -> None:
        """Ask about every distinct row.

        Args:
            source: a query whose columns are the question's fields, by name.
            target: the temporary table that is made: the distinct rows of the source, with the
                columns ``answer``, of the output's SQL type, and ``error``, VARCHAR; one of these
                is NULL.
        """
        raise NotImplementedError

    def estimate(self, source: str, question: Question) -> Estimate:
        """What `answer` would take; asks the engine for no answer."""
        raise NotImplementedError
