# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, field_validator

from tests.support.depth import cases
from tests.tables.asked_tables import KINDS, ask, listed
from tests.tables.recording_engine import RecordingEngine, Refusal, Row
from vllm_relay.tables import MapBudgetError, Output, PromptTemplate, RowsFailedError, llm_map
from vllm_relay.tables.engines.base import Completions, Prompt
from vllm_relay.tables.question import Question

CELLS = {
    "text": st.none() | st.sampled_from(["", "a", "A", " a", "é\n", '"quoted"', "{n}", "null"]),
    "total": st.none() | st.integers(-2, 2) | st.sampled_from([2**53 + 1, -(2**62)]),
    "weight": st.none() | st.sampled_from([0.0, 1.5, -2.25, 1e300, math.inf]),
    "flag": st.none() | st.booleans(),
    "day": st.none() | st.dates(datetime.date(2020, 1, 1), datetime.date(2020, 1, 3)),
    "words": st.none() | st.lists(st.none() | st.sampled_from(["x", "y"]), max_size=2),
    "pair": st.none() | st.fixed_dictionaries({"k": st.sampled_from(["p", "q"])}),
}
TYPES = {
    "text": pa.string(),
    "total": pa.int64(),
    "weight": pa.float64(),
    "flag": pa.bool_(),
    "day": pa.date32(),
    "words": pa.list_(pa.string()),
    "pair": pa.struct([("k", pa.string())]),
}


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    names = draw(st.lists(st.sampled_from(list(CELLS)), min_size=1, max_size=4, unique=True))
    num_rows = draw(st.integers(0, 12))
    rows = draw(
        st.lists(st.tuples(*(CELLS[name] for name in names)), min_size=num_rows, max_size=num_rows)
    )
    return pa.table(
        [pa.array([row[i] for row in rows], TYPES[name]) for i, name in enumerate(names)],
        names=names,
    )


def expected_row(row: Row) -> Row:
    return {name: str(each) if name == "day" and each else each for name, each in row.items()}


@settings(max_examples=cases(15))
@given(
    tables(),
    st.sampled_from(list(KINDS)),
    st.sampled_from(["auto", "keep", "fixed", "per_row"]),
    st.sampled_from([2, 1000]),
)
def test_every_row_has_its_own_answer_in_the_tables_order(
    table: pa.Table, kind: str, order: Any, bucket_rows: int
) -> None:
    # integers with missing values are floats in pandas, as everybody knows
    if kind == "pandas" and "total" in table.column_names:
        table = table.drop_columns(["total"])
    if not table.column_names:
        return
    made = KINDS[kind](table)
    result, engine = ask(made, order=order, bucket_rows=bucket_rows)
    rows = [expected_row(row) for row in table.to_pylist()]
    # a row of NULLs is not asked about
    expected = [row if any(each is not None for each in row.values()) else None for row in rows]
    assert [value and json.loads(value) for value in listed(result.values)] == expected
    assert result.objects == listed(result.values)
    assert not result.errors
    distinct = {json.dumps(row, sort_keys=True) for row in expected if row is not None}
    assert len(engine.messages) == len(distinct) == result.report.num_prompts
    assert result.report.num_rows == len(rows)


def test_values_are_of_the_tables_kind() -> None:
    table = pa.table({"n": [3, 1, 3]})
    values = {kind: ask(make(table), output=int, answer=lambda row: str(row["n"] * 2))[0].values
              for kind, make in KINDS.items()}  # fmt: skip
    assert isinstance(values["pandas"], pd.Series) and isinstance(values["polars"], pl.Series)
    assert isinstance(values["arrow"], pa.ChunkedArray)
    assert [listed(each) for each in values.values()] == [[6, 2, 6]] * 3
    frame = KINDS["pandas"](table)
    frame["double"] = values["pandas"]
    assert frame["double"].tolist() == [6, 2, 6]
    assert table.append_column("double", values["arrow"]).num_columns == 2
    assert KINDS["polars"](table).with_columns(double=values["polars"]).width == 2


def test_a_record_batch_is_a_table() -> None:
    result, _ = ask(pa.RecordBatch.from_pydict({"n": [1]}))
    assert result.values.to_pylist() == ['{"n": 1}']


