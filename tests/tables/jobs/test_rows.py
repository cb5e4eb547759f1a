# SPDX-License-Identifier: Apache-2.0
"""Every distinct row is asked once, with its own fields, and gets its own answer."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from tests.tables.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from tests.tables.fake_engine import FakeEngine
from tests.tables.jobs.job_cases import NUMBERS, NUMBERS_SQL, answered, numbers_table, runner
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.question import Question

TEXTS = st.one_of(
    st.sampled_from(
        ["null", "", "NULL", "a", "A", ' "', "\n", "\\", "a\n\n", "{x}", "[1]", "ß", "é"]
    ),
    st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6),
)
FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e22, 0.1]),
    st.floats(allow_nan=False),
)
DECIMALS = st.decimals(-(10**20), 10**20, places=4)
DATES = st.dates(datetime.date(1900, 1, 1), datetime.date(2100, 1, 1))
CELLS: dict[str, st.SearchStrategy[Any]] = {
    "VARCHAR": TEXTS,
    "BIGINT": st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 3),
    "DOUBLE": FLOATS,
    "DATE": DATES,
    "BOOLEAN": st.booleans(),
    "BLOB": st.binary(max_size=3),
    "DECIMAL(30,4)": DECIMALS,
    "VARCHAR[]": st.lists(TEXTS, max_size=3),
    "STRUCT(a BIGINT, b VARCHAR)": st.fixed_dictionaries(
        {"a": st.none() | st.integers(0, 2), "b": TEXTS}
    ),
}
NAMES = ["a", "number", "num_rows", "field_0", "place", "relay number", 'say "x"', "näme", "select"]


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[str, str], list[tuple[Any, ...]]]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    types = {name: draw(st.sampled_from(list(CELLS))) for name in names}
    # few values, so that rows share some
    pools = [
        draw(st.lists(st.none() | CELLS[types[name]], min_size=1, max_size=3)) for name in names
    ]
    row = st.tuples(*(st.sampled_from(pool) for pool in pools))
    return types, draw(st.lists(row, max_size=12))


def load(types: dict[str, str], rows: Sequence[tuple[Any, ...]]) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    columns = ", ".join(f"{quoted(name)} {type}" for name, type in types.items())
    connection.execute(f"CREATE TABLE t ({columns})")
    for row in rows:
        connection.execute(f"INSERT INTO t VALUES ({', '.join('?' * len(row))})", row)
    return connection


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@settings(max_examples=cases(15))
@given(
    table=tables(),
    order=st.sampled_from(["auto", "keep", "fixed", "per_row"]),
    bucket_rows=st.sampled_from([1, 2, 5, 1000]),
    with_sets=st.booleans(),
)
def test_rows_get_the_answers_to_their_fields(
    table: tuple[dict[str, str], list[tuple[Any, ...]]],
    order: str,
    bucket_rows: int,
    with_sets: bool,
) -> None:
    types, rows = table
    connection = load(types, rows)
    sets = tuple(name for name, type in types.items() if with_sets and type.endswith("[]"))
    question = Question("What?", tuple(types), set_fields=sets)
    engine = FakeEngine(tokenizer=TOKENIZER)
    runner(connection, engine, order=order, bucket_rows=bucket_rows).answer(
        "SELECT * FROM t -- all", question, "out"
    )
    names = ", ".join(map(quoted, types))
    jsons = ", ".join(f"coalesce(to_json({quoted(name)})::VARCHAR, 'null')" for name in types)
    # what a plain query finds in each row, and what the job says of it
    joined = " AND ".join(f"t.{quoted(n)} IS NOT DISTINCT FROM out.{quoted(n)}" for n in types)
    found = connection.execute(
        f"SELECT {', '.join(f't.{quoted(n)}' for n in types)}, relay_answer, relay_error "
        f"FROM t LEFT JOIN out ON {joined}"
    ).fetchall()
    assert len(found) == len(rows)
    expected = {
        canonical(row, types, sets)
        for row in connection.execute(f"SELECT {jsons} FROM t").fetchall()
        if set(row) != {"null"}
    }
    answers = [row[-2] for row in found if row[-2] is not None]
    assert {canonical(answer_values(each, types), types, sets) for each in answers} == expected
    own = connection.execute(
        f"SELECT {jsons.replace('to_json(', 'to_json(out.')}, relay_answer, relay_error FROM out"
    ).fetchall()
    for *values, answer, error in own:
        assert error is None
        if set(values) == {"null"}:
            assert answer is None
            continue
        assert canonical(values, types, sets) == canonical(
            answer_values(answer, types), types, sets
        )
    distinct = connection.execute(f"SELECT count(*) FROM (SELECT {names} FROM t GROUP BY ALL)")
    assert distinct.fetchone() == (len(own),)
    assert len(engine.prompts) == len({each.message for each in engine.prompts}) <= len(own)
    assert len(engine.prompts) == len(expected)
    for prompt in engine.prompts:
        assert prompt.token_ids == TOKENIZER(prompt.message)["input_ids"]


TOKENIZER = byte_tokenizer()


def answer_values(answer: str, types: dict[str, str]) -> list[str]:
    fields = json.loads(answer)
    return [fields[name] for name in types]


def canonical(values: Sequence[str], types: dict[str, str], sets: Sequence[str]) -> tuple[str, ...]:
    """JSON texts; those of sets in one order, zeros without a sign (they are equal in SQL)."""
    found = []
    for name, value in zip(types, values, strict=True):
        if name in sets and value != "null":
            value = json.dumps(sorted(json.loads(value), key=repr))
        found.append("0.0" if value == "-0.0" and types[name] == "DOUBLE" else value)
    return tuple(found)


def test_the_prompt_is_what_the_tokenizer_makes_of_the_templated_text() -> None:
    tokenizer = byte_tokenizer(CHAT_TEMPLATE)
    engine = FakeEngine(tokenizer=tokenizer)
    connection = numbers_table(300)
    question = Question("  Which {kind}?", ("id", "kind"))
    runner(connection, engine).answer(NUMBERS_SQL, question, "out")
    assert len(engine.prompts) == 300
    for prompt in engine.prompts:
        turns = [{"role": "user", "content": prompt.message}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert prompt.token_ids == expected
        assert prompt.message.count("kind") == 3  # in the question, a name and a value


def test_values_that_look_like_others_stay_apart() -> None:
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t AS SELECT unnest([NULL, 'null', '', '\"', ' ']) AS a")
    engine = FakeEngine()
    runner(connection, engine).answer("FROM t", Question("What?", ("a",)), "out")
    (null, *others) = answered(connection)
    assert null == (None, None, None)
    assert [json.loads(answer)["a"] for _, answer, _ in others] == [
        '"null"',
        '""',
        '"\\""',
        '" "',
    ]


def test_rows_come_in_the_order_in_which_they_first_appear() -> None:
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t AS SELECT unnest([3, 1, 3, 2, 1]) AS a")
    job = runner(connection, FakeEngine(), order="per_row", bucket_rows=1)
    job.answer("FROM t", Question("What?", ("a",)), "out")
    assert [row[0] for row in answered(connection)] == [3, 1, 2]
    assert (job.report.num_rows, job.report.num_prompts) == (5, 3)


def test_rules_ask_rows_that_they_make_equal_once() -> None:
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t AS SELECT unnest(['A', 'a', 'a', ' a', 'b', NULL]) AS a")
    engine = FakeEngine()
    job = runner(connection, engine, rules=("strip", "casefold"))
    job.answer("FROM t", Question("What?", ("a",)), "out")
    answers = {row[0]: row[1] and json.loads(row[1])["a"] for row in answered(connection)}
    assert answers == {"A": '"A"', "a": '"A"', " a": '"A"', "b": '"b"', None: None}
    assert len(engine.prompts) == job.report.num_prompts == 2
    assert job.report.num_null == 1
    assert job.report.num_by_rules == 2
    of_a = -(-len(engine.prompts[0].message) // 4) + engine.num_answer_tokens
    assert job.report.saved_tokens == 3 * of_a


@pytest.mark.parametrize("bucket_rows", [1, 2, 3, 100])
def test_rows_that_are_equal_for_the_prompt_are_asked_once_in_all_buckets(bucket_rows: int) -> None:
    connection = duckdb.connect()
    connection.execute(
        "CREATE TABLE t AS SELECT unnest([['A'], ['x', 'y'], ['y', 'x'], ['B'], NULL]) AS a, "
        "unnest(['z ', 'q', 'q', 'z', 'Z']) AS b"
    )
    engine = FakeEngine()
    question = Question("What?", ("a", "b"), set_fields=("a",))
    job = runner(connection, engine, rules=("strip", "casefold"), bucket_rows=bucket_rows)
    job.answer("SELECT * FROM t UNION ALL SELECT a, b || ' ' FROM t", question, "out")
    assert len(engine.prompts) == job.report.num_prompts == 4
    rows = answered(connection)
    assert len(rows) == 10 and all(error is None for *_, error in rows)
    told: dict[str, set[str]] = {}
    for words, _, answer, _ in rows:
        told.setdefault(str(words and sorted(words)), set()).add(answer)
    assert [len(answers) for answers in told.values()] == [1, 1, 1, 1]
    assert job.report.num_by_rules == 4


def test_rows_of_nulls_are_not_asked_about_and_have_no_answer() -> None:
    connection = duckdb.connect()
    connection.execute(
        "CREATE TABLE t AS SELECT unnest([NULL, 1, NULL]) AS a, unnest([NULL, NULL, 'x']) AS b"
    )
    engine = FakeEngine()
    job = runner(connection, engine)
    question = Question("What?", ("a", "b"))
    assert job.estimate("FROM t", question).num_prompts == 2
    job.answer("FROM t", question, "out")
    rows = answered(connection)
    assert rows[0] == (None, None, None, None)
    assert all(row[2] is not None for row in rows[1:])
    assert len(engine.prompts) == job.report.num_prompts == 2
    assert (job.report.num_null, job.report.num_errors) == (1, 0)


def test_many_rows_that_rules_make_equal_take_no_longer_each() -> None:
    connection = duckdb.connect()
    connection.execute(
        "CREATE TABLE t AS SELECT repeat(' ', i::INT % 150) || 'a' || repeat(' ', i::INT // 150) "
        "AS a FROM range(20000) AS numbers(i)"
    )
    engine = FakeEngine()
    runner(connection, engine, rules=("strip",)).answer("FROM t", Question("What?", ("a",)), "out")
    assert len(engine.prompts) == 1
    assert len(answered(connection)) == 20000


def test_different_values_with_the_same_json_are_asked_together() -> None:
    connection = duckdb.connect()
    connection.execute(
        "CREATE TABLE t AS SELECT unnest([NULL::JSON, 'null'::JSON, '1'::JSON]) AS a, 2 AS b"
    )
    engine = FakeEngine()
    runner(connection, engine).answer("FROM t", Question("What?", ("a", "b")), "out")
    assert [json.loads(row[2])["a"] for row in answered(connection)] == ["null", "null", "1"]
    assert len(engine.prompts) == 2


def test_an_empty_table_has_no_answers() -> None:
    connection = numbers_table(0)
    job = runner(connection, FakeEngine())
    job.answer(NUMBERS_SQL, NUMBERS, "out")
    assert answered(connection) == []
    assert job.report.num_prompts == 0
    assert job.estimate(NUMBERS_SQL, NUMBERS).seconds == 0


def test_sets_become_prompts_with_common_beginnings() -> None:
    connection = duckdb.connect()
    connection.execute(
        "CREATE TABLE t AS SELECT unnest([['b', 'x'], ['x', 'a'], ['c', 'x'], ['x', 'b']]) AS tags"
    )
    engine = FakeEngine(cache=BlockCache(16))
    question = Question("What?", ("tags",), set_fields=("tags",))
    runner(connection, engine).answer("FROM t", question, "out")
    answers = [json.loads(row[1])["tags"] for row in answered(connection)]
    assert answers == ['["x", "b"]', '["x", "a"]', '["x", "c"]', '["x", "b"]']
    assert len(engine.prompts) == 3


def test_elements_of_sets_stay_as_they_are_written() -> None:
    connection = duckdb.connect()
    connection.execute(
        "CREATE TABLE t AS SELECT [0.1000000000000000000001::DECIMAL(38,30)] AS a, "
        "[{'k': [1, 2], 's': ' , ]'}] AS b"
    )
    question = Question("What?", ("a", "b"), set_fields=("a", "b"))
    runner(connection, FakeEngine()).answer("FROM t", question, "out")
    row = answered(connection)[0]
    expected = connection.execute("SELECT to_json(a)::VARCHAR, to_json(b)::VARCHAR FROM t")
    assert tuple(json.loads(row[2]).values()) == expected.fetchone()


def test_numbers_of_single_precision_are_as_they_are_written() -> None:
    connection = duckdb.connect()
    engine = FakeEngine()
    source = "SELECT unnest([0.1, 16777216, -2.5e-7, NULL])::FLOAT AS a, 1 AS b"
    runner(connection, engine).answer(source, Question("What?", ("a", "b")), "out")
    answers = [json.loads(row[2])["a"] for row in answered(connection)]
    assert answers == ["0.1", "16777216.0", "-2.5e-7", "null"]


def test_rows_are_equal_if_their_prompts_are() -> None:
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t (a VARCHAR COLLATE NOCASE, b DOUBLE)")
    connection.execute("INSERT INTO t VALUES ('Yes', 0), ('YES', 0), ('Yes', '-0.0'), ('Yes', 0)")
    engine = FakeEngine()
    runner(connection, engine).answer("FROM t", Question("What?", ("a", "b")), "out")
    assert len(engine.prompts) == 3
    answers = [json.loads(row[-2]) for row in answered(connection)]
    assert answers == [
        {"a": '"Yes"', "b": "0.0"},
        {"a": '"YES"', "b": "0.0"},
        {"a": '"Yes"', "b": "-0.0"},
    ]
