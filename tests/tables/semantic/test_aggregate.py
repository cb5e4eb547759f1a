# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from tests.tables.byte_tokenizer import byte_tokenizer
from tests.tables.recording_engine import RecordingEngine, Refusal, Row
from tests.tables.semantic.agg_cases import (
    counting_engine,
    is_combining,
    joined,
    records_of,
    summed,
)
from vllm_relay.tables import JobOptions, MapBudgetError, PromptTemplate, llm_agg

KINDS: dict[str, Any] = {
    "arrow": lambda table: table,
    "pandas": lambda table: table.to_pandas(),
    "polars": pl.from_arrow,
}
MAX_TOKENS = 24


def sums(table: Any, engine: RecordingEngine, **options: Any) -> Any:
    given = {"output": int, "max_tokens": MAX_TOKENS, "fields": ["x"], **options}
    return llm_agg(table, "What is the sum?", engine=engine, **given)


@settings(max_examples=cases(40), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("ab") | st.none(), st.none() | st.integers(0, 10**6)), max_size=60
    ),
    st.integers(330, 700),
    st.none() | st.integers(20, 100),
)
def test_every_group_has_the_answer_of_all_its_records(
    rows: list[tuple[str | None, int | None]], max_model_len: int, pack_tokens: int | None
) -> None:
    table = pa.table(
        {
            "g": pa.array([g for g, _ in rows], pa.string()),
            "x": pa.array([x for _, x in rows], pa.int64()),
        }
    )
    engine = counting_engine(max_model_len)
    result = sums(table, engine, by=["g"], pack_tokens=pack_tokens)
    given: dict[str | None, list[int]] = {}
    for g, x in rows:
        given.setdefault(g, []).extend([] if x is None else [x])
    assert result.table.to_pylist() == [
        {"g": g, "answer": sum(found) if found else None} for g, found in given.items()
    ]
    assert result.values.to_pylist() == result.table["answer"].to_pylist()
    assert not result.errors
    assert len(engine.messages) == len(set(engine.messages)) == result.report.num_prompts

    tokenizer = byte_tokenizer()
    for message in engine.messages:
        assert len(tokenizer(message)["input_ids"]) + MAX_TOKENS <= max_model_len
    # a prompt of a group's first records holds as many as there is room for
    first = [records_of(message) for message in engine.messages if not is_combining(message)]
    for found in given.values():
        records = [{"x": x} for x in found]
        while records:
            begins = [part for part in first if records[: len(part)] == part]
            assert begins
            records = records[max(map(len, begins)) :]


def test_the_number_of_prompts_of_a_tree() -> None:
    # 10 records a prompt: {"x":1000} and a comma have 10 tokens, as quotes and colons are joined
    table = pa.table({"x": [1000 + i for i in range(200)]})
    engine = counting_engine(10_000)
    result = sums(table, engine, pack_tokens=100)
    assert result.objects == [sum(range(1000, 1200))]
    levels = [len(records_of(m)) for m in engine.messages if not is_combining(m)]
    assert levels == [10] * 20
    # 20 partial sums of 5 digits and a comma: 16 and 4 of them, whose answers are two more
    combining = [len(records_of(m)) for m in engine.messages if is_combining(m)]
    assert sorted(combining) == [2, 4, 16]
    assert result.report.num_prompts == 23


def test_records_and_partial_answers_stay_in_their_order() -> None:
    words = [f"w{i}," for i in range(100)]
    engine = counting_engine(1200, joined)
    result = llm_agg(pa.table({"s": words}), "Join {s}", engine=engine, max_tokens=600)
    assert result.objects == ["".join(words)]
    assert any(map(is_combining, engine.messages))


def test_equal_packs_of_any_groups_are_asked_once() -> None:
    table = pa.table({"g": ["a", "b", "a", "b", "c"], "x": [1, 1, 2, 2, 2]})
    engine = counting_engine(10_000)
    assert sums(table, engine, by="g").objects == [3, 3, 2]
    assert len(engine.messages) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_of_the_kind_that_was_given(kind: str) -> None:
    table = pa.table({"x": [1, 2, 4], "g": ["b", "a", "b"], "h": [1.5, None, 1.5]})
    given = KINDS[kind](table)
    if kind == "pandas":
        given["g"] = given["g"].astype("category")
    result = sums(given, RecordingEngine(summed), by=["g", "h"])
    if kind == "pandas":
        expected = pd.DataFrame({"g": ["b", "a"], "h": [1.5, None], "answer": [5, 2]})
        expected["g"] = expected["g"].astype("category")
        expected["answer"] = expected["answer"].astype("Int64")
        pd.testing.assert_frame_equal(result.table, expected)
        pd.testing.assert_series_equal(result.values, expected["answer"])
        return
    assert type(result.table) is type(given)
    rows = result.table.to_pylist() if kind == "arrow" else result.table.rows(named=True)
    assert rows == [{"g": "b", "h": 1.5, "answer": 5}, {"g": "a", "h": None, "answer": 2}]