@pytest.mark.parametrize(
    "index",
    [
        pd.Index([5, 5, 1]),
        pd.MultiIndex.from_tuples([("a", 1), ("a", 1), ("b", 2)], names=["x", "y"]),
        pd.date_range("2020-01-01", periods=3),
    ],
)
def test_the_index_is_kept(index: pd.Index) -> None:
    frame = pd.DataFrame({"n": [2, 1, 2]}, index=index)
    result, engine = ask(frame)
    pd.testing.assert_index_equal(result.values.index, frame.index, exact=True)
    assert result.values.tolist() == ['{"n": 2}', '{"n": 1}', '{"n": 2}']
    assert len(engine.messages) == 2


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    ("output", "value"), [(int, 7), (float, 2.5), (bool, True), (str, "x"), ("json", '{"a": 1}')]
)
def test_rows_without_an_answer_are_missing(kind: str, output: Any, value: Any) -> None:
    def answer(row: Row) -> str:
        if row["n"] == 2:
            raise Refusal("too long")
        return str(value)

    result, _ = ask(KINDS[kind](pa.table({"n": [1, 2, 3, 2]})), answer, output=output)
    assert listed(result.values) == [value, None, value, None]
    assert result.errors == {1: "too long", 3: "too long"}
    assert result.report.num_errors == 2
    assert result.objects[:2] == [{"a": 1} if output == "json" else value, None]


def test_types_of_values_do_not_depend_on_what_is_missing() -> None:
    frame = pd.DataFrame({"n": [1, 2]})
    for output, text, dtype in [(int, "1", "Int64"), (bool, "true", "boolean")]:
        for answers in (dict.fromkeys([1, 2], text), {1: text, 2: "?"}, {1: "?", 2: "?"}):
            result, _ = ask(frame, lambda row, texts=answers: texts[row["n"]], output=output)
            assert result.values.dtype == dtype


def test_an_exception_has_the_other_answers() -> None:
    def answer(row: Row) -> str:
        if row["n"] != 2:
            raise Refusal("no")
        return "yes"

    with pytest.raises(RowsFailedError, match="4 of 5 rows .* row 0: no; .* and 1 more") as raised:
        ask(pd.DataFrame({"n": [1, 2, 3, 4, 5]}), answer, on_error="raise")
    assert listed(raised.value.result.values) == [None, "yes", None, None, None]


class Film(BaseModel):
    title: str
    year: int = Field(ge=1888)


def test_a_pydantic_model_checks_every_answer() -> None:
    table = pl.DataFrame({"n": [1, 2, 3, 1]})
    texts = {1: '{"title": "a", "year": 1999}', 2: '{"title": "b", "year": 3}', 3: '{"title": "c'}
    result, _ = ask(table, lambda row: texts[row["n"]], output=Film)
    film = Film(title="a", year=1999)
    assert result.objects == [film, None, None, film]
    row = film.model_dump()
    assert listed(result.values) == [row, None, None, row]
    assert list(result.errors) == [1, 2]
    assert "$.year: 3 is less than the minimum of 1888" in result.errors[1]
    assert "not of type struct" in result.errors[2]
    assert result.report.num_errors == 2


class Review(BaseModel):
    stars: int = 3
    tags: list[str] = Field(default_factory=lambda: ["none"])
    note: str | None = None
    seen: datetime.date

    @field_validator("stars")
    @classmethod
    def _odd(cls, stars: int) -> int:
        if stars % 2 == 0:
            raise ValueError("stars are odd")
        return stars


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_a_model_alone_knows_counts_too(kind: str) -> None:
    texts = {1: '{"seen": "2024-02-29"}', 2: '{"stars": 4, "seen": "2024-02-29"}'}
    table = KINDS[kind](pa.table({"n": [1, 2]}))
    result, _ = ask(table, lambda row: texts[row["n"]], output=Review)
    day = datetime.date(2024, 2, 29)
    assert result.objects == [Review(seen=day), None]
    # a schema knows no default that is made when it is needed
    row = {"stars": 3, "tags": None, "note": None, "seen": day}
    assert listed(result.values) == [row, None]
    assert list(result.errors) == [1] and "stars are odd" in result.errors[1]


