# SPDX-License-Identifier: Apache-2.0
"""Calls answered by jobs, and the errors of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import duckdb
import pyarrow as pa

from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.jobs.answers import Answer
from vllm_relay.tables.jobs.asking import Asker
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.report import Estimate, JobReport
from vllm_relay.tables.jobs.rows import Rows
from vllm_relay.tables.question import Question
from vllm_relay.tables.semantic.record_lists import RECORDS, known_records, record_list
from vllm_relay.tables.semantic.tree import Packer, answer_groups, first_packs
from vllm_relay.tables.sql.expressions import RESERVED, AnswerFailedError
from vllm_relay.tables.sql.text.call_sites import Site
from vllm_relay.tables.texts import json_text, quoted, row_text

MOST_ERRORS = 10_000

Key = tuple[str | None, ...]
"""Type and JSON of each field's value."""
Counts: TypeAlias = "dict[Key, int]"
"""How often each row is there."""


class JobRunner:
    """Answers the calls of a connection's statements, with one checkpoint and one budget.

    Args:
        engine: that answers; it is its owner's.

    Attributes:
        report: of all jobs.

    Raises:
        CheckpointError: the checkpoint cannot be used.
    """

    def __init__(self, engine: Engine, options: JobOptions) -> None:
        self._engine = engine
        self._options = options
        self._asker = Asker(options)
        self.report = JobReport()

    def answer(self, site: Site, counts: Counts) -> list[Answer]:
        """The answer to each row; each has one, or an error, or only NULLs.

        Raises:
            CheckpointError, EngineError, TokenBudgetError, KeyboardInterrupt: see `Asker.ask`.
        """
        if site.is_aggregate:
            question, groups = site.question, _groups(counts)
            return answer_groups(groups, question, self._engine, self._options, self._ask_lists)
        return self._ask(_rows(site, counts), site.question)

    def estimate(self, site: Site, counts: Counts) -> Estimate:
        """What `answer` would take; of lists of records the first level, one prompt for each
        different part of a group: `warning` says how many groups have several."""
        if not site.is_aggregate:
            return self._asker.estimate(_rows(site, counts), site.question, self._engine)
        groups = _groups(counts)
        lists: list[str] = []
        num_refused = num_parted = 0
        packer = Packer(site.question, self._engine, self._options)
        for records, packs in zip(groups, first_packs(groups, packer), strict=True):
            if isinstance(packs, Answer):
                num_refused += packs.error is not None
                continue
            num_parted += len(packs) > 1
            lists += [record_list(records[pack]) for pack in packs]
        estimate = self._asker.estimate(_list_rows(lists), site.question, self._engine)
        warnings = [estimate.warning] if estimate.warning else []
        if num_parted:
            warnings.append(
                f"{num_parted:,} groups are too long for one prompt: the answers to their parts "
                f"are combined by prompts that are not counted here"
            )
        return replace(
            estimate,
            num_rows=len(groups),
            num_refused=estimate.num_refused + num_refused,
            warning="; ".join(warnings),
        )

    def tokens_per_prompt(self, site: Site, counts: Counts) -> float:
        """Of an average prompt and its answer, about, whether it is known or not."""
        return self._asker.tokens_per_prompt(_rows(site, counts), site.question, self._engine)

    def close(self) -> None:
        """Close the checkpoint."""
        self._asker.close()

    def _ask(self, rows: Rows, question: Question) -> list[Answer]:
        self._asker.ask(rows, question, self._engine, self.report)
        return rows.answers()

    def _ask_lists(self, question: Question, lists: list[str]) -> list[Answer]:
        return self._ask(_list_rows(lists), question)


def _rows(site: Site, counts: Counts) -> Rows:
    names = [f"f{number}" for number in range(len(site.question.fields))]
    columns = [_field_texts(counts, 2 * number) for number in range(len(names))]
    return Rows(pa.table(columns, names), list(counts.values()))


