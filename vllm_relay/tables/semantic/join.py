# SPDX-License-Identifier: Apache-2.0
"""Pairs of rows of two data frames of which a statement is true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vllm_relay.arguments import check_count
from vllm_relay.tables.caller_tables import (
    CallerTable,
    arrow_columns,
    beside,
    caller_table,
    names_beside,
)
from vllm_relay.tables.dataframes import json_texts
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.prompts.format import text_of
from vllm_relay.tables.jobs.report import JobReport
from vllm_relay.tables.question import Question, RequestOptions, placeholders_of
from vllm_relay.tables.semantic.calibration import Targets, calibrate
from vllm_relay.tables.semantic.embeddings import embedder, unit_vectors
from vllm_relay.tables.semantic.scores import TRUTH
from vllm_relay.tables.semantic.session import AskedRows, Session

_LEFT, _RIGHT = ":left", ":right"
_PAIRS_PER_JOB = 200_000
"""That are in memory at once."""
_LABELLED_SHARE = 0.25
"""Of the pairs, where nobody says how many are labelled at most."""


@dataclass(frozen=True)
class JoinResult:
    """
    Attributes:
        table: the rows of both tables side by side, a row for each pair of which the statement is
            true, ordered by their places, in the kind of the left table. Names that both have end
            with ":left" and ":right".
        pairs: places of these rows in the left and the right table, from 0.
        errors: why there is no answer, by pair.
        report: what the jobs took.
        num_asked: pairs that the model was asked about.
        similarity: pairs that are less similar were left out; None where none were.
        recall: that holds at least, with the confidence that was asked for.
    """

    table: Any
    pairs: list[tuple[int, int]]
    errors: dict[tuple[int, int], str]
    report: JobReport
    num_asked: int
    similarity: float | None
    recall: float


def llm_join(
    left: Any,
    right: Any,
    prompt: str,
    *,
    engine: Any,
    embeddings: Any = None,
    recall: float = 0.9,
    confidence: float = 0.95,
    labels: int | None = None,
    sample_seed: int = 0,
    request: RequestOptions | None = None,
    options: JobOptions | None = None,
) -> JoinResult:
    """The pairs of rows of which a statement is true.

    The model is asked about every pair, in an order in which pairs of a row follow each other. With
    `embeddings` it is asked about a sample of the pairs, from which a threshold of similarity
    follows, see `calibration`, and about the pairs that are more similar. The similarity of every
    pair is held in memory.

    Args:
        left, right: pandas or Polars DataFrames or Arrow tables, of the same kind.
        prompt: a question that is answered with true or false. ``{name}`` refers to the column of
            that name in either table, ``{name:left}`` and ``{name:right}`` to that of one.
        engine: see `open_engine`. What is opened here is closed here.
        embeddings: a function from a list of texts to an array of their vectors, [texts,
            dimensions], or the address of a server with /v1/embeddings, or `ServerEmbeddings`; None
            has none. A text is what the fields of a row hold.
        recall: of the pairs of which the model says true, the share that is found.
        confidence: the probability, over samples, that it holds.
        labels: pairs that are drawn for the sample, at most; None draws a quarter of the pairs at
            most. Where they are too few all pairs are asked about.
        sample_seed: of the draws.
        request: what else the model is told.
        options: of the jobs.

    Raises:
        TypeError, ValueError, CheckpointError, EngineError: as `llm_map` does.
        MapBudgetError: there are not enough tokens for all prompts; its `result` has what came.
    """
    targets = Targets(recall, 1.0, confidence)
    if labels is not None:
        check_count("labels", labels)
    if type(left) is not type(right):
        raise TypeError(
            f"tables of type {type(left).__qualname__} and {type(right).__qualname__} given, "
            f"expected two of one kind"
        )
    tables = caller_table(left), caller_table(right)
    sides = _sides(prompt, *tables)
    names_beside(*tables)
    names = tuple(placeholders_of(prompt))
    question = Question(prompt, names, TRUTH, request=request or RequestOptions())
    texts = [_texts(table, side) for table, side in zip(tables, sides, strict=True)]
    embed = None if embeddings is None else embedder(embeddings)
    with Session(options) as session:
        all_pairs = _Pairs(names, texts)
        opened = session.open(engine)
        asked = AskedRows(session, opened, question, all_pairs.texts_of, _PAIRS_PER_JOB)
        similarity = None
        if embed is not None and all_pairs.num_pairs:
            vectors = [unit_vectors(embed, _shown(each, all_pairs.known[i])) for i, each in
                       enumerate(texts)]  # fmt: skip
            scores = (vectors[0] @ vectors[1].T).ravel().astype(np.float64)
            chosen = calibrate(
                scores,
                _importance(scores),
                asked.labels,
                targets,
                most_draws=labels or max(int(len(scores) * _LABELLED_SHARE), 1),
                seed=sample_seed,
                accepts=False,
            )
            # answers that are missing for want of tokens are missing by no chance
            if np.isfinite(chosen.low) and session.spent is None:
                similarity = chosen.low
        if similarity is None:
            asked.about(np.arange(all_pairs.num_pairs))
        else:
            asked.about(np.flatnonzero(scores >= similarity))
    answers = {all_pairs.places(pair): asked.answers[pair] for pair in sorted(asked.answers)}
    pairs = [pair for pair, answer in answers.items() if answer.value]
    result = JoinResult(
        beside(tables[0].rows([i for i, _ in pairs]), tables[1].rows([j for _, j in pairs])),
        pairs,
        {pair: answer.error for pair, answer in answers.items() if answer.error is not None},
        session.report(),
        len(answers),
        similarity,
        1.0 if similarity is None else recall,
    )
    session.check_budget(result)
    return result


def _sides(prompt: str, left: CallerTable, right: CallerTable) -> tuple[dict[str, str], ...]:
    """The columns of each table by the names that the prompt has for them.

    Raises:
        ValueError: a name is none of one table, or a table has none.
    """
    found: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for name in placeholders_of(prompt):
        places = [side for side, table in enumerate((left, right)) if name in list(table.names)]
        column = name
        for side, ending in enumerate((_LEFT, _RIGHT)):
            if not places and name.endswith(ending):
                column = name.removesuffix(ending)
                places = [side] if column in list((left, right)[side].names) else []
                break
        if len(places) != 1:
            what = "a column of both tables" if places else "a column of neither table"
            raise ValueError(
                f"prompt {prompt!r} names {name!r}, which is {what}: expected a name of "
                f"{left.names} or {right.names}, or {{{column}{_LEFT}}} or {{{column}{_RIGHT}}}"
            )
        found[places[0]][name] = column
    for side, word in enumerate(("left", "right")):
        if not found[side]:
            raise ValueError(
                f"prompt {prompt!r} names no column of the {word} table, expected one at least, as "
                f"in {{name:{word}}}"
            )
    return found


def _texts(table: CallerTable, side: dict[str, str]) -> pa.Table:
    """JSON of the fields of one table's rows, by their names in the prompt."""
    columns = list(side.values())
    distinct = list(dict.fromkeys(columns))
    shown = json_texts(distinct, arrow_columns(table, distinct))
    return pa.table([shown[column] for column in columns], names=list(side))