def test_what_a_model_refuses_is_asked_again(tmp_path: Path) -> None:
    table = pa.table({"n": [1]})
    texts = ['{"stars": 5, "seen": "2024-02-29"}', '{"stars": 4, "seen": "2024-02-29"}']
    for is_answered in (False, True):
        result, _ = ask(table, lambda _: texts.pop(), output=Review, checkpoint=tmp_path / "a.db")
        assert (result.report.num_errors, result.report.num_known) == (1 - is_answered, 0)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_schema_means_structs(kind: str) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
    table = KINDS[kind](pa.table({"n": [1, 2]}))
    texts = {1: '{"b": 1}', 2: '{"b": "1"}'}
    result, engine = ask(table, lambda row: texts[row["n"]], output=schema)
    assert listed(result.values) == result.objects == [{"b": 1, "a": None}, None]
    assert result.errors[1].endswith("does not fit its type: $.b: '1' is not of type 'integer'")
    assert '"properties"' in engine.messages[0]
    # in the schema's order
    assert result.arrow_values.type == pa.struct([("b", pa.int64()), ("a", pa.string())])


def test_a_type_that_is_written_out_means_structs() -> None:
    table = pa.table({"n": [1, 2]})
    result, _ = ask(table, lambda row: f"[{row['n']}, 200]", output="UTINYINT[]")
    assert result.values.to_pylist() == result.objects == [[1, 200], [2, 200]]
    assert result.values.type.value_type == pa.uint8()


def test_a_schema_that_leaves_types_open_may_give_texts() -> None:
    schema = {"type": "object", "properties": {"a": {"type": ["integer", "string"]}}}
    table = pa.table({"n": [1]})
    with pytest.raises(ValueError, match=r"at \$.a given, a union .* output=Output.of\('json'"):
        ask(table, output=schema)
    result, _ = ask(table, lambda row: '{"a": 1}', output=Output.of("json", schema=schema))
    assert result.values.to_pylist() == ['{"a": 1}'] and result.objects == [{"a": 1}]


@pytest.mark.parametrize(
    "options", [{"choices": ["yes", "no"]}, {"output": Output(choices=("yes", "no"))}]
)
def test_choices_are_the_only_answers(options: dict[str, Any]) -> None:
    table = pa.table({"n": [1, 2]})
    result, engine = ask(table, lambda row: "yes" if row["n"] == 1 else "maybe", **options)
    assert result.values.to_pylist() == ["yes", None]
    assert "Answer with one of: yes, no." in engine.messages[0]


def test_a_table_of_one_column_that_is_all_missing() -> None:
    for make in KINDS.values():
        for column in (pa.nulls(3), pa.nulls(3, pa.string()), pa.nulls(3, pa.list_(pa.int64()))):
            result, engine = ask(make(pa.table({"a": column})))
            assert listed(result.values) == [None] * 3
            assert not engine.messages and not result.errors
            assert result.report.num_null == 1


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_table_without_rows_asks_nothing(kind: str) -> None:
    table = pa.table({name: pa.array([], type) for name, type in TYPES.items()})
    result, engine = ask(KINDS[kind](table), output=int)
    assert listed(result.values) == [] and not engine.messages and not result.errors
    assert len(KINDS[kind](table)) == len(result.values)


def test_a_result_is_a_list_that_shows_itself() -> None:
    def answer(row: Row) -> str:
        if row["n"] == 1:
            raise Refusal("too long " * 100)
        return json.dumps({"n": row["n"], "text": "x" * 10_000})

    result, _ = ask(pa.table({"n": list(range(12))}), answer, output="json")
    assert len(result) == 12 and list(result) == result.objects
    assert result[0]["n"] == 0 and result[1] is None
    lines = repr(result).split("\n")
    assert lines[0] == "12 answers, 1 errors"
    assert lines[2].startswith("     1  None  # too long too long")
    assert len(lines) == 12 and lines[-1].strip() == "..."
    assert max(map(len, lines)) < 150


