# SPDX-License-Identifier: Apache-2.0
"""Calls answered by jobs, and the errors of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import duckdb

from vllm_relay.tables.identifiers import ANSWER, ERROR, quoted
from vllm_relay.tables.question import Question
from vllm_relay.tables.sql.errors import AnswerFailedError
from vllm_relay.tables.sql.runner import Runner
from vllm_relay.tables.sql.text.call_sites import Site
from vllm_relay.tables.texts import row_text

MOST_ERRORS = 10_000


@dataclass(frozen=True)
class CallError:
    """
    Attributes:
        call: its text.
        fields: of the row that has no answer, by name.
        error: why.
    """

    call: str
    fields: dict[str, Any]
    error: str


class JobAsker:
    """
    Args:
        connection: of DuckDB.
        runner: of jobs on it.
        raises: a row without an answer ends the query; one whose answer was cut does not.

    Attributes:
        num_answered: rows with an answer, different ones of each job.
        num_failed: rows with an error and no answer.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, runner: Runner, raises: bool) -> None:
        self._connection = connection
        self._runner = runner
        self._raises = raises
        self._errors: dict[tuple[str, str], CallError] = {}
        self.num_answered = self.num_failed = 0

    def answer(self, source: str, site: Site, target: str) -> None:
        answer = self._runner.answer_groups if site.is_aggregate else self._runner.answer
        answer(source, site.question, target)
        names = site.question.fields
        columns = ", ".join(quoted(name) for name in (*names, ERROR))
        [(num_answered, num_failed)] = self._connection.execute(
            f"SELECT count({ANSWER}), count({ERROR}) FILTER ({ANSWER} IS NULL) FROM {target}"
        ).fetchall()
        rows = self._connection.execute(
            f"SELECT {columns} FROM {target} WHERE {ERROR} IS NOT NULL "
            f"ORDER BY {ANSWER} IS NULL DESC LIMIT {MOST_ERRORS}"
        ).fetchall()
        found = [
            CallError(site.text, dict(zip(names, values, strict=False)), values[-1])
            for values in rows
        ]
        if num_failed and self._raises:
            raise AnswerFailedError(
                f"{num_failed:,} rows have no answer to {site.text}; the first is "
                f"{row_text(found[0].fields)}: {found[0].error}"
            )
        self.num_answered += num_answered
        self.num_failed += num_failed
        self._errors.update({(error.call, repr(error.fields)): error for error in found})

    @property
    def errors(self) -> list[CallError]:
        """Of distinct rows, so far; the first `MOST_ERRORS` of each job."""
        return list(self._errors.values())

    def cost_per_prompt(self, source: str, question: Question) -> float:
        return self._runner.tokens_per_prompt(source, question)