NUMBERS = [0.0, -0.0, math.nan, -math.nan, 1.5, None]


@pytest.mark.parametrize(
    "keys",
    [
        {"g": pa.array(NUMBERS * 2)},
        {"g": pa.array(NUMBERS * 2, pa.float32()), "h": pa.array([1, 1, 2] * 4)},
        {"g": pa.array([[each] for each in NUMBERS] * 2)},
        {"g": pa.array([{"a": each} for each in NUMBERS] * 2)},
        {"g": pa.array([(1, 0, 0), (0, 30, 0), (0, 0, 0)] * 4, pa.month_day_nano_interval())},
    ],
)
def test_groups_are_those_of_duckdb(keys: dict[str, pa.Array]) -> None:
    table = pa.table({**keys, "x": list(range(12))})
    engine = RecordingEngine(lambda row: json.dumps([each["x"] for each in row["records"]]))
    result = llm_agg(table, "q {x}", by=list(keys), engine=engine)
    with duckdb.connect() as connection:
        connection.register("given", table)
        expected = connection.execute(
            f"SELECT list(x ORDER BY x) FROM given GROUP BY {', '.join(keys)} ORDER BY min(x)"
        ).fetchall()
    assert [json.loads(each) for each in result.objects] == [rows for (rows,) in expected]
    assert result.table["g"].to_pylist()[0] == keys["g"][0].as_py()


@pytest.mark.parametrize("kind", KINDS)
def test_without_rows_there_is_one_group_or_none(kind: str) -> None:
    table = KINDS[kind](pa.table({"x": pa.array([], pa.int64()), "g": pa.array([], pa.string())}))
    engine = RecordingEngine(summed)
    assert sums(table, engine).objects == [None]
    assert sums(table, engine, by=["g"]).objects == []
    assert not engine.messages


def test_records_of_which_nothing_is_known_are_left_out() -> None:
    table = pa.table({"s": ["a", None, None], "x": [None, None, 2]})
    engine = RecordingEngine(lambda row: json.dumps(row["records"]))
    result = llm_agg(table, "q", engine=engine)
    assert json.loads(result[0]) == [{"s": "a", "x": None}, {"s": None, "x": 2}]
    nothing = llm_agg(table.slice(1, 1), "q", engine=engine)
    assert (nothing.objects, nothing.errors, len(engine.messages)) == ([None], {}, 1)


def test_fields_are_those_of_the_question_or_all_but_the_keys() -> None:
    table = pa.table({"g": ["a"], "x": [1], "y": [2]})
    engine = RecordingEngine(lambda row: json.dumps(row["records"]))
    assert json.loads(llm_agg(table, "How is {y}?", engine=engine, by="g")[0]) == [{"y": 2}]
    assert json.loads(llm_agg(table, "How is {{y}}?", engine=engine, by="g")[0]) == [
        {"x": 1, "y": 2}
    ]
    assert "How is {y}?" in engine.messages[0] and "How is {y}?" in engine.messages[1]
    assert "braces" in engine.messages[0] and "braces" not in engine.messages[1]


def test_a_record_that_fits_no_prompt_is_its_groups_error() -> None:
    table = pa.table({"g": ["a", "b", "a", "b"], "s": ["p", "q", "x" * 600, "r"]})
    engine = counting_engine(500, joined)
    result = llm_agg(table, "Join", engine=engine, by="g", max_tokens=50)
    assert result.objects == [None, "qr"]
    assert list(result.errors) == [0]
    assert "record 2 of 2 makes a prompt of" in result.errors[0]
    assert "there is room for 450 beside the answer" in result.errors[0]
    assert len(engine.messages) == 1


def test_the_error_of_a_part_says_which_records_it_has() -> None:
    def refusing(row: Row) -> str:
        if {"x": 1015} in row["records"]:
            raise Refusal("no")
        return summed(row)

    table = pa.table({"g": ["a"] * 30 + ["b"] * 30, "x": [*range(1000, 1030), *range(2000, 2030)]})
    engine = counting_engine(10_000, refusing)
    result = sums(table, engine, by="g", pack_tokens=100)
    assert result.objects == [None, sum(range(2000, 2030))]
    assert result.errors == {0: "records 11 to 20 of 30: no"}
    # the other parts of the group are not combined
    assert len(engine.messages) == 3 + 3 + 1
    assert result.report.num_errors == 1


