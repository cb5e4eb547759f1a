# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from tests.tables.recording_engine import RecordingEngine, Refusal, Row
from vllm_relay.tables import JobOptions, MapBudgetError, llm_join

LEFT = pa.table({"id": [1, 2, 3], "a": ["x", None, "y"]})
RIGHT = pa.table({"id": [7, 8, 9], "b": ["y", "x", None], "n": [1, 2, 3]})
KINDS: dict[str, Any] = {
    "arrow": lambda table: table,
    "pandas": lambda table: table.to_pandas(),
    "polars": pl.from_arrow,
}


def equal(row: Row) -> str:
    first, second = row.values()
    return str(first == second).lower()


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_of_rows(kind: str) -> None:
    engine = RecordingEngine(equal)
    tables = KINDS[kind](LEFT), KINDS[kind](RIGHT)
    result = llm_join(*tables, "Is {a} the same as {b:right}?", engine=engine)
    assert result.pairs == [(0, 1), (2, 0)]
    expected = {
        "id:left": [1, 3],
        "a": ["x", "y"],
        "id:right": [8, 7],
        "b": ["x", "y"],
        "n": [2, 1],
    }
    if kind == "arrow":
        assert result.table.to_pydict() == expected
    elif kind == "pandas":
        pd.testing.assert_frame_equal(result.table, pd.DataFrame(expected), check_dtype=False)
    else:
        assert result.table.to_dict(as_series=False) == expected
    # rows of which nothing is known are in no pair
    assert len(engine.messages) == result.num_asked == result.report.num_prompts == 4
    assert (result.errors, result.similarity, result.recall) == ({}, None, 1.0)


@settings(max_examples=cases(30), deadline=None)
@given(
    st.lists(st.sampled_from("xyz") | st.none(), max_size=6),
    st.lists(st.sampled_from("xyz") | st.none(), max_size=6),
)
def test_every_pair_is_answered_and_equal_ones_are_asked_once(
    left: list[str | None], right: list[str | None]
) -> None:
    engine = RecordingEngine(equal)
    tables = [
        pa.table({name: pa.array(values, pa.string())})
        for name, values in (("a", left), ("b", right))
    ]
    result = llm_join(*tables, "{a} {b}?", engine=engine)
    assert result.pairs == [
        (i, j) for i, a in enumerate(left) for j, b in enumerate(right) if a is not None and a == b
    ]
    assert len(engine.messages) == len(set(left) - {None}) * len(set(right) - {None})


def test_pairs_of_a_row_follow_each_other_and_begin_alike() -> None:
    left = pa.table({"a": [f"{i} " + "long text " * 40 for i in range(12)]})
    right = pa.table({"b": [f"s{j}" for j in range(10)]})
    for tables in ((left, right), (right, left)):
        engine = RecordingEngine(lambda row: "false")
        llm_join(*tables, "Does {b} occur in {a}?", engine=engine)
        firsts = [message.split("\n\n")[1].split("\n")[0] for message in engine.messages]
        assert len(firsts) == 120
        changes = sum(a != b for a, b in zip(firsts, firsts[1:], strict=False))
        assert changes == 11 and firsts[0].startswith('"a"')


def test_names_that_both_tables_have() -> None:
    engine = RecordingEngine(equal)
    both = pa.table({"a": ["x", "y"]})
    result = llm_join(both, both, "Is {a:left} {a:right}?", engine=engine)
    assert result.pairs == [(0, 0), (1, 1)]
    assert result.table.column_names == ["a:left", "a:right"]
    assert '"a:left": "x"' in engine.messages[0]
    assert "Is {a:left} {a:right}?" in engine.messages[0]


def test_errors_are_those_of_their_pairs() -> None:
    def refusing(row: Row) -> str:
        if row["a"] == "x":
            raise Refusal("no")
        return equal(row)

    result = llm_join(LEFT, RIGHT, "{a} {b}?", engine=RecordingEngine(refusing))
    assert result.errors == {(0, 0): "no", (0, 1): "no"}
    assert result.pairs == [(2, 0)]