def _shown(texts: pa.Table, rows: npt.NDArray[np.int64]) -> list[str]:
    """What the fields of rows hold, as text."""
    columns = [column.take(pa.array(rows)).to_pylist() for column in texts.columns]
    return [
        "\n".join(text_of(value) for value in values if value is not None)
        for values in zip(*columns, strict=True)
    ]


def _importance(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of pairs, by how many are more similar: true ones are few, and most of them on top."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(-scores, kind="stable")] = np.arange(1, len(scores) + 1)
    return 1 / np.sqrt(ranks)


class _Pairs:
    """Pairs of rows; those of which nothing is known are in none.

    Attributes:
        known: the other rows of each table.
        num_pairs: of these; a pair has the number of its left row times the number of right rows,
            and that of its right row.
    """

    def __init__(self, names: Sequence[str], texts: Sequence[pa.Table]) -> None:
        self._names = names
        self.known = [_known_rows(each) for each in texts]
        self._texts = [
            each.take(pa.array(rows)) for each, rows in zip(texts, self.known, strict=True)
        ]
        self.num_pairs = len(self.known[0]) * len(self.known[1])

    def texts_of(self, pairs: npt.NDArray[np.int64]) -> pa.Table:
        """JSON of the fields of pairs, by their numbers."""
        places = np.divmod(pairs, len(self.known[1]))
        sides = [
            texts.take(pa.array(rows)) for texts, rows in zip(self._texts, places, strict=True)
        ]
        columns = {name: side[name] for side in sides for name in side.column_names}
        return pa.table({name: columns[name] for name in self._names})

    def places(self, pair: int) -> tuple[int, int]:
        """Of its rows in their tables."""
        i, j = divmod(pair, len(self.known[1]))
        return int(self.known[0][i]), int(self.known[1][j])


def _known_rows(texts: pa.Table) -> npt.NDArray[np.int64]:
    valid = [column.is_valid().to_numpy() for column in texts.columns]
    return np.flatnonzero(np.any(valid, axis=0))
