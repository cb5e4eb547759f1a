# SPDX-License-Identifier: Apache-2.0
"""llm_agg() gives what a function of the list of a group's records would."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from tests.tables.recording_engine import RecordingEngine, Refusal, Row
from tests.tables.semantic.agg_cases import counting_engine, is_combining, records_of, summed
from tests.tables.sql.fake_runner import FakeRunner, hashed_answer
from vllm_relay.tables import JobOptions, connect, llm_agg
from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import Question
from vllm_relay.tables.semantic.record_lists import record_question
from vllm_relay.tables.sql import AnswerFailedError, Connection, SqlError

ASK = "llm('t', {title})"
# a statement, and the same with oracle() and plain() as functions of DuckDB
STATEMENTS = [
    (
        "SELECT type, llm_agg('q', {id, title}) AS a FROM movies GROUP BY type ORDER BY type",
        "SELECT type, oracle(list_sort(list({id: id, title: title}))) AS a FROM movies "
        "GROUP BY type ORDER BY type",
    ),
    (
        "SELECT llm_agg('q', {id, title} ORDER BY score DESC NULLS LAST) FROM movies",
        "SELECT oracle(list({id: id, title: title} ORDER BY score DESC NULLS LAST, id)) "
        "FROM movies",
    ),
    (
        "SELECT type, llm_agg('q', {id, title}) FILTER (WHERE score > 2) || '!' AS a FROM movies "
        "GROUP BY ALL HAVING a IS NULL OR count(*) > 1 ORDER BY ALL",
        "SELECT type, oracle(list_sort(list({id: id, title: title}) FILTER (WHERE score > 2))) "
        "|| '!' AS a FROM movies GROUP BY ALL HAVING a IS NULL OR count(*) > 1 ORDER BY ALL",
    ),
    (
        "SELECT llm_agg(DISTINCT 'q', {title: info}) FROM movies",
        "SELECT oracle(list_sort(list(DISTINCT {title: info}))) FROM movies",
    ),
    (
        "SELECT id, llm_agg('q', {id, title}) OVER (PARTITION BY type ORDER BY id) AS a "
        "FROM movies ORDER BY id",
        "SELECT id, oracle(list_sort(list({id: id, title: title}) OVER (PARTITION BY type "
        "ORDER BY id))) AS a FROM movies ORDER BY id",
    ),
    (
        "SELECT id, llm_agg('q', {id, title}) FILTER (WHERE score > 2) OVER w AS a FROM movies "
        "WINDOW w AS (PARTITION BY type) QUALIFY a IS NOT NULL ORDER BY id",
        "SELECT id, oracle(list_sort(list({id: id, title: title}) FILTER (WHERE score > 2) "
        "OVER w)) AS a FROM movies WINDOW w AS (PARTITION BY type) QUALIFY a IS NOT NULL "
        "ORDER BY id",
    ),
    (
        "SELECT type FROM movies GROUP BY type HAVING llm_agg('q', {id, title}) > 't2' ORDER BY 1",
        "SELECT type FROM movies GROUP BY type "
        "HAVING oracle(list_sort(list({id: id, title: title}))) > 't2' ORDER BY 1",
    ),
    (
        "SELECT m.id, (SELECT llm_agg('q', {r.body, r.stars}) FROM reviews r WHERE r.id = m.id) "
        "AS a FROM movies m ORDER BY m.id",
        "SELECT m.id, (SELECT oracle(list_sort(list({body: r.body, stars: r.stars}))) "
        "FROM reviews r WHERE r.id = m.id) AS a FROM movies m ORDER BY m.id",
    ),
    (
        "SELECT t.a, m.id FROM (SELECT type, llm_agg('q', {id, title}) AS a FROM movies "
        "GROUP BY type) t JOIN movies m USING (type) WHERE m.id < 4 ORDER BY m.id",
        "SELECT t.a, m.id FROM (SELECT type, oracle(list_sort(list({id: id, title: title}))) AS a "
        "FROM movies GROUP BY type) t JOIN movies m USING (type) WHERE m.id < 4 ORDER BY m.id",
    ),
    (
        "SELECT a FROM (SELECT llm_agg('q', {id, title}) AS a FROM movies) WHERE a <> ''",
        "SELECT oracle(list_sort(list({id: id, title: title}))) AS a FROM movies",
    ),
    (
        "SELECT type, count(*), llm_agg('q', {id, title}) AS a FROM movies GROUP BY type "
        "ORDER BY a, type LIMIT 2",
        "SELECT type, count(*), oracle(list_sort(list({id: id, title: title}))) AS a FROM movies "
        "GROUP BY type ORDER BY a, type LIMIT 2",
    ),
    (
        f"SELECT type, llm_agg('q', {{id, title: {ASK}}}) AS a FROM movies GROUP BY 1 ORDER BY 1",
        "SELECT type, oracle(list_sort(list({id: id, title: plain(title)}))) AS a FROM movies "
        "GROUP BY 1 ORDER BY 1",
    ),
    (
        f"SELECT type, llm_agg('q', {{id, title}} ORDER BY {ASK} DESC) FILTER (WHERE {ASK} > 't1') "
        "AS a FROM movies GROUP BY type ORDER BY type",
        "SELECT type, oracle(list({id: id, title: title} ORDER BY plain(title) DESC, id) "
        "FILTER (WHERE plain(title) > 't1')) AS a FROM movies GROUP BY type ORDER BY type",
    ),
    (
        "SELECT type, llm('t', {title: llm_agg('q', {id, title})}) AS a FROM movies GROUP BY type "
        "ORDER BY type",
        "SELECT type, plain(oracle(list_sort(list({id: id, title: title})))) AS a FROM movies "
        "GROUP BY type ORDER BY type",
    ),
    (
        "SELECT llm_agg('q', * ORDER BY id DESC) FROM (SELECT id, title FROM movies)",
        "SELECT oracle(list({id: id, title: title} ORDER BY id DESC)) FROM movies",
    ),
    (
        "SELECT llm_agg('q', {id, title}) FROM movies WHERE id > 100",
        "SELECT oracle(list({id: id, title: title})) FROM movies WHERE id > 100",
    ),
    (
        "SELECT CASE WHEN count(*) > 2 THEN \"llm_agg\"('q', {id, title}) END AS a FROM movies "
        "GROUP BY type ORDER BY type",
        "SELECT CASE WHEN count(*) > 2 THEN oracle(list_sort(list({id: id, title: title}))) END "
        "AS a FROM movies GROUP BY type ORDER BY type",
    ),
]


def answer_of_list(records: str | None) -> str | None:
    if records is None:
        return None
    question = record_question("q", ["id", "title", "body", "stars"], Output())
    return hashed_answer(question, {"records": records})


def answer_of_title(title: str | None) -> str | None:
    if title is None:
        return None
    return hashed_answer(Question("t", ("title",)), {"title": title})


def answer(question: Question, fields: dict[str, object]) -> object:
    """NULL for NULL, as jobs have it."""
    return None if set(fields.values()) == {None} else hashed_answer(question, fields)


@pytest.fixture
def oracle(connection: duckdb.DuckDBPyConnection) -> duckdb.DuckDBPyConnection:
    connection.create_function(
        "of_list", answer_of_list, ["VARCHAR"], "VARCHAR", null_handling="special"
    )
    connection.create_function(
        "plain", answer_of_title, ["VARCHAR"], "VARCHAR", null_handling="special"
    )
    connection.execute("CREATE MACRO oracle(l) AS of_list(to_json(l)::VARCHAR)")
    return connection


@pytest.mark.parametrize(("text", "expected"), STATEMENTS)
def test_statements_give_what_a_function_of_the_list_gives(
    oracle: duckdb.DuckDBPyConnection, text: str, expected: str
) -> None:
    rows = Connection(oracle, FakeRunner(oracle, answer)).sql(text)
    assert rows is not None
    assert rows.fetchall() == oracle.sql(expected).fetchall()


def test_records_of_parallel_scans_are_the_same_each_time(
    connection: duckdb.DuckDBPyConnection,
) -> None:
    connection.execute("SET threads = 8")
    connection.execute("CREATE TABLE many AS SELECT range AS n FROM range(400000)")
    runner = FakeRunner(connection, answer)
    text = "SELECT n % 200 AS k, llm_agg('q', {n, even: n % 2 = 0} ORDER BY n % 7) FROM many"
    text = f"{text} WHERE n % 100 < 30 GROUP BY k"
    assert len(Connection(connection, runner).sql(text).fetchall()) == 60
    assert len(runner.asked) == 60
    records = json.loads(runner.asked[0][1]["records"])
    assert records == sorted(records, key=lambda each: (each["n"] % 7, each["n"]))
    assert len(records) == 2000


def test_a_limit_asks_about_its_groups_only(connection: duckdb.DuckDBPyConnection) -> None:
    runner = FakeRunner(connection, answer)
    text = "SELECT n % 500 AS k, llm_agg('q', {n}) FROM numbers GROUP BY k ORDER BY k LIMIT 3"
    assert [k for k, _ in Connection(connection, runner).sql(text).fetchall()] == [0, 1, 2]
    assert [fields["records"] for _, fields in runner.asked] == [
        f'[{{"n":{k}}},{{"n":{k + 500}}}]' for k in range(3)
    ]


def test_calls_in_fields_are_asked_about_the_rows_of_the_filter(
    connection: duckdb.DuckDBPyConnection,
) -> None:
    runner = FakeRunner(connection, answer)
    text = f"SELECT type, llm_agg('q', {{t: {ASK}}}) FILTER (WHERE id < 3) FROM movies GROUP BY ALL"
    Connection(connection, runner).sql(text)
    assert sorted(fields["title"] for fields in runner.rows_asked("t")) == ["Alpha", "Beta"]


def test_names_of_columns(connection: duckdb.DuckDBPyConnection) -> None:
    asking = Connection(connection, FakeRunner(connection, answer))
    text = (
        "SELECT llm_agg('q', {id} ORDER BY id) FILTER (WHERE id > 1), type FROM movies GROUP BY 2"
    )
    assert asking.sql(text).columns == ["llm_agg", "type"]
    error = Connection(connection, FakeRunner(connection, answer), "column")
    assert error.sql("SELECT llm_agg('q', {id}) AS a FROM movies").columns == ["a", "a_error"]


TABLE = pa.table({"g": ["a", "b"] * 100, "x": [1000 + i for i in range(200)]})
SUM = "SELECT g, llm_agg('Sum {x}', {x}, return := 'int', max_tokens := 24) AS s FROM t GROUP BY g"


def test_groups_of_any_length_and_their_errors() -> None:
    engine = counting_engine(700)
    with connect(engine=engine, tables={"t": TABLE}) as database:
        explained = database.explain(SUM)
        result = database.sql(f"{SUM} ORDER BY g")
        assert result.fetchall() == [("a", 109900), ("b", 110000)]
        first = [message for message in engine.messages if not is_combining(message)]
        assert sum(len(records_of(message)) for message in first) == 200
        assert 2 < len(first) < len(engine.messages) == result.report.num_prompts
        [call] = explained.calls
        assert (call.estimate.num_rows, call.estimate.num_prompts) == (2, len(first))
        assert call.estimate.prompt_tokens == sum(
            len(engine.tokenizer(message)["input_ids"]) for message in first
        )
        assert "2 groups are too long for one prompt" in str(explained)
        database.sql(SUM)
        assert len(engine.messages) == result.report.num_prompts
        known = database.explain(SUM).calls[0].estimate
        assert known.num_known == known.num_prompts == len(first)


def test_sql_and_data_frames_ask_the_same() -> None:
    engines = [counting_engine(700), counting_engine(700)]
    with connect(engine=engines[0], tables={"t": TABLE}) as database:
        database.sql(SUM)
    llm_agg(TABLE, "Sum {x}", engine=engines[1], by="g", output=int, max_tokens=24)
    assert sorted(engines[0].messages) == sorted(engines[1].messages)


def test_a_group_without_an_answer_is_null_and_told() -> None:
    def refusing(row: Row) -> str:
        if any(each == {"x": 1001} for each in row["records"]):
            raise Refusal("no")
        return summed(row)

    engine = RecordingEngine(refusing)
    with connect(engine=engine, tables={"t": TABLE}) as database:
        result = database.sql(f"{SUM} ORDER BY g")
        assert result.fetchall() == [("a", 109900), ("b", None)]
        [error] = result.errors
        assert error.error == "no" and error.call.startswith("llm_agg('Sum {x}'")
        assert result.report.num_errors == 1
    with (
        connect(engine=engine, tables={"t": TABLE}, on_error="raise") as database,
        pytest.raises(AnswerFailedError, match="1 rows have no answer to llm_agg"),
    ):
        database.sql(SUM)


def test_answers_are_kept_and_limited(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    for num_prompts in (2, 0):
        engine = RecordingEngine(summed)
        options = JobOptions(checkpoint=path)
        with connect(engine=engine, tables={"t": TABLE}, options=options) as database:
            assert len(database.sql(SUM).fetchall()) == 2
        assert len(engine.messages) == num_prompts


def test_types_of_fields_come_through() -> None:
    engine = RecordingEngine(lambda row: json.dumps(row["records"]))
    text = (
        "SELECT llm_agg('q', {d: DATE '2020-01-02', u: uuid::UUID, m: MAP {'k': 1}, "
        "l: [1.50, NULL], "
        'j: \'{"a": [1,  2]}\'::JSON, "odd ""name": \'é\', n: NULL}) FROM (SELECT '
        "'00000000-0000-0000-0000-000000000001' AS uuid)"
    )
    with connect(engine=engine) as database:
        [(found,)] = database.sql(text).fetchall()
    assert json.loads(found) == [
        {
            "d": "2020-01-02",
            "u": "00000000-0000-0000-0000-000000000001",
            "m": {"k": 1},
            "l": [1.5, None],
            "j": {"a": [1, 2]},
            'odd "name': "é",
            "n": None,
        }
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SELECT llm_agg('q') FROM movies", r"llm_agg\(\) has 1 arguments without a name"),
        ("SELECT llm_agg(title, {id}) FROM movies", r"the first argument of llm_agg\(\) is title"),
        ("SELECT llm_agg('q', id) FROM movies", r"the second argument of llm_agg\(\) is id"),
        ("SELECT llm_agg('{x}', {id}) FROM movies", r"names \['x'\]"),
        ("SELECT llm_agg('q', {id}, size := 3) FROM movies", "no parameter 'size'"),
        ("SELECT llm_agg('q', {id}, images := ['records']) FROM movies", "no parameter 'images'"),
        ("SELECT id,\n  llm_agg('q', {id + 1}) FROM movies", "line 2, column 3: field id"),
        ("SELECT llm_agg('q', {id}, reorder := ['id']) FROM movies", r"names \['id'\]"),
    ],
)
def test_calls_that_are_none(
    connection: duckdb.DuckDBPyConnection, text: str, message: str
) -> None:
    runner = FakeRunner(connection, answer)
    with pytest.raises(SqlError, match=message):
        Connection(connection, runner).sql(text)
    assert not runner.asked


@pytest.mark.parametrize(
    "text",
    [
        "SELECT id, llm_agg('q', {id}) FROM movies",
        "SELECT id FROM movies WHERE llm_agg('q', {id}) = 'x'",
        "SELECT llm_agg('q', {s: sum(id)}) FROM movies",
    ],
)
def test_what_duckdb_refuses_of_aggregates_is_refused(
    connection: duckdb.DuckDBPyConnection, text: str
) -> None:
    runner = FakeRunner(connection, answer)
    with pytest.raises(duckdb.Error):
        Connection(connection, runner).sql(text)
    assert not runner.asked


def test_partial_answers_may_be_structs() -> None:
    def total(row: Row) -> str:
        parts = [each.get("x", each.get("n")) for each in row["records"]]
        return json.dumps({"n": sum(parts)})

    engine = counting_engine(900, total)
    text = "SELECT g, llm_agg('Sum {x}', {x}, return := 'STRUCT(n BIGINT)', max_tokens := 24) AS s "
    with connect(engine=engine, tables={"t": TABLE}) as database:
        rows = database.sql(f"{text} FROM t GROUP BY g ORDER BY g").fetchall()
    assert rows == [("a", {"n": 109900}), ("b", {"n": 110000})]
    assert any(map(is_combining, engine.messages))
    frame = llm_agg(
        TABLE, "Sum {x}", engine=engine, by="g", output="STRUCT(n BIGINT)", max_tokens=24
    )
    assert frame.objects == [{"n": 109900}, {"n": 110000}]
    assert frame.table["answer"].to_pylist() == frame.objects
