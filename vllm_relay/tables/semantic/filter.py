# SPDX-License-Identifier: Apache-2.0
"""Rows of which a statement is true, decided by a cheap model where that is safe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vllm_relay.arguments import check_count
from vllm_relay.tables.caller_tables import arrow_columns, caller_table
from vllm_relay.tables.dataframes import fields_of, json_texts, map_result, names_of
from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.jobs.answers import Answer, answer_table
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.report import JobReport
from vllm_relay.tables.map_result import MapResult, answer_type
from vllm_relay.tables.question import Question, RequestOptions
from vllm_relay.tables.semantic.calibration import Targets, Thresholds, calibrate
from vllm_relay.tables.semantic.scores import TRUTH, ScoringEngine
from vllm_relay.tables.semantic.session import AskedRows, Session

_LABELLED_SHARE = 0.25
"""Of the rows, where nobody says how many are labelled at most."""


@dataclass(frozen=True, repr=False)
class FilterResult(MapResult):
    """A `MapResult` of truth values.

    Attributes:
        table: the rows of which the statement is true, in the kind of the table that was given.
        thresholds: of the cheap model's scores; rows between them were asked about.
        recall, precision: that hold at least, with the confidence that was asked for, if the large
            model's answers are the truth; 1.0 where it decides about all rows concerned.
        num_by_proxy: rows that the cheap model alone has decided about.
        proxy_report: what its job took; `report` has the large model's.
    """

    table: Any
    thresholds: Thresholds
    recall: float
    precision: float
    num_by_proxy: int
    proxy_report: JobReport


def llm_filter(
    table: Any,
    prompt: str,
    fields: Sequence[str] | None = None,
    *,
    engine: Any,
    proxy: Any = None,
    recall: float = 0.9,
    precision: float = 0.9,
    confidence: float = 0.95,
    labels: int | None = None,
    sample_seed: int = 0,
    request: RequestOptions | None = None,
    options: JobOptions | None = None,
) -> FilterResult:
    """The rows of which a statement is true.

    With a `proxy`, a cheap model, that one is asked about every row first. The large model is asked
    about a sample, from which two thresholds of the cheap model's scores follow, see `calibration`,
    and about the rows between these.

    Args:
        table: a pandas or Polars DataFrame or an Arrow table.
        prompt: a question that is answered with true or false; ``{name}`` refers to the column of
            that name.
        fields: the columns that a prompt holds. None means those that it refers to, or all.
        engine: the large model, see `open_engine`. What is opened here is closed here.
        proxy: the cheap model; None has none, and the large one is asked about every row. Its score
            is the probability of true, from the probabilities of tokens; where an engine has none,
            its answer.
        recall: of the rows of which the large model says true, the share that is found.
        precision: of the rows that are found, the share of which the large model says true.
        confidence: the probability, over samples, that both hold.
        labels: rows that are drawn for the sample, at most; None draws a quarter of the rows at
            most. Fewer may be enough, and where they are too few the large model decides about
            more rows, so that recall and precision hold nevertheless.
        sample_seed: of the draws.
        request: what else both models are told.
        options: of the jobs; `max_total_tokens` counts those of both models.

    Raises:
        TypeError, ValueError, CheckpointError, EngineError: as `llm_map` does.
        MapBudgetError: there are not enough tokens for all prompts. Its `result` has the answers
            that came; the other rows have an error.
    """
    targets = Targets(recall, precision, confidence)
    if labels is not None:
        check_count("labels", labels)
    rows = caller_table(table)
    names = fields_of(prompt, rows, names_of("fields", fields))
    question = Question(prompt, names, TRUTH, request=request or RequestOptions())
    texts = json_texts(names, arrow_columns(rows, names))
    with Session(options) as session:
        asked = AskedRows(session, session.open(engine), question, texts.take)
        chosen = Thresholds()
        scores = np.full(rows.num_rows, np.nan)
        if proxy is not None:
            scores = _scores(session, session.open(proxy), question, texts)
            most = int(rows.num_rows * _LABELLED_SHARE) if labels is None else labels
            chosen = _thresholds(scores, asked, targets, most, sample_seed)
            # answers that are missing for want of tokens are missing by no chance
            chosen = chosen if session.spent is None else Thresholds()
        # comparisons with NaN are false: without a score a row is asked about
        is_taken = scores >= chosen.high
        is_left_out = (scores < chosen.low) & ~is_taken
        asked.about(np.flatnonzero(~is_taken & ~is_left_out))
        by_proxy = {
            row: Answer(bool(is_taken[row]))
            for row in np.flatnonzero(is_taken | is_left_out).tolist()
            if row not in asked.answers
        }
    answers = [by_proxy.get(row) or asked.answers[row] for row in range(rows.num_rows)]
    made = answer_table(answers, TRUTH)
    found = map_result(rows.values, made, answer_type("bool", None), session.report())
    kept = [place for place, value in enumerate(found.arrow_values.to_pylist()) if value]
    result = FilterResult(
        **vars(found),
        table=rows.rows(kept),
        thresholds=chosen,
        recall=recall if is_left_out.any() else 1.0,
        precision=precision if is_taken.any() else 1.0,
        num_by_proxy=len(by_proxy),
        proxy_report=session.report("proxy"),
    )
    session.check_budget(result)
    return result


def _scores(
    session: Session, proxy: Engine, question: Question, texts: pa.Table
) -> npt.NDArray[np.float64]:
    """Of each row; NaN where there is none."""
    engine = ScoringEngine(proxy)
    answers = session.ask(texts, engine.question(question), engine, "proxy")
    return np.array([np.nan if each.value is None else float(each.value) for each in answers])


def _thresholds(
    scores: npt.NDArray[np.float64], asked: AskedRows, targets: Targets, most_labels: int, seed: int
) -> Thresholds:
    scored = np.flatnonzero(~np.isnan(scores))
    known = scores[scored]
    if not len(known) or not most_labels:
        return Thresholds()
    return calibrate(
        known,
        # SUPG, section 5
        np.sqrt(known),
        lambda places: asked.labels(scored[places]),
        targets,
        most_draws=most_labels,
        seed=seed,
    )
