# SPDX-License-Identifier: Apache-2.0
"""Jobs of llm_agg() beside those of llm()."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import duckdb
import pyarrow as pa

from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.identifiers import ANSWER, ERROR
from vllm_relay.tables.jobs.answers import Answer, answer_table
from vllm_relay.tables.jobs.estimates.estimate import Estimate
from vllm_relay.tables.jobs.job_runner import JobRunner
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.question import Question
from vllm_relay.tables.semantic.packs import Packer
from vllm_relay.tables.semantic.record_lists import RECORDS, known_records, record_list
from vllm_relay.tables.semantic.tree import answer_groups, first_packs
from vllm_relay.tables.sql.expressions import RESERVED


class GroupRunner(JobRunner):
    """A `JobRunner` that is also asked about lists of records of any length.

    Args:
        connection: on which sources are read and answers become temporary tables.
        engine: that answers.
        options: of all jobs.
    """

    _numbers = count()

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, engine: Engine, options: JobOptions
    ) -> None:
        super().__init__(connection, engine, options)
        self._duckdb = connection
        self._engine = engine
        self._options = options

    def answer_groups(self, source: str, question: Question, target: str) -> None:
        """As `answer`, of rows that are lists of records, see `semantic.tree`.

        Args:
            source: a query whose column is the JSON of a list, or NULL.

        Raises:
            CheckpointError, EngineError, TokenBudgetError, KeyboardInterrupt: see `answer`.
        """
        lists = self._lists(source)
        groups = list(map(known_records, lists))
        answers = answer_groups(groups, question, self._packer, self._ask_level)
        made = answer_table(answers, question.output)
        made = made.append_column(RECORDS, pa.array(lists, pa.string()))
        with self._registered(made) as name:
            self._duckdb.execute(
                f"CREATE TEMP TABLE {target} AS SELECT {RECORDS}::JSON AS {RECORDS}, "
                f"answer::{question.output.sql_type} AS {ANSWER}, error AS {ERROR} FROM {name}"
            )

    def estimate_groups(self, source: str, question: Question) -> Estimate:
        """What the first level of `answer_groups` would take: one prompt for each different part
        of a group. `warning` says how many groups have several."""
        groups = list(map(known_records, self._lists(source)))
        lists: list[str] = []
        num_refused = num_parted = 0
        for records, packs in zip(groups, first_packs(groups, self._packer(question)), strict=True):
            if isinstance(packs, Answer):
                num_refused += packs.error is not None
                continue
            num_parted += len(packs) > 1
            lists += [record_list(records[pack.begin : pack.end]) for pack in packs]
        with self._registered(_numbered(lists)) as name:
            estimate = self.estimate(_records_of(name), question)
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

    def _packer(self, question: Question, least_records: int = 1) -> Packer:
        return Packer(question, self._engine, self._options, None, least_records)

    def _ask_level(self, question: Question, lists: list[str]) -> list[Answer]:
        answered = f"{RESERVED}level_{next(self._numbers)}"
        with self._registered(_numbered(lists)) as name:
            self.answer(_records_of(name), question, answered)
            rows = self._duckdb.execute(
                f"SELECT {ANSWER}, {ERROR} FROM {name} g JOIN {answered} a "
                f"ON {_shown('g')} = {_shown('a')} ORDER BY number"
            ).fetchall()
            self._duckdb.execute(f"DROP TABLE {answered}")
        return [Answer(value, error) for value, error in rows]

    def _lists(self, source: str) -> list[str | None]:
        """Different ones, in the order in which they first come."""
        rows = self._duckdb.execute(f"SELECT {RECORDS}::VARCHAR FROM ({source})").fetchall()
        return list(dict.fromkeys(records for (records,) in rows))

    @contextmanager
    def _registered(self, table: pa.Table) -> Iterator[str]:
        name = f"{RESERVED}given_{next(self._numbers)}"
        self._duckdb.register(name, table)
        try:
            yield name
        finally:
            self._duckdb.unregister(name)


def _numbered(lists: list[str]) -> pa.Table:
    return pa.table({"number": pa.array(range(len(lists))), RECORDS: pa.array(lists, pa.string())})


def _shown(name: str) -> str:
    """Lists that jobs hold to be equal are shown alike."""
    return f"to_json({name}.{RECORDS}::JSON)::VARCHAR"


def _records_of(name: str) -> str:
    # JSON, so that prompts hold the list and not its text
    return f"SELECT {RECORDS}::JSON AS {RECORDS} FROM {name} ORDER BY number"