def test_texts_that_were_cut_are_told_by_row() -> None:
    class Cutting(RecordingEngine):
        def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
            for each in super().generate(prompts, question):
                yield replace(each, is_cut="2" in each.text, num_output_tokens=9)

    result = llm_map(pa.table({"n": [1, 2, 2, 3]}), "?", engine=Cutting(), on_error="raise")
    assert result.cut_rows == [1, 2] and result.missing_rows == []
    assert list(result.errors) == [1, 2] and "cut after 9 tokens" in result.errors[1]
    assert result.values.to_pylist()[1] == '{"n": 2}'
    assert result.report.num_cut == 2


def test_rules_and_templates_are_used() -> None:
    table = pa.table({"t": ["A", "a ", "b"]})
    template = PromptTemplate(before="{question}{names}{answer}!\n\n")
    result, engine = ask(table, rules=["strip", "casefold"], template=template)
    assert len(engine.messages) == 2 and engine.messages[0].startswith("What is it?!")
    assert result.values.to_pylist()[0] == result.values.to_pylist()[1]


def test_a_budget_ends_the_job_and_a_checkpoint_goes_on(tmp_path: Path) -> None:
    table = pa.table({"n": list(range(20))})
    options: dict[str, Any] = {"checkpoint": str(tmp_path / "answers.db"), "max_tokens": 1}
    with pytest.raises(MapBudgetError):
        ask(table, max_total_tokens=120, **options)
    result, engine = ask(table, **options)
    assert 0 < len(engine.messages) < 20
    assert result.report.num_known == 20 - len(engine.messages)
    assert result.objects == [json.dumps({"n": number}) for number in range(20)]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("on_error", ["null", "raise"])
def test_a_spent_budget_leaves_the_answers_that_came(kind: str, on_error: Any) -> None:
    table = KINDS[kind](pa.table({"n": [*range(20), 0, 19]}))
    options: dict[str, Any] = {"max_tokens": 1, "max_total_tokens": 120, "on_error": on_error}
    with pytest.raises(MapBudgetError, match="in this error's result and nowhere") as raised:
        ask(table, lambda row: str(row["n"]), output=int, order="keep", **options)
    assert "give a checkpoint" in str(raised.value)
    result = raised.value.result
    values = listed(result.values)
    num_done = values.index(None)
    assert 0 < num_done < 19
    assert values == [*range(num_done), *[None] * (20 - num_done), 0, None]
    assert set(result.errors) == {*range(num_done, 20), 21}
    assert set(result.errors.values()) == {"not asked: the budget of 120 tokens is spent"}
    assert result.report.num_errors == len(result.errors)
    assert f"{num_done} of 20 different rows are done" in str(raised.value)


def test_a_budget_for_nothing_leaves_no_answers() -> None:
    with pytest.raises(MapBudgetError) as raised:
        ask(pa.table({"n": [1, 2]}), max_total_tokens=1)
    result = raised.value.result
    assert result.objects == [None, None] and list(result.errors) == [0, 1]


def test_a_spent_budget_leaves_what_rules_made_equal() -> None:
    words = [word for number in range(20) for word in (f"w{number}", f"W{number}")]
    with pytest.raises(MapBudgetError) as raised:
        ask(pa.table({"t": words}), rules=["casefold"], max_tokens=1, max_total_tokens=120)
    assert raised.value.result.report.num_by_rules == 20


def test_a_spent_budget_names_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    table = pa.table({"n": list(range(20))})
    with pytest.raises(MapBudgetError, match="answers.db keeps them: raise max") as raised:
        ask(table, checkpoint=path, max_tokens=1, max_total_tokens=120)
    assert raised.value.result.errors
    assert "nowhere else" not in str(raised.value)


def test_an_engine_goes_on_after_a_job() -> None:
    engine = RecordingEngine()
    for _ in range(2):
        llm_map(pa.table({"a": [1]}), "What is it?", engine=engine)
    assert engine.num_closed == 0


def test_rows_come_to_the_job_in_the_tables_order() -> None:
    numbers = [(7 * i) % 50_021 for i in range(50_000)]
    result, engine = ask(pa.table({"n": numbers}), lambda row: str(row["n"]), order="keep",
                         output=int)  # fmt: skip
    assert [message.rpartition(" ")[2] for message in engine.messages] == list(map(str, numbers))
    assert result.values.to_pylist() == numbers
