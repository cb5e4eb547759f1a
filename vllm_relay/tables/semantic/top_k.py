# SPDX-License-Identifier: Apache-2.0
"""The rows of a data frame that come first in an order that only a model knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from vllm_relay.arguments import check_count
from vllm_relay.tables.caller_tables import arrow_columns, caller_table
from vllm_relay.tables.dataframes import fields_of, json_texts, names_of
from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.report import JobReport
from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import Question, RequestOptions
from vllm_relay.tables.semantic.embeddings import embedder, unit_vectors
from vllm_relay.tables.semantic.record_lists import escaped, records_of_table
from vllm_relay.tables.semantic.session import Session

PIVOT, OTHER = "A", "B"
"""The fields of a comparison, and its answers."""


@dataclass(frozen=True)
class TopKResult:
    """
    Attributes:
        table: the rows, the first one first, in the kind of the table that was given.
        places: of these rows in that table, from 0.
        errors: why a row could not be compared, by its place; such rows are in no result.
        report: what the jobs took.
        num_rounds: jobs that followed each other.
    """

    table: Any
    places: list[int]
    errors: dict[int, str]
    report: JobReport
    num_rounds: int


def llm_top_k(
    table: Any,
    prompt: str,
    k: int,
    fields: Sequence[str] | None = None,
    *,
    engine: Any,
    embeddings: Any = None,
    candidates: int | None = None,
    pivot_seed: int = 0,
    request: RequestOptions | None = None,
    options: JobOptions | None = None,
) -> TopKResult:
    """The first `k` rows in the order of a question that compares two.

    Quicksort of what may be among the first `k`, after Patel et al., section on sem_topk: of each
    part of the rows one, the pivot, is compared with all others. The comparisons of a round are one
    job, and those with one pivot begin alike. About 2 n + 2 k log k are needed for n rows, in
    rounds of about the logarithm of n.

    Args:
        table: a pandas or Polars DataFrame or an Arrow table.
        prompt: which of two is meant, as in "Which review is more positive, going by {text}?"
        k: rows at most.
        fields: the columns that are compared. None means those that the prompt refers to, or all.
            Rows whose fields are all missing are in no result; of equal rows the first is first.
        engine: see `open_engine`. What is opened here is closed here.
        embeddings: see `llm_join`; with them only the `candidates` rows that are most similar to
            the prompt are compared, and others may be missed.
        candidates: see `embeddings`.
        pivot_seed: of the choice of pivots.
        request: what else the model is told.
        options: of the jobs.

    Raises:
        TypeError, ValueError, CheckpointError, EngineError: as `llm_map` does.
        MapBudgetError: there are not enough tokens for all prompts; the rows of its `result` are
            those that were not compared to the end, too.
    """
    check_count("k", k)
    if (embeddings is None) != (candidates is None):
        raise ValueError("embeddings and candidates go together: give both, or none")
    if candidates is not None:
        check_count("candidates", candidates)
        if candidates < k:
            raise ValueError(f"candidates={candidates} given, expected at least k={k}")
    rows = caller_table(table)
    names = fields_of(prompt, rows, names_of("fields", fields))
    text = (
        f"{escaped(prompt, names)}\nA and B are two records, names in braces are their fields. "
        f"Which of the two is it?"
    )
    question = Question(
        text,
        (PIVOT, OTHER),
        Output.of(choices=[PIVOT, OTHER]),
        request=request or RequestOptions(),
    )
    records = records_of_table(json_texts(names, arrow_columns(rows, names)))
    kept = [place for place, record in enumerate(records) if record is not None]
    if embeddings is not None and candidates is not None and len(kept) > candidates:
        kept = _most_similar(prompt, records, kept, embeddings, candidates)
    with Session(options) as session:
        search = _Search(session, session.open(engine), question, records, pivot_seed)
        places = search.first(kept, k)
    result = TopKResult(
        rows.rows(places), places, search.errors, session.report(), search.num_rounds
    )
    session.check_budget(result)
    return result


def _most_similar(
    prompt: str, records: Sequence[str | None], kept: list[int], embeddings: Any, candidates: int
) -> list[int]:
    texts = [records[place] or "" for place in kept]
    vectors = unit_vectors(embedder(embeddings), [prompt, *texts])
    similar = vectors[1:] @ vectors[0]
    return sorted(kept[each] for each in np.argsort(-similar, kind="stable")[:candidates])


class _Search:
    """Rounds of comparisons.

    Attributes:
        errors: of rows that are left out.
        num_rounds: so far.
    """

    def __init__(
        self,
        session: Session,
        engine: Engine,
        question: Question,
        records: Sequence[str | None],
        seed: int,
    ) -> None:
        self._session = session
        self._engine = engine
        self._question = question
        self._records = records
        self._random = np.random.default_rng(seed)
        self.errors: dict[int, str] = {}
        self.num_rounds = 0
        self._compared: set[int] = set()
        """Rows of which a comparison has an answer."""

    def first(self, rows: list[int], k: int) -> list[int]:
        """The first of some rows, in their order."""
        parts = [rows]
        while self._session.spent is None:
            begins = np.cumsum([0, *map(len, parts)])
            pivots = {
                number: part[int(self._random.integers(len(part)))]
                for number, part in enumerate(parts)
                if begins[number] < k and self._is_open(part)
            }
            if not pivots:
                break
            parts = self._round(parts, pivots)
        return [row for part in parts for row in part][:k]

    def _is_open(self, part: list[int]) -> bool:
        return any(self._records[row] != self._records[part[0]] for row in part)

    def _round(self, parts: list[list[int]], pivots: dict[int, int]) -> list[list[int]]:
        """The parts, those with a pivot divided by it."""
        self.num_rounds += 1
        pairs = [
            (pivot, row)
            for number, pivot in pivots.items()
            for row in parts[number]
            if self._records[row] != self._records[pivot]
        ]
        columns = [[self._records[row] for row in side] for side in zip(*pairs, strict=True)]
        table = pa.table(
            {
                name: pa.array(column, pa.string())
                for name, column in zip((PIVOT, OTHER), columns, strict=True)
            }
        )
        came = self._session.ask(table, self._question, self._engine)
        answers = dict(zip(pairs, came, strict=True))
        if self._session.spent is not None:
            return parts
        found: list[list[int]] = []
        for number, part in enumerate(parts):
            found += self._divided(part, pivots[number], answers) if number in pivots else [part]
        return [part for part in found if part]

    def _divided(self, part: list[int], pivot: int, answers: dict[Any, Any]) -> list[list[int]]:
        compared = [row for row in part if (pivot, row) in answers]
        same = [row for row in part if (pivot, row) not in answers]
        failed = [row for row in compared if answers[pivot, row].value is None]
        if len(failed) == len(compared) and self._is_about_pivot(pivot, compared):
            self._leave_out(same, answers[pivot, failed[0]].error)
            if len(compared) > 1 or compared[0] in self._compared:
                return [compared]
        self._compared.update({pivot, *compared} if len(failed) < len(compared) else ())
        self._compared.difference_update(failed)
        for row in failed:
            self._leave_out([row], answers[pivot, row].error)
        sides: dict[str, list[int]] = {PIVOT: [], OTHER: []}
        for row in compared:
            if row not in self.errors:
                sides[answers[pivot, row].value].append(row)
        # the answer is the one that comes first
        return [sides[OTHER], [row for row in same if row not in self.errors], sides[PIVOT]]

    def _is_about_pivot(self, pivot: int, compared: list[int]) -> bool:
        """Of a pivot for which no comparison has an answer."""
        return len(compared) > 1 or pivot not in self._compared

    def _leave_out(self, rows: list[int], error: str | None) -> None:
        for row in rows:
            self.errors[row] = error or "there is no answer"
