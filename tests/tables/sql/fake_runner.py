# SPDX-License-Identifier: Apache-2.0
"""A job runner that answers by a function of the fields."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import duckdb

from vllm_relay.tables.jobs.answers import Answer
from vllm_relay.tables.jobs.report import Estimate, JobReport
from vllm_relay.tables.question import Question
from vllm_relay.tables.sql.jobs import Counts, typed_rows
from vllm_relay.tables.sql.text.call_sites import Site

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
    """

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        answer_of: Callable[[Question, Fields], Any] = hashed_answer,
    ) -> None:
        self._connection = connection
        self._answer_of = answer_of
        self._known: dict[tuple[Question, tuple[Any, ...]], Answer] = {}
        self.asked: list[tuple[Question, Fields]] = []
        self.estimated: list[tuple[Question, list[Fields]]] = []
        self.report = JobReport()

    def rows_asked(self, text: str) -> list[Fields]:
        """Of the questions with this text."""
        return [fields for question, fields in self.asked if question.text == text]

    def answers(self, text: str) -> list[tuple[Fields, Any]]:
        """Fields and answers of the questions with this text."""
        return [
            (fields, self._known[question, tuple(map(repr, fields.values()))].value)
            for question, fields in self.asked
            if question.text == text
        ]

    def answer(self, site: Site, counts: Counts) -> list[Answer]:
        rows = typed_rows(self._connection, site.question.fields, list(counts))
        self.report.num_rows += len(rows)
        return [self._answer(site.question, row) for row in rows]

    def _answer(self, question: Question, fields: Fields) -> Answer:
        key = (question, tuple(map(repr, fields.values())))
        if key not in self._known:
            self.asked.append((question, fields))
            try:
                self._known[key] = Answer(self._answer_of(question, fields))
            except RowError as error:
                self._known[key] = Answer(error=str(error))
        return self._known[key]

    def tokens_per_prompt(self, site: Site, counts: Counts) -> float:
        estimate = self.estimate(site, counts)
        num_asked = estimate.num_prompts - estimate.num_known
        return (estimate.prompt_tokens + estimate.output_tokens) / max(num_asked, 1)

    def estimate(self, site: Site, counts: Counts) -> Estimate:
        rows = typed_rows(self._connection, site.question.fields, list(counts))
        self.estimated.append((site.question, rows))
        prompts = {tuple(map(repr, row.values())) for row in rows}
        known = sum((site.question, prompt) in self._known for prompt in prompts)
        tokens = 10 * (len(prompts) - known)
        return Estimate(
            num_rows=sum(counts.values()),
            num_prompts=len(prompts),
            num_known=known,
            prompt_tokens=tokens,
            cached_tokens=tokens // 2,
            output_tokens=tokens // 5,
            order="auto",
            seconds=1.0,
            tokens_are_exact=True,
        )