def test_partial_answers_that_cannot_be_combined_are_an_error() -> None:
    table = pa.table({"s": ["a" * 50] * 10})

    def error_with(num_chars: int) -> str:
        engine = counting_engine(500, lambda row: "y" * num_chars)
        return llm_agg(table, "Join", engine=engine, max_tokens=50, pack_tokens=100).errors[0]

    assert "no two of 10 partial answers that follow each other fit" in error_with(250)
    assert "of the partial answers, record 1 of 10 makes a prompt of" in error_with(800)
    # two that fit are enough, also where they have more than pack_tokens
    engine = counting_engine(500, lambda row: "y" * 80)
    result = llm_agg(table, "Join", engine=engine, max_tokens=50, pack_tokens=100)
    assert not result.errors
    assert len(engine.messages) == 2


def test_a_budget_is_one_of_all_levels(tmp_path: Path) -> None:
    table = pa.table({"g": ["a"] + ["b"] * 200, "x": [5, *range(1000, 1200)]})
    # the engine says 11 tokens for each prompt; those of the first level are 21, and the tokens of
    # a combining prompt and its longest answer are not left
    options = JobOptions(checkpoint=tmp_path / "answers.db")
    exact = sums(table, counting_engine(10_000), by="g", pack_tokens=100)
    assert exact.report.num_prompts == 24
    with pytest.raises(MapBudgetError, match="raise max_total_tokens") as caught:
        sums(
            table,
            counting_engine(10_000),
            by="g",
            pack_tokens=100,
            options=JobOptions(checkpoint=options.checkpoint, max_total_tokens=500),
        )
    result = caught.value.result
    assert result.objects == [5, None]
    assert "not asked: the budget of 500 tokens is spent" in result.errors[1]
    assert 200 < result.report.prompt_tokens + result.report.output_tokens <= 500
    # what is known is not asked again
    engine = counting_engine(10_000)
    again = sums(table, engine, by="g", pack_tokens=100, options=options)
    assert again.objects == exact.objects
    assert len(engine.messages) == 3
    rest = counting_engine(10_000)
    assert sums(table, rest, by="g", pack_tokens=100, options=options).objects == exact.objects
    assert not rest.messages


def test_lists_in_any_order_that_are_equal_are_asked_once() -> None:
    table = pa.table({"g": ["a", "a", "b", "b"], "x": [1, 2, 2, 1]})
    engine = counting_engine(10_000)
    assert sums(table, engine, by="g", any_order=True).objects == [3, 3]
    assert len(engine.messages) == 1
    sums(table, engine, by="g")
    assert len(engine.messages) == 3


def test_without_a_tokenizer_two_bytes_are_a_token() -> None:
    table = pa.table({"s": ["x" * 100] * 100})
    engine = RecordingEngine(lambda row: str(len(row["records"])), max_model_len=2000)
    assert llm_agg(table, "Join", engine=engine, max_tokens=500).objects == ["4"]
    # 26, 26, 26 and 22 of them, of which equal ones are asked once
    assert [len(records_of(message)) for message in engine.messages] == [26, 22, 4]
    assert max(len(message) for message in engine.messages) <= 2 * 1500
    # nobody says how long the context is
    open_end = RecordingEngine(joined)
    llm_agg(table, "Join", engine=open_end)
    assert [len(records_of(message)) for message in open_end.messages] == [100]


def test_a_template_counts() -> None:
    engine = RecordingEngine(joined, tokenizer=byte_tokenizer(), max_model_len=900)
    template = PromptTemplate(base_after="\n" + "z" * 200 + "\nAnswer:")
    # the engine of these tests reads the default template only
    with contextlib.suppress(ValueError):
        llm_agg(
            pa.table({"s": ["x" * 30] * 30}),
            "Join",
            engine=engine,
            max_tokens=50,
            options=JobOptions(template=template),
        )
    assert max(len(byte_tokenizer()(m)["input_ids"]) for m in engine.messages) <= 850


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": ["nothing"]}, "field 'nothing' given, which is no column"),
        ({"fields": ["nothing"]}, "field 'nothing' given, which is no column"),
        ({"by": ["answer"]}, "'answer' names the answers"),
        ({"pack_tokens": 0}, "pack_tokens=0 given, expected at least 1"),
        ({"by": ["x", "x"]}, r"by=\['x', 'x'\] given, expected each name once"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    engine = RecordingEngine(summed)
    with pytest.raises(ValueError, match=message):
        sums(pa.table({"x": [1], "answer": [2]}), engine, **options)
    assert not engine.messages


def test_a_question_that_names_no_column_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names \['z'\]"):
        llm_agg(pa.table({"x": [1]}), "{z}?", ["x"], engine=RecordingEngine(summed))