GROUPS = 50
TITLES = pa.table({"title": [f"topic {i % GROUPS} number {i}" for i in range(100)]})
TEXTS = pa.table({"text": [f"topic {i % GROUPS} text {i}" for i in range(120)]})
NOISE = np.random.default_rng(3).normal(size=(1000, 16)).astype(np.float32)


def topic(text: str) -> int:
    return int(text.split()[1])


def embed(texts: list[str]) -> Any:
    """Vectors of a topic are alike."""
    return [NOISE[topic(text)] + 0.1 * NOISE[500 + int(text.split()[-1])] for text in texts]


def same_topic(row: Row) -> str:
    return str(topic(row["title"]) == topic(row["text"]))


def test_pairs_that_are_not_similar_are_left_out() -> None:
    engine = RecordingEngine(same_topic)
    result = llm_join(
        TITLES, TEXTS, "Is {text} about {title}?", engine=engine, embeddings=embed, labels=4000
    )
    true = {(i, j) for i in range(100) for j in range(120) if i % GROUPS == j % GROUPS}
    assert set(result.pairs) <= true
    assert len(result.pairs) / len(true) >= 0.9 == result.recall
    assert result.similarity is not None and result.similarity > 0.5
    assert len(engine.messages) == result.num_asked == len(set(engine.messages)) < 5000


def test_with_too_few_labels_every_pair_is_asked_about() -> None:
    engine = RecordingEngine(same_topic)
    small = TITLES.slice(0, 20), TEXTS.slice(0, 30)
    result = llm_join(*small, "Is {text} about {title}?", engine=engine, embeddings=embed, labels=9)
    assert len(engine.messages) == 600
    assert (result.similarity, result.recall, len(result.pairs)) == (None, 1.0, 20)


def test_a_budget_and_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    # 11 tokens for each prompt
    with pytest.raises(MapBudgetError) as caught:
        llm_join(
            LEFT,
            RIGHT,
            "{a} {b}?",
            engine=RecordingEngine(equal),
            options=JobOptions(checkpoint=path, max_total_tokens=110),
        )
    num_left = len(caught.value.result.errors)
    assert 0 < num_left < 4
    engine = RecordingEngine(equal)
    again = llm_join(LEFT, RIGHT, "{a} {b}?", engine=engine, options=JobOptions(checkpoint=path))
    assert again.pairs == [(0, 1), (2, 0)]
    assert len(engine.messages) == num_left


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("{a} {c}?", "names 'c', which is a column of neither table"),
        ("{id} {b}?", "names 'id', which is a column of both tables"),
        ("{a:right} {a}?", "names 'a:right', which is a column of neither table"),
        ("{a} {id:left}?", "names no column of the right table"),
        ("same?", "names no column of the left table"),
    ],
)
def test_prompts_that_name_no_pair(prompt: str, message: str) -> None:
    engine = RecordingEngine(equal)
    with pytest.raises(ValueError, match=message):
        llm_join(LEFT, RIGHT, prompt, engine=engine)
    assert not engine.messages


def test_what_does_not_fit_is_refused() -> None:
    engine = RecordingEngine(equal)
    with pytest.raises(TypeError, match="expected two of one kind"):
        llm_join(LEFT, RIGHT.to_pandas(), "{a} {b}?", engine=engine)
    with pytest.raises(TypeError, match="expected a function from a list of texts"):
        llm_join(LEFT, RIGHT, "{a} {b}?", engine=engine, embeddings=3)
    with pytest.raises(ValueError, match=r"array of shape \[2\] for 2 texts"):
        llm_join(LEFT, RIGHT, "{a} {b}?", engine=engine, embeddings=lambda texts: [1.0, 2.0])
    with pytest.raises(ValueError, match=r"no array for 2 texts .* one vector of numbers for each"):
        llm_join(LEFT, RIGHT, "{a} {b}?", engine=engine, embeddings=lambda texts: [[1.0], [1.0, 2]])
    with pytest.raises(ValueError, match="both have a column 'b', and one of them 'b:left'"):
        both = RIGHT.append_column("b:left", RIGHT["b"])
        llm_join(RIGHT, both, "{n:left} {n:right}?", engine=engine)
    with pytest.raises(ValueError, match="labels=0"):
        llm_join(LEFT, RIGHT, "{a} {b}?", engine=engine, labels=0)
    assert not engine.messages
