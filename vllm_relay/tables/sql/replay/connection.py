# SPDX-License-Identifier: Apache-2.0
"""A connection that asks and replays."""

from __future__ import annotations

import weakref
from typing import Any

from vllm_relay.tables.jobs.estimate import JobReport
from vllm_relay.tables.sql.connection import Connection, _difference
from vllm_relay.tables.sql.errors import SqlError
from vllm_relay.tables.sql.explain import Explanation
from vllm_relay.tables.sql.jobs import JobAsker
from vllm_relay.tables.sql.replay.anchors import add_anchors
from vllm_relay.tables.sql.replay.answers import Answers
from vllm_relay.tables.sql.replay.call_sites import Site
from vllm_relay.tables.sql.replay.edited import Edited
from vllm_relay.tables.sql.replay.error_columns import add_error_columns
from vllm_relay.tables.sql.replay.estimates import estimates
from vllm_relay.tables.sql.replay.functions import Functions
from vllm_relay.tables.sql.replay.lazy import look_up_late
from vllm_relay.tables.sql.replay.passes import Passes, one_view
from vllm_relay.tables.sql.replay.statement import Given, check, kind_of, query_of, split
from vllm_relay.tables.sql.replay.volatile import settle
from vllm_relay.tables.sql.result import Result


class ReplayConnection(Connection):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._functions = Functions(self.duckdb_connection)

    def sql(self, text: str) -> Result | None:
        result: Result | None = None
        for given in split(text):
            if not given.has_call:
                relation = self.duckdb_connection.sql(given.text)
                result = None if relation is None else Result(relation)
            elif given.is_explained:
                relation = self.duckdb_connection.sql(
                    "SELECT 'llm' AS explain_key, ? AS explain_value",
                    params=[str(self._estimated(given))],
                )
                result = Result(relation)
            else:
                result = self._replay(given)
        return result

    def explain(self, text: str) -> Explanation:
        given = split(text)
        if len(given) != 1 or not given[0].has_call:
            raise SqlError(f"{text!r} given, expected one statement that calls llm()")
        return self._estimated(given[0])

    def _edited(self, given: Given) -> Edited:
        self._functions.ensure()
        self._functions.answers = None
        edited = Edited(self.duckdb_connection, self._functions, given.text)
        look_up_late(edited)
        edited.add_conditions()
        return edited

    def _estimated(self, given: Given) -> Explanation:
        connection = self.duckdb_connection
        tables = self._new_tables()
        edited = self._edited(given)
        kind = kind_of(edited)
        answers = Answers(connection, tables, edited.sites, edited.site_order)
        self._functions.answers = answers
        if not check(connection, edited, kind):
            return Explanation([], given.text.strip(), [edited.text().strip()])
        try:
            return estimates(connection, tables, edited, answers, self._runner, kind)
        finally:
            self._left_over.append(tables)

    def _replay(self, given: Given) -> Result | None:
        connection = self.duckdb_connection
        tables = self._new_tables()
        before = JobReport(**vars(self._runner.report))
        asker = JobAsker(connection, self._runner, self._on_error == "raise")

        def ask(source: str, site: Site, target: str) -> None:
            asker.answer(source, site, target)  # type: ignore[arg-type]

        edited = self._edited(given)
        kind = kind_of(edited)
        answers = Answers(connection, tables, edited.sites, edited.site_order)
        self._functions.answers = answers
        passes = Passes(connection, tables, edited, answers, ask, asker.cost_per_prompt)
        if not check(connection, edited, kind) or kind == "bound":
            relation = connection.sql(edited.text())
            return None if relation is None else Result(relation)
        if self._on_error == "column" and edited.structure.word(0) != "INSERT":
            add_error_columns(edited)
        try:
            if kind == "change":
                add_anchors(connection, edited)
                passes.run(edited.text)
                text = edited.text()
            else:
                query = query_of(edited) if kind == "of query" else None
                with one_view(connection):
                    settle(connection, tables, edited)
                    add_anchors(connection, edited)
                    table = passes.table_of(
                        lambda: edited.text(None if query is None else query.range)
                    )
                text = f"FROM {table}"
                if query is not None:
                    begin, end = edited.structure.span(query.range)
                    text = f"{edited.structure.text[:begin]}{text} {edited.structure.text[end:]}"
            relation = connection.sql(text)
        except BaseException:
            # later, as a transaction of the caller may be broken now
            self._left_over.append(tables)
            raise
        report = _difference(self._runner.report, before)
        result = Result(relation, asker.errors, report)
        if kind == "query":
            weakref.finalize(result, self._left_over.append, tables)
        else:
            tables.drop_all()
        return result
