# SPDX-License-Identifier: Apache-2.0
"""Which columns tables may have, and which of them are asked about."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import uuid
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from tests.tables.asked_tables import KINDS, ask, listed
from tests.tables.recording_engine import RecordingEngine
from vllm_relay.tables import Output, llm_agg, llm_map


@pytest.mark.parametrize(
    ("prompt", "fields", "expected"),
    [
        ("Which?", None, ["b", "a", "c"]),
        ("Which {c} of {a}?", None, ["c", "a"]),
        ("Which {c}?", ["a", "c"], ["a", "c"]),
        ("Which?", "a", ["a"]),
    ],
)
def test_fields_are_those_asked_for(prompt: str, fields: Any, expected: list[str]) -> None:
    engine = RecordingEngine()
    table = pa.table({"b": ["B"], "a": ["A"], "c": ["C"]})
    llm_map(table, prompt, fields, engine=engine, order="keep")
    lines = engine.messages[0].partition("\n\n")[2].split("\n")
    assert lines == [f'"{name}": "{name.upper()}"' for name in expected]


def test_rows_that_differ_elsewhere_are_asked_once() -> None:
    table = pa.table({"a": [1, 1, 2], "b": [1, 2, 3]})
    result, engine = ask(table, fields=["a"])
    assert len(engine.messages) == 2
    assert result.values.to_pylist() == ['{"a": 1}', '{"a": 1}', '{"a": 2}']


def test_fields_may_have_almost_any_name() -> None:
    names = ["r", "a", "A", "rows", "select", 'with "quotes"', "with space", "answers", "{braces}",
             "ä", "c0", "value", "given", "relay_answer", "Relay_Error", "number"]  # fmt: skip
    table = pa.table({name: [f"{name} 1", f"{name} 2"] for name in names})
    result, _ = ask(table)
    assert [json.loads(value) for value in result.values.to_pylist()] == table.to_pylist()


NAN = math.nan
BERLIN = datetime.timezone(datetime.timedelta(hours=1))


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        (pa.array([0.1, 2.0, None, NAN], pa.float32()), [0.1, 2.0, None, NAN]),
        (pa.array([0.5, NAN, NAN], pa.float16()), [0.5, NAN, NAN]),
        (pa.array([[NAN], [NAN], [None]]), [[NAN], [NAN], [None]]),
        (pa.array([decimal.Decimal("1.10"), None]), [1.1, None]),
        (pa.array(["x", "y", "x", None]).dictionary_encode(), ["x", "y", "x", None]),
        (pa.array(["x"], pa.large_string()), ["x"]),
        (pa.array(["x"], pa.string_view()), ["x"]),
        (pa.array([2**64 - 1], pa.uint64()), [2**64 - 1]),
        (
            pa.array([datetime.datetime(2020, 1, 1, 1, tzinfo=BERLIN)], pa.timestamp("us", "CET")),
            ["2020-01-01 00:00:00+00"],
        ),
        (pa.array([1, 1000000001], pa.timestamp("ns")),
         ["1970-01-01 00:00:00.000000001", "1970-01-01 00:00:01.000000001"]),
        (pa.array([datetime.time(3, 4)]), ["03:04:00"]),
        (pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int8())), [{"k": 1}, {}]),
        (pa.array([{"a": [{"b": "c"}]}]), [{"a": [{"b": "c"}]}]),
        (pa.array([uuid.UUID(int=1).bytes], pa.uuid()), [str(uuid.UUID(int=1))]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)  # fmt: skip
def test_types_of_columns(column: pa.Array, shown: list[Any]) -> None:
    result, engine = ask(pa.table({"v": column, "w": [1] * len(column)}))
    answers = [json.loads(value)["v"] for value in result.values.to_pylist()]
    assert json.dumps(answers) == json.dumps(shown)  # NaN is not equal to itself
    assert len(engine.messages) == len({json.dumps(value) for value in shown})


def test_decimals_keep_their_digits() -> None:
    _, engine = ask(pa.table({"v": [decimal.Decimal("12345678901234567890.10")]}))
    assert engine.messages[0].endswith('"v": 12345678901234567890.10')


def test_columns_of_pandas() -> None:
    frame = pd.DataFrame(
        {
            "category": pd.Categorical(["x", None, "x"]),
            "nullable": pd.array([1, None, 1], "Int64"),
            "missing": [1.5, NAN, 1.5],
            "time": pd.to_datetime(["2020-01-01", None, "2020-01-01"]),
            "span": pd.to_timedelta(["1h", None, "1h"]),
            "object": [{"a": 1}, None, {"a": 1}],
            "arrow": pd.array(["x", None, "x"], pd.ArrowDtype(pa.string())),
            "sparse": pd.arrays.SparseArray([1.5, NAN, 1.5]),
            "whole": [2, 2, 2],
        }
    )
    result, engine = ask(frame)
    first = {"category": "x", "nullable": 1, "missing": 1.5, "time": "2020-01-01 00:00:00",
             "span": "01:00:00", "object": {"a": 1}, "arrow": "x", "sparse": 1.5,
             "whole": 2}  # fmt: skip
    rows = [first, {**dict.fromkeys(first), "whole": 2}, first]
    assert [json.loads(value) for value in result.values] == rows
    assert len(engine.messages) == 2


def test_columns_of_polars() -> None:
    frame = pl.DataFrame(
        {
            "category": pl.Series(["x", None, "x"], dtype=pl.Categorical),
            "enum": pl.Series(["y", None, "y"], dtype=pl.Enum(["y", "z"])),
            "nan": [NAN, None, NAN],
            "list": [[1], None, [1]],
            "whole": [2, 2, 2],
        }
    )
    result, engine = ask(frame)
    first = {"category": "x", "enum": "y", "nan": NAN, "list": [1], "whole": 2}
    rows = [first, {**dict.fromkeys(first), "whole": 2}, first]
    answers = [json.loads(value) for value in result.values]
    assert json.dumps(answers) == json.dumps([dict(sorted(row.items())) for row in rows])
    assert len(engine.messages) == 2


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("name", ["Wildlife Species", "Größe", "a.b", "2nd", 'say "x"'])
def test_the_prompt_names_columns_of_any_name(kind: str, name: str) -> None:
    table = KINDS[kind](pa.table({name: ["owl", "owl", "hen"], "id": [1, 2, 3]}))
    engine = RecordingEngine()
    result = llm_map(table, f"Is {{{name}}} a raptor?", engine=engine)
    assert len(engine.messages) == 2
    assert [json.loads(each) for each in listed(result.values)] == [
        {name: "owl"}, {name: "owl"}, {name: "hen"}
    ]  # fmt: skip


def test_texts_that_cannot_be_utf8_are_named_by_row_and_column() -> None:
    bad = pd.Series(["ä", "b\ud800" + "c" * 1000, "d"], dtype=object)
    frame = pd.DataFrame({"id": [1, 2, 3], "bad": bad})
    engine = RecordingEngine()
    with pytest.raises(ValueError, match="column 'bad' .* in row 1: 'b.ud800") as raised:
        llm_map(frame, "?", engine=engine)
    assert len(str(raised.value)) < 700
    assert not engine.messages


PAIR = pa.table({"a": [1], "b": [[1]]})


@pytest.mark.parametrize(
    ("table", "options", "error", "message"),
    [
        ({"a": [1]}, {}, TypeError, "builtins.dict given, expected a pandas"),
        (pl.LazyFrame({"a": [1]}), {}, TypeError, "give table.collect"),
        (pa.table({}), {}, ValueError, "without columns"),
        (pd.DataFrame(), {}, ValueError, "without columns"),
        (PAIR, {"fields": ["c"]}, ValueError, "'c' given, which is no column .*'a', 'b'"),
        (PAIR, {"fields": []}, ValueError, "no fields"),
        (PAIR, {"fields": ["a", "a"]}, ValueError, "given twice"),
        (PAIR, {"fields": ["a", 3]}, TypeError, r"fields with \[3\] given"),
        (PAIR, {"reorder": ["a"]}, ValueError, "of type int64, expected a column of lists"),
        (PAIR, {"reorder": ["c"]}, ValueError, "names .'c'."),
        (PAIR, {"order": "best"}, ValueError, "order='best'"),
        (PAIR, {"rules": ["upper"]}, ValueError, "upper"),
        (PAIR, {"on_error": "stop"}, ValueError, "on_error='stop'"),
        (PAIR, {"output": list}, TypeError, "output=<class 'list'>"),
        (PAIR, {"output": "date"}, ValueError, "'date'"),
        (PAIR, {"output": int, "choices": ["1"]}, ValueError, "choices are texts"),
        (PAIR, {"output": Output(), "choices": ["1"]}, ValueError, "beside an Output"),
        (PAIR, {"choices": "yes"}, TypeError, "expected a list of texts"),
        (PAIR, {"choices": [1, 2]}, ValueError, r"expected texts: give \['1', '2'\]"),
        (PAIR, {"max_tokens": 0}, ValueError, "max_tokens=0"),
        (PAIR, {"bucket_rows": 0}, ValueError, "bucket_rows=0"),
        (pd.DataFrame([[1, 2]]), {}, ValueError, r"columns \[0, 1\] have names that are not"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), {}, ValueError, "twice"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), {"fields": "a"}, ValueError, "2 columns"),
        (pa.table({"": [1]}), {}, ValueError, "without a name"),
        (pa.table({"a": [b"x"]}), {}, ValueError, "decode them"),
        (pa.table({"a": [[b"x"]]}), {}, ValueError, "decode them"),
        (pa.table({"a": pa.array([1], pa.decimal256(50))}), {}, ValueError, "decimal128"),
        (pd.DataFrame({"a": [1, "x"]}), {}, ValueError, "in one type"),
        (pd.DataFrame({"a": [object()]}), {}, ValueError, "in one type"),
        (pd.DataFrame({"a": [1 + 2j]}), {}, ValueError, "in one type"),
        (pd.DataFrame({"a": pd.period_range("2020", periods=1)}), {}, ValueError, "no text"),
        (pd.DataFrame({"a": pd.cut([1, 2], 2)}), {}, ValueError, "no text"),
        (pl.DataFrame({"a": [object()]}), {}, ValueError, "Python objects"),
        (pl.DataFrame({"a": [2**100]}), {}, ValueError, "in one type"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_asked(
    table: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine = RecordingEngine()
    with pytest.raises(error, match=message):
        llm_map(table, "Which?", engine=engine, **options)
    assert not engine.messages


def test_other_columns_do_not_matter() -> None:
    frame = pd.DataFrame([[1, 2, 3, b"x"]], columns=["a", "b", "b", 7])
    result, _ = ask(frame, fields=["a"])
    assert result.values.tolist() == ['{"a": 1}']


def test_a_prompt_of_unknown_placeholders_is_refused() -> None:
    with pytest.raises(ValueError, match="'title' given, which is no column"):
        llm_map(PAIR, "Is {title} good?", engine=RecordingEngine())


@pytest.mark.parametrize("prompt", ["Is {a good?", "Is a} good?"])
@pytest.mark.parametrize("ask_of", [llm_map, llm_agg])
def test_a_forgotten_brace_does_not_ask_about_all_columns(ask_of: Any, prompt: str) -> None:
    engine = RecordingEngine()
    with pytest.raises(ValueError, match="without its"):
        ask_of(pa.table({"a": ["x"], "b": ["y"]}), prompt, engine=engine)
    assert not engine.messages


def test_lists_may_be_reordered() -> None:
    table = pa.table({"q": ["1", "2"], "passages": [["a", "b"], ["b", "a"]]})
    result, engine = ask(table, fields=["passages"], reorder="passages")
    assert len(engine.messages) == 1 and len(result.values) == 2
