# SPDX-License-Identifier: Apache-2.0
"""A connection that asks and replays."""

from __future__ import annotations

import weakref
from typing import Any

from sqlglot import exp

from vllm_relay.tables.jobs.estimate import JobReport
from vllm_relay.tables.sql.checks import check_statement, without_asking
from vllm_relay.tables.sql.connection import Connection, _difference
from vllm_relay.tables.sql.errors import SqlError
from vllm_relay.tables.sql.jobs import JobAsker
from vllm_relay.tables.sql.replay.anchors import add_anchors
from vllm_relay.tables.sql.replay.answers import Answers
from vllm_relay.tables.sql.replay.call_sites import Site
from vllm_relay.tables.sql.replay.edited import Edited
from vllm_relay.tables.sql.replay.functions import Functions
from vllm_relay.tables.sql.replay.passes import Passes, one_view
from vllm_relay.tables.sql.replay.volatile import settle
from vllm_relay.tables.sql.result import Result
from vllm_relay.tables.sql.statements import Statement, split_statements


class ReplayConnection(Connection):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._functions = Functions(self.duckdb_connection)

    def sql(self, text: str) -> Result | None:
        result: Result | None = None
        for statement in split_statements(text):
            if statement.tree is None:
                relation = self.duckdb_connection.sql(statement.text)
                result = None if relation is None else Result(relation)
            elif statement.is_explained:
                relation = self.duckdb_connection.sql(
                    "SELECT 'llm' AS explain_key, ? AS explain_value",
                    params=[str(self._explained(statement))],
                )
                result = Result(relation)
            else:
                result = self._replay(statement)
        return result

    def _replay(self, statement: Statement) -> Result | None:
        connection = self.duckdb_connection
        self._functions.ensure()
        tables = self._new_tables()
        before = JobReport(**vars(self._runner.report))
        asker = JobAsker(connection, self._runner, self._on_error == "raise")

        def ask(source: str, site: Site, target: str) -> None:
            asker.answer(source, site, target)  # type: ignore[arg-type]

        edited = Edited(connection, self._functions, statement.text)
        settle(connection, tables, edited)
        add_anchors(connection, edited)
        answers = Answers(connection, tables, edited.sites)
        self._functions.answers = answers
        passes = Passes(connection, tables, edited, answers, ask, asker.cost_per_prompt)
        query = edited.structure.queries[-1] if edited.structure.queries else None
        is_query = query is not None and query.range == (0, len(edited.structure.tokens))
        try:
            if query is not None and (is_query or isinstance(statement.tree, (exp.Insert, exp.Create, exp.Copy))):
                with one_view(connection):
                    # what DuckDB refuses is not asked
                    connection.sql(edited.text(query.range)).columns
                    table = passes.table_of(lambda: edited.text(query.range))
                text = f"FROM {table}"
                if not is_query:
                    begin, end = edited.structure.span(query.range)
                    whole = edited.structure.text
                    text = whole[:begin] + text + whole[end:]
            else:
                passes.run(edited.text)
                text = edited.text()
            relation = connection.sql(text)
        except BaseException:
            self._left_over.append(tables)
            raise
        report = _difference(self._runner.report, before)
        result = Result(relation, asker.errors, report)
        if is_query:
            weakref.finalize(result, self._left_over.append, tables)
        else:
            tables.drop_all()
        return result
