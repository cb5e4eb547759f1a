# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from tests.tables.recording_engine import RecordingEngine, Refusal, Row
from vllm_relay.tables import JobOptions, MapBudgetError, llm_filter
from vllm_relay.tables.engines.base import Completions, Prompt
from vllm_relay.tables.engines.server.messages import Requests, read_completion
from vllm_relay.tables.question import Question
from vllm_relay.tables.semantic.scores import TRUTH, probability_of_true

ROWS = 4000
RNG = np.random.default_rng(0)
TRUE = RNG.random(ROWS) < 0.3
SCORES = (1 / (1 + np.exp(-4 * (RNG.normal(size=ROWS) * 0.5 + 2 * TRUE - 1)))).round(6)
TABLE = pa.table({"i": range(ROWS), "text": [f"t{i}" for i in range(ROWS)]})


@dataclass
class ScoredEngine(RecordingEngine):
    """Answers are probabilities of true, told as those of the first token."""

    identity: str = "scored"

    def generate_scored(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        assert question.output == TRUTH
        for completion in self.generate(prompts, question):
            if completion.error:
                yield completion
                continue
            score = float(completion.text)
            logs = {each: math.log(mass) for each, mass in ((" Tru", score), ("false", 1 - score))
                    if mass > 0}  # fmt: skip
            yield replace(completion, text="true", first_logprobs={**logs, "maybe": -0.1})


def truth(row: Row) -> str:
    return str(bool(TRUE[row["i"]])).lower()


def filtered(large: RecordingEngine, proxy: RecordingEngine | None, **options: Any) -> Any:
    return llm_filter(TABLE, "Is {i} fine?", engine=large, proxy=proxy, **options)


def test_the_cheap_model_decides_what_is_certain() -> None:
    large, proxy = RecordingEngine(truth), ScoredEngine(lambda row: str(SCORES[row["i"]]))
    result = filtered(large, proxy)
    found = np.array(result.objects)
    assert (found & TRUE).sum() / TRUE.sum() >= 0.9
    assert (found & TRUE).sum() / found.sum() >= 0.9
    assert len(proxy.messages) == ROWS == result.proxy_report.num_prompts
    assert len(large.messages) == len(set(large.messages)) == ROWS - result.num_by_proxy
    assert len(large.messages) == result.report.num_prompts < ROWS / 4
    assert (result.recall, result.precision) == (0.9, 0.9)
    assert result.table["i"].to_pylist() == np.flatnonzero(found).tolist()
    # the large model's answers count where there are some
    asked = {int(message.rpartition(" ")[2]) for message in large.messages}
    assert all(found[i] == TRUE[i] for i in asked)
    others = [i for i in range(ROWS) if i not in asked]
    assert all(found[i] == (SCORES[i] >= result.thresholds.high) for i in others)
    again = filtered(RecordingEngine(truth), proxy)
    assert again.objects == result.objects


def test_without_a_cheap_model_the_large_one_is_asked_about_every_row() -> None:
    large = RecordingEngine(truth)
    result = filtered(large, None)
    assert result.objects == TRUE.tolist()
    assert len(large.messages) == ROWS
    assert (result.recall, result.precision, result.num_by_proxy) == (1.0, 1.0, 0)


def test_scores_that_do_not_tell_cost_no_answer() -> None:
    large = RecordingEngine(truth)
    result = filtered(large, ScoredEngine(lambda row: str((row["i"] * 7919 % 1000) / 1000)))
    found = np.array(result.objects)
    assert (found & TRUE).sum() / TRUE.sum() >= 0.9
    assert result.precision == 1.0 and not (found & ~TRUE).any()


def test_answers_are_scores_where_there_are_no_probabilities() -> None:
    def nearly(row: Row) -> str:
        return str(bool(TRUE[row["i"]]) ^ (row["i"] % 40 == 0))

    large, proxy = RecordingEngine(truth), RecordingEngine(nearly, identity="small")
    result = filtered(large, proxy)
    assert "Answer with true or false." in proxy.messages[0]
    assert len(large.messages) < ROWS / 2
    found = np.array(result.objects)
    assert (found & TRUE).sum() / found.sum() >= 0.9


def test_few_labels_decide_nothing() -> None:
    large = RecordingEngine(truth)
    result = filtered(large, ScoredEngine(lambda row: str(SCORES[row["i"]])), labels=10)
    assert result.objects == TRUE.tolist()
    assert (result.recall, result.precision, result.num_by_proxy) == (1.0, 1.0, 0)


def test_errors_of_either_model() -> None:
    def unscored(row: Row) -> str:
        if row["i"] % 10 == 0:
            raise Refusal("no score")
        return str(SCORES[row["i"]])

    def refusing(row: Row) -> str:
        if row["i"] % 10 == 0 and row["i"] < 1000:
            raise Refusal("no answer")
        return truth(row)

    large = RecordingEngine(refusing)
    result = filtered(large, ScoredEngine(unscored))
    assert result.errors == dict.fromkeys(range(0, 1000, 10), "no answer")
    # rows without a score are asked about
    assert all(result[i] == TRUE[i] for i in range(1000, ROWS, 10))
    assert result.report.num_errors == 100
    assert len(large.messages) < ROWS / 2


@pytest.mark.parametrize("kind", ["arrow", "pandas", "polars"])
def test_rows_of_which_nothing_is_known_are_left_out(kind: str) -> None:
    table: Any = pa.table({"i": [0, None, 1, 2, 0], "j": [7, 8, None, 9, 6]})
    expected = [place for place, i in enumerate([0, None, 1, 2, 0]) if i is not None and TRUE[i]]
    if kind != "arrow":
        table = table.to_pandas() if kind == "pandas" else pl.from_arrow(table)
    large = RecordingEngine(lambda row: str(bool(TRUE[int(row["i"])])))
    result = llm_filter(table, "Is {i} fine?", engine=large, proxy=ScoredEngine(lambda row: "0.5"))
    assert result.objects[1] is None and not result.errors
    assert len(large.messages) == 3
    if kind == "pandas":
        pd.testing.assert_frame_equal(result.table, table.iloc[expected])
    else:
        rows = result.table.rows() if kind == "polars" else result.table.to_pydict()["j"]
        assert len(rows) == len(expected)


def test_a_budget_is_one_of_both_models_and_a_checkpoint_too(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    proxy = ScoredEngine(lambda row: str(SCORES[row["i"]]))
    # 11 tokens for each prompt
    options = JobOptions(checkpoint=path, max_total_tokens=11 * ROWS + 3000)
    with pytest.raises(MapBudgetError) as caught:
        filtered(RecordingEngine(truth), proxy, options=options)
    result = caught.value.result
    assert result.num_by_proxy == 0
    told = [i for i, value in enumerate(result.objects) if value is not None]
    assert told and all(result[i] == TRUE[i] for i in told)
    assert len(result.errors) == ROWS - len(told)
    large = RecordingEngine(truth)
    again = filtered(large, proxy, options=JobOptions(checkpoint=path))
    assert len(proxy.messages) == ROWS
    assert len(large.messages) == again.report.num_prompts - again.report.num_known
    assert again.report.num_known == len(told)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recall": 1.5}, "recall=1.5 given, expected a share"),
        ({"confidence": 1.0}, "confidence=1.0 given, expected a share"),
        ({"labels": 0}, "labels=0 given, expected at least 1"),
        ({"labels": 2.5}, "labels=2.5 given, expected at least 1, an integer"),
        ({"recall": "0.9"}, "recall='0.9' given, expected a share"),
        ({"fields": ["i", "k"]}, "field 'k' given, which is no column"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    large = RecordingEngine(truth)
    with pytest.raises(ValueError, match=message):
        filtered(large, large, **options)
    assert not large.messages


def test_probabilities_of_tokens() -> None:
    logs = {"true": math.log(0.3), "tr": math.log(0.1), " False": math.log(0.1), "": 0.0, "x": 0.0}
    assert probability_of_true(logs) == pytest.approx(0.8)
    assert probability_of_true({"yes": 0.0}) is None


@pytest.mark.parametrize("is_chat", [False, True])
def test_servers_are_asked_for_probabilities(is_chat: bool) -> None:
    from vllm_relay.tables.engines.server.dialect import Dialect

    question = Question("q", ("a",), TRUTH)
    asked = Requests("m", question, is_vllm=True, is_chat=is_chat, num_logprobs=20)
    body = asked.body(Prompt(0, "q", [1, 2]), Dialect())
    if is_chat:
        assert (body["logprobs"], body["top_logprobs"]) == (True, 20)
        found: Any = {"content": [{"top_logprobs": [{"token": "true", "logprob": -0.5}]}]}
        choice = {"message": {"content": "true"}}
    else:
        assert body["logprobs"] == 20
        found = {"top_logprobs": [{"true": -0.5}, {"x": 0}]}
        choice = {"text": "true"}
    reply = {"choices": [{**choice, "finish_reason": "stop", "logprobs": found}]}
    assert read_completion(0, reply, is_chat).first_logprobs == {"true": -0.5}
    reply["choices"][0]["logprobs"] = None
    assert read_completion(0, reply, is_chat).first_logprobs is None
    plain = Requests("m", question, is_vllm=True, is_chat=is_chat)
    assert "logprobs" not in plain.body(Prompt(0, "q", [1, 2]), Dialect())
