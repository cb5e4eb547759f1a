# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from tests.tables.recording_engine import RecordingEngine, Refusal, Row
from vllm_relay.tables import JobOptions, MapBudgetError, llm_top_k


def larger(row: Row) -> str:
    return "A" if row["A"]["x"] > row["B"]["x"] else "B"


@settings(max_examples=cases(60), deadline=None)
@given(st.lists(st.integers(0, 20) | st.none(), max_size=30), st.integers(1, 12), st.integers(0, 3))
def test_the_first_rows_in_their_order(values: list[int | None], k: int, seed: int) -> None:
    engine = RecordingEngine(larger)
    table = pa.table(
        {"x": pa.array(values, pa.int64()), "name": [str(i) for i in range(len(values))]}
    )
    result = llm_top_k(table, "Which has a larger {x}?", k, engine=engine, pivot_seed=seed)
    known = [(i, x) for i, x in enumerate(values) if x is not None]
    expected = [i for i, _ in sorted(known, key=lambda each: (-each[1], each[0]))][:k]
    assert result.places == expected
    assert result.table["name"].to_pylist() == [str(i) for i in expected]
    assert not result.errors
    assert len(engine.messages) == len(set(engine.messages)) == result.report.num_prompts


def test_how_many_comparisons_it_takes() -> None:
    values = np.random.default_rng(0).permutation(1000).tolist()
    counts = []
    for seed in range(5):
        engine = RecordingEngine(larger)
        result = llm_top_k(
            pa.table({"x": values}), "Which is larger?", 10, engine=engine, pivot_seed=seed
        )
        assert [values[place] for place in result.places] == list(range(999, 989, -1))
        assert result.num_rounds < 4 * math.log2(1000)
        counts.append(len(engine.messages))
    # two or three times as many as rows, not all 499,500 pairs
    assert sum(counts) / len(counts) < 3 * 1000 + 20 * math.log2(10)


def test_comparisons_with_a_pivot_follow_each_other_and_begin_alike() -> None:
    values = [f"{i:03} " + "text " * 30 for i in range(40)]
    engine = RecordingEngine(lambda row: "A" if row["A"]["x"] > row["B"]["x"] else "B")
    result = llm_top_k(pa.table({"x": values}), "Which is larger?", 40, engine=engine)
    assert result.places == list(range(39, -1, -1))
    firsts = [message.split("\n\n")[1].split("\n")[0] for message in engine.messages]
    assert all(first.startswith('"A": {"x":') for first in firsts)
    changes = sum(a != b for a, b in zip(firsts, firsts[1:], strict=False))
    assert changes == len(set(firsts)) - 1


def test_rows_without_an_answer_are_left_out() -> None:
    def refusing(row: Row) -> str:
        if row["A"]["x"] == 5 or row["B"]["x"] == 5:
            raise Refusal("no five")
        return larger(row)

    for seed in range(12):
        table = pa.table({"x": [3, 5, 9, 1, 7, 5]})
        engine = RecordingEngine(refusing)
        result = llm_top_k(table, "Which is larger?", 3, engine=engine, pivot_seed=seed)
        assert result.places == [2, 4, 0]
        assert result.errors == {1: "no five", 5: "no five"}


def test_everything_fails() -> None:
    def failing(row: Row) -> str:
        raise Refusal("down")

    for count in (2, 3, 12):
        table = pa.table({"x": list(range(count))})
        result = llm_top_k(table, "q", 2, engine=RecordingEngine(failing))
        assert result.places == []
        assert result.errors == dict.fromkeys(range(count), "down")


@settings(max_examples=cases(40), deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=2, max_size=20, unique=True),
    st.sets(st.integers(0, 30)),
    st.integers(0, 3),
)
def test_only_what_was_compared_is_a_result(
    values: list[int], refused: set[int], seed: int
) -> None:
    def refusing(row: Row) -> str:
        if {row["A"]["x"], row["B"]["x"]} & refused:
            raise Refusal("not this one")
        return larger(row)

    engine = RecordingEngine(refusing)
    table = pa.table({"x": values})
    result = llm_top_k(table, "Which is larger?", len(values), engine=engine, pivot_seed=seed)
    allowed = sorted(set(values) - refused, reverse=True)
    # one that is alone was compared with nobody
    expected = allowed if len(allowed) > 1 else []
    assert [values[place] for place in result.places] == expected
    assert sorted(result.errors) == [
        place for place, value in enumerate(values) if value not in expected
    ]


def test_the_prompt() -> None:
    engine = RecordingEngine(larger)
    table = pl.DataFrame({"x": [1, 2], "y": ["p", "q"]})
    result = llm_top_k(table, "Which has a larger {x}, {{really}}?", 1, engine=engine)
    assert result.table.rows() == [(2, "q")]
    [message] = engine.messages
    assert message.startswith(
        "Which has a larger {x}, {really}?\nA and B are two records, names in braces are their "
        "fields. Which of the two is it?\n"
    )
    assert "Answer with one of: A, B." in message


def test_only_similar_rows_are_compared() -> None:
    engine = RecordingEngine(larger)

    def embed(texts: list[str]) -> Any:
        # the question, and the rows with an odd number, are alike
        return [[1.0, 0.0] if each == "odd?" or int(each[5:-1]) % 2 else [0.0, 1.0]
                for each in texts]  # fmt: skip

    table = pa.table({"x": list(range(20))})
    result = llm_top_k(table, "odd?", 3, engine=engine, embeddings=embed, candidates=10)
    assert result.places == [19, 17, 15]
    assert all(f'{{"x":{x}}}' not in message for message in engine.messages for x in (0, 2, 18))


def test_a_budget_and_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    table = pa.table({"x": list(range(50))})
    with pytest.raises(MapBudgetError) as caught:
        llm_top_k(
            table,
            "q",
            3,
            engine=RecordingEngine(larger),
            options=JobOptions(checkpoint=path, max_total_tokens=500),
        )
    spent = caught.value.result.report
    num_asked = spent.output_tokens
    assert num_asked > 0 and spent.prompt_tokens + spent.output_tokens <= 500
    whole = RecordingEngine(larger)
    expected = llm_top_k(table, "q", 3, engine=whole).places
    engine = RecordingEngine(larger)
    again = llm_top_k(table, "q", 3, engine=engine, options=JobOptions(checkpoint=path))
    assert again.places == expected == [49, 48, 47]
    assert len(engine.messages) == len(whole.messages) - num_asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0 given, expected at least 1"),
        ({"k": 1.5}, "k=1.5 given, expected at least 1, an integer"),
        ({"embeddings": len, "candidates": 2.5}, "candidates=2.5 given, .* an integer"),
        ({"embeddings": len}, "embeddings and candidates go together"),
        ({"embeddings": len, "candidates": 1}, "candidates=1 given, expected at least k=2"),
        ({"fields": ["z"]}, "field 'z' given, which is no column"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    engine = RecordingEngine(larger)
    with pytest.raises(ValueError, match=message):
        llm_top_k(pa.table({"x": [1, 2]}), "q", **{"k": 2, "engine": engine, **options})
    assert not engine.messages
