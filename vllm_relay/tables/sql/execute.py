# SPDX-License-Identifier: Apache-2.0
"""A planned SELECT, step by step: DuckDB filters, calls are answered for the rows that are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlglot import exp

from vllm_relay.tables.identifiers import ANSWER, ERROR, quoted
from vllm_relay.tables.sql.asker import Asker
from vllm_relay.tables.sql.binder import query_text
from vllm_relay.tables.sql.expressions import RESERVED, ROW, STAGE, sql_of, stage_names
from vllm_relay.tables.sql.guards import guard_condition
from vllm_relay.tables.sql.predicates import MIN_SAMPLED_ROWS, SAMPLE_ROWS, ranked
from vllm_relay.tables.sql.select_plan import PlannedCall, Predicate, SelectPlan
from vllm_relay.tables.sql.temporary_tables import TemporaryTables

# rows of the first chunk of a LIMIT, per row that is wanted
_CHUNK_ROWS_PER_WANTED = 2
_MIN_CHUNK_ROWS = 64


@dataclass
class Stage:
    """
    Attributes:
        table: of the rows that are left.
        known: the names of its columns of answers.
    """

    table: str
    known: frozenset[str] = frozenset()


class SelectExecution:
    """
    Args:
        plan: of the SELECT.
        tables: in which the steps are kept.
        asker: that answers.
    """

    def __init__(self, plan: SelectPlan, tables: TemporaryTables, asker: Asker) -> None:
        self._plan = plan
        self._tables = tables
        self._asker = asker

    def run(self, ctes: Sequence[exp.CTE]) -> exp.Select:
        """Answer the calls.

        Returns:
            The SELECT over a temporary table that gives the result.
        """
        stage = Stage(self._tables.create(query_text(self._plan.stage, ctes)))
        predicates = self._order(stage)
        if self._plan.cut is not None:
            self._asker.is_bound = True
            stage = self._rows_of_cut(stage, predicates, *self._plan.cut)
        else:
            stage = self._filtered(stage, predicates)
        for name in self._plan.late_calls:
            stage = self._answered(stage, self._plan.calls[name])
        final = self._plan.final.copy()
        alias = exp.TableAlias(this=exp.to_identifier(STAGE))
        final.set(
            "from_", exp.From(this=exp.Table(this=exp.to_identifier(stage.table), alias=alias))
        )
        return final

    def _replaced(self, stage: Stage, query: str, known: frozenset[str] | None = None) -> Stage:
        table = self._tables.create(query)
        self._tables.drop(stage.table)
        return Stage(table, stage.known if known is None else known)

    def _order(self, stage: Stage) -> list[Predicate]:
        predicates = self._plan.predicates
        if (
            len(predicates) < 2
            or not self._asker.filters
            or self._tables.count(stage.table) < MIN_SAMPLED_ROWS
        ):
            return predicates
        return ranked(predicates, lambda predicate: self._rank(stage, predicate))

    def _rank(self, stage: Stage, predicate: Predicate) -> float:
        """Rows left out per token, by a sample."""
        # with a limit, the first rows are asked about in any case
        order = ROW if self._plan.cut is not None else f"hash({ROW})"
        sample = Stage(
            self._tables.create(f"SELECT * FROM {stage.table} ORDER BY {order} LIMIT {SAMPLE_ROWS}")
        )
        tokens = 0.0
        for name in predicate.calls:
            call = self._plan.calls[name]
            prompts = self._prompts(sample, call)
            source = self._source(prompts, call)
            per_prompt = self._asker.cost_per_prompt(source, call.question)
            self._tables.drop(prompts)
            sample = self._answered(sample, call)
            tokens += per_prompt * self._distinct_prompts(stage, call)
        condition = sql_of(predicate.condition)
        passed = self._tables.value(
            f"SELECT count(*) FILTER (WHERE {condition}) FROM {sample.table} AS {STAGE}"
        )
        self._tables.drop(sample.table)
        return (1 - passed / SAMPLE_ROWS) / max(tokens, 1e-9)

    def _distinct_prompts(self, stage: Stage, call: PlannedCall) -> int:
        """Of the rows for which the call may be asked; all if that is not known yet."""
        if any(self._unknown_columns(stage, part) for part in call.fields):
            return self._tables.count(stage.table)
        prompts = self._prompts(stage, call)
        fields = ", ".join(_field(index) for index in range(len(call.fields)))
        count = self._tables.value(
            f"SELECT count(*) FROM (SELECT DISTINCT {fields} FROM {prompts})"
        )
        self._tables.drop(prompts)
        return int(count)

    def _unknown_columns(self, stage: Stage, node: exp.Expr) -> bool:
        return any(
            column.table == STAGE
            and column.name in self._plan.calls
            and column.name not in stage.known
            for column in node.find_all(exp.Column)
        )

    def _filtered(self, stage: Stage, predicates: list[Predicate]) -> Stage:
        for predicate in predicates:
            for name in predicate.calls:
                if name not in stage.known:
                    stage = self._answered(stage, self._plan.calls[name])
            self._asker.is_bound = True
            if self._asker.filters:
                stage = self._replaced(
                    stage,
                    f"SELECT * FROM {stage.table} AS {STAGE} WHERE {sql_of(predicate.condition)}",
                )
        return stage

    def _rows_of_cut(
        self, stage: Stage, predicates: list[Predicate], offset: int, limit: int
    ) -> Stage:
        """The rows that pass up to the limit; what comes after them is not asked about."""
        wanted = offset + limit
        chunk_rows = max(_MIN_CHUNK_ROWS, _CHUNK_ROWS_PER_WANTED * wanted)
        found: Stage | None = None
        num_found = num_seen = 0
        num_rows = self._tables.count(stage.table)
        if not self._asker.filters:
            # any row may be asked about
            chunk_rows = max(num_rows, 1)
        while found is None or (num_found < wanted and num_seen < num_rows):
            chunk = Stage(
                self._tables.create(
                    f"SELECT * FROM {stage.table} WHERE {ROW} > {num_seen} "
                    f"AND {ROW} <= {num_seen + chunk_rows}"
                )
            )
            chunk = self._filtered(chunk, predicates)
            num_seen += chunk_rows
            if found is None:
                found = chunk
            else:
                found = self._replaced(
                    found, f"FROM {found.table} UNION ALL BY NAME FROM {chunk.table}"
                )
                self._tables.drop(chunk.table)
            num_found = self._tables.count(found.table)
            missing = wanted - num_found
            # as many as the rows so far let expect, but not more at once than all so far
            chunk_rows = max(
                _MIN_CHUNK_ROWS,
                min(num_seen, missing * num_seen // max(num_found, 1)),
            )
        self._tables.drop(stage.table)
        return self._replaced(
            found,
            f"SELECT * FROM {found.table} ORDER BY {ROW} LIMIT {limit} OFFSET {offset}",
        )

    def _prompts(self, stage: Stage, call: PlannedCall) -> str:
        """A table with the fields of the rows for which a call matters."""
        is_real = self._asker.filters
        unknown = {name for name in self._plan.calls if not (is_real and name in stage.known)}
        guard = guard_condition(call.guards, unknown)
        if not is_real and any(
            stage_names(term) & unknown for terms in call.guards for term in terms
        ):
            self._asker.is_bound = True
        values = [f"{sql_of(part)} AS {_field(i)}" for i, part in enumerate(call.fields)]
        where = "" if guard is None else f" WHERE {sql_of(guard)}"
        return self._tables.create(
            f"SELECT {ROW}, {', '.join(values)} FROM {stage.table} AS {STAGE}{where}"
        )

    def _source(self, prompts: str, call: PlannedCall) -> str:
        names = call.question.fields
        columns = [f"{_field(i)} AS {quoted(name)}" for i, name in enumerate(names)]
        return f"SELECT {', '.join(columns)} FROM {prompts}"

    def _answered(self, stage: Stage, call: PlannedCall) -> Stage:
        """The stage with the answers of a call."""
        prompts = self._prompts(stage, call)
        if self._asker.filters and not self._tables.count(prompts):
            self._tables.drop(prompts)
            return self._replaced(
                stage,
                f"SELECT *, NULL::{call.question.output.sql_type} AS {call.name}, "
                f"NULL::VARCHAR AS {call.error} FROM {stage.table}",
                stage.known | {call.name},
            )
        target = self._tables.new_name()
        self._asker.answer(self._source(prompts, call), call, target)
        same = " AND ".join(
            f"to_json(__llm_p.{_field(i)}) IS NOT DISTINCT FROM to_json(__llm_t.{quoted(name)})"
            for i, name in enumerate(call.question.fields)
        )
        answered = self._replaced(
            stage,
            f"SELECT __llm_s.*, __llm_t.{ANSWER} AS {call.name}, __llm_t.{ERROR} AS {call.error} "
            f"FROM {stage.table} AS __llm_s "
            f"LEFT JOIN {prompts} AS __llm_p ON __llm_s.{ROW} = __llm_p.{ROW} "
            f"LEFT JOIN {target} AS __llm_t ON {same}",
            stage.known | {call.name},
        )
        missing = self._tables.value(
            f"SELECT count(*) FROM {answered.table} AS __llm_s JOIN {prompts} AS __llm_p "
            f"ON __llm_s.{ROW} = __llm_p.{ROW} "
            f"WHERE {call.name} IS NULL AND {call.error} IS NULL"
        )
        if missing:
            raise RuntimeError(f"{missing} rows have neither an answer nor an error to {call.text}")
        self._tables.drop(prompts)
        self._tables.drop(target)
        return answered


def _field(index: int) -> str:
    return f"{RESERVED}f{index}"