def _field_texts(keys: Counts, place: int) -> pa.Array:
    """JSON of a field as prompts have it."""
    found = [key[place + 1] for key in keys]
    singles = [number for number, key in enumerate(keys) if key[place] == "FLOAT"]
    if singles:
        given = pa.table({"j": pa.array([found[number] for number in singles], pa.string())})
        with duckdb.connect() as connection:
            connection.register("given", given)
            shown = json_text("j::JSON::FLOAT", "FLOAT")
            rows = connection.execute(f"SELECT {shown} FROM given").fetchall()
        for number, (text,) in zip(singles, rows, strict=True):
            found[number] = text
    return pa.array(found, pa.string())


def _groups(counts: Counts) -> list[list[str]]:
    return [known_records(records) for _, records in counts]


def _list_rows(lists: list[str]) -> Rows:
    return Rows(pa.table({RECORDS: pa.array(lists, pa.string())}))


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


class StatementJobs:
    """The jobs of one statement, and what they say of rows without an answer.

    Args:
        raises: a row without an answer ends the query; one whose answer was cut does not.

    Attributes:
        num_answered: rows with an answer, different ones of each job.
        num_failed: rows with an error and no answer.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, runner: JobRunner, raises: bool
    ) -> None:
        self._connection = connection
        self._runner = runner
        self._raises = raises
        self._errors: dict[tuple[str, str], CallError] = {}
        self.num_answered = self.num_failed = 0

    def answer(self, site: Site, counts: Counts) -> list[Answer]:
        """See `JobRunner.answer`.

        Raises:
            AnswerFailedError: a row has no answer, and such a row is to end the query.
        """
        answers = self._runner.answer(site, counts)
        failed = [each for each in zip(counts, answers, strict=True) if each[1].error is not None]
        # those without an answer first
        failed.sort(key=lambda each: each[1].value is not None)
        num_failed = sum(answer.value is None for _, answer in failed)
        shown = failed[:MOST_ERRORS]
        rows = typed_rows(self._connection, site.question.fields, [key for key, _ in shown])
        found = [
            CallError(site.text, fields, answer.error or "")
            for fields, (_, answer) in zip(rows, shown, strict=True)
        ]
        if num_failed and self._raises:
            raise AnswerFailedError(
                f"{num_failed:,} rows have no answer to {site.text}; the first is "
                f"{row_text(found[0].fields)}: {found[0].error}"
            )
        self.num_answered += sum(each.value is not None for each in answers)
        self.num_failed += num_failed
        self._errors.update({(error.call, repr(error.fields)): error for error in found})
        return answers

    @property
    def errors(self) -> list[CallError]:
        """Of distinct rows, so far; the first `MOST_ERRORS` of each job."""
        return list(self._errors.values())


def typed_rows(
    connection: duckdb.DuckDBPyConnection, names: Sequence[str], keys: Sequence[Key]
) -> list[dict[str, Any]]:
    """The values that keys have the types and the JSON of, by the names of the fields."""
    by_types: dict[Key, list[int]] = {}
    for number, key in enumerate(keys):
        by_types.setdefault(key[::2], []).append(number)
    found: list[dict[str, Any]] = [{} for _ in keys]
    for types, numbers in by_types.items():
        columns = {
            f"j{index}": pa.array([keys[number][2 * index + 1] for number in numbers], pa.string())
            for index in range(len(types))
        }
        values = [
            f"{_value(f'j{index}', kind or '')} AS {quoted(name)}"
            for index, (name, kind) in enumerate(zip(names, types, strict=True))
        ]
        connection.register(f"{RESERVED}given", pa.table(columns))
        try:
            rows = connection.execute(f"SELECT {', '.join(values)} FROM {RESERVED}given").fetchall()
        finally:
            connection.unregister(f"{RESERVED}given")
        for number, row in zip(numbers, rows, strict=True):
            found[number] = dict(zip(names, row, strict=True))
    return found


def _value(column: str, kind: str) -> str:
    """A value of a type from its JSON."""
    if '"NULL"' in kind:
        kind = kind.replace('"NULL"', "INTEGER")
    if kind in ("VARCHAR", "BIT"):
        text = f"({column}::JSON ->> '$')"
        return text if kind == "VARCHAR" else f"{text}::{kind}"
    return f"CAST({column}::JSON AS {kind})"
