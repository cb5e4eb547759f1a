# SPDX-License-Identifier: Apache-2.0
"""A job runner that answers by a function of the fields, and its answers in plain DuckDB."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import duckdb

from vllm_relay.tables.identifiers import ANSWER, ERROR, quoted
from vllm_relay.tables.jobs.estimates.estimate import Estimate, JobReport
from vllm_relay.tables.question import Question

Fields = dict[str, Any]


class RowError(Exception):
    """A row that has no answer."""


def hashed_answer(question: Question, fields: Fields) -> Any:
    """One that depends on everything it is given."""
    text = question.text + "|" + "|".join(f"{name}={fields[name]!r}" for name in fields)
    number = zlib.crc32(text.encode())
    if question.output.choices:
        return question.output.choices[number % len(question.output.choices)]
    return {
        "text": f"t{number % 5}",
        "int": number % 5,
        "float": number % 8 / 4,
        "bool": number % 2 == 0,
        "json": f'{{"n": {number % 5}}}',
    }[question.output.type]


class FakeRunner:
    """
    Attributes:
        asked: question and fields of each row that was asked, once each.
        sources: the rows of each source, in order.
    """

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        answer_of: Callable[[Question, Fields], Any] = hashed_answer,
    ) -> None:
        self._connection = connection
        self._answer_of = answer_of
        self._known: dict[tuple[Question, tuple[Any, ...]], tuple[Any, str | None]] = {}
        self.asked: list[tuple[Question, Fields]] = []
        self.sources: list[tuple[Question, list[tuple[Any, ...]]]] = []
        self.estimated: list[tuple[Question, list[tuple[Any, ...]]]] = []
        self.report = JobReport()

    def rows_asked(self, text: str) -> list[Fields]:
        """Of the questions with this text."""
        return [fields for question, fields in self.asked if question.text == text]

    def answers(self, text: str) -> list[tuple[Fields, Any]]:
        """Fields and answers of the questions with this text."""
        return [
            (fields, self._known[question, tuple(map(repr, fields.values()))][0])
            for question, fields in self.asked
            if question.text == text
        ]

    def answer(self, source: str, question: Question, target: str) -> None:
        described = self._connection.execute(f"DESCRIBE {source}").fetchall()
        assert [row[0] for row in described] == list(question.fields)
        shown = ", ".join(f"to_json({quoted(name)})" for name in question.fields)
        rows = self._connection.execute(
            f"SELECT DISTINCT ON ({shown}) * FROM ({source})"
        ).fetchall()
        self.sources.append((question, rows))
        answers = [self._answer(question, row) for row in rows]
        columns = ", ".join(f'"{row[0]}" {row[1]}' for row in described)
        self._connection.execute(
            f"CREATE TEMP TABLE {target} ({columns}, {ANSWER} {question.output.sql_type}, "
            f"{ERROR} VARCHAR)"
        )
        marks = ", ".join("?" * (len(described) + 2))
        lines = [[*row, *answer] for row, answer in zip(rows, answers, strict=True)]
        if lines:
            self._connection.executemany(f"INSERT INTO {target} VALUES ({marks})", lines)
        self.report.num_rows += len(rows)

    def answer_groups(self, source: str, question: Question, target: str) -> None:
        self.answer(source, question, target)

    def estimate_groups(self, source: str, question: Question) -> Estimate:
        return self.estimate(source, question)

    def _answer(self, question: Question, row: tuple[Any, ...]) -> tuple[Any, str | None]:
        key = (question, tuple(map(repr, row)))
        if key not in self._known:
            fields = dict(zip(question.fields, row, strict=True))
            self.asked.append((question, fields))
            try:
                self._known[key] = (self._answer_of(question, fields), None)
            except RowError as error:
                self._known[key] = (None, str(error))
        return self._known[key]

    def tokens_per_prompt(self, source: str, question: Question) -> float:
        estimate = self.estimate(source, question)
        num_asked = estimate.num_prompts - estimate.num_known
        return (estimate.prompt_tokens + estimate.output_tokens) / max(num_asked, 1)

    def estimate(self, source: str, question: Question) -> Estimate:
        rows = self._connection.execute(source).fetchall()
        self.estimated.append((question, rows))
        prompts = {tuple(map(repr, row)) for row in rows}
        known = sum((question, prompt) in self._known for prompt in prompts)
        tokens = 10 * (len(prompts) - known)
        return Estimate(
            len(rows), len(prompts), known, tokens, tokens // 2, tokens // 5, "auto", 1.0, True
        )
