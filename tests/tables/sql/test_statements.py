# SPDX-License-Identifier: Apache-2.0
"""Statements, results and errors."""

import gc

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from tests.tables.fake_engine import FakeEngine
from tests.tables.sql.fake_runner import FakeRunner, RowError, hashed_answer
from vllm_relay.tables.jobs.answers import Answer
from vllm_relay.tables.jobs.report import JobReport
from vllm_relay.tables.sql import AnswerFailedError, Connection, SqlError, connect
from vllm_relay.tables.sql.jobs import Counts
from vllm_relay.tables.sql.result import Result
from vllm_relay.tables.sql.text.call_sites import Site


@pytest.fixture
def asking(connection):
    return Connection(connection, FakeRunner(connection))


def failing(question, fields):
    if fields["id"] % 3 == 0:
        raise RowError(f"no answer to {fields['id']}")
    return hashed_answer(question, fields)


ASK = "SELECT id, llm('q', {id}) AS a FROM movies"


def test_create_table_and_insert(asking, connection):
    expected = asking.sql(ASK).fetchall()
    asking.sql(
        f"CREATE TABLE answers AS {ASK}; INSERT INTO answers (a, id) SELECT a, id FROM ({ASK})"
    )
    rows = connection.sql("SELECT * FROM answers").fetchall()
    assert rows == expected + expected
    asking.sql("CREATE OR REPLACE TABLE answers AS SELECT llm('q', {id}) FROM movies")
    assert connection.sql("SELECT * FROM answers").columns == ["llm"]


def test_copy(asking, connection, tmp_path):
    path = tmp_path / "answers.parquet"
    asking.sql(f"COPY ({ASK}) TO '{path}' (FORMAT parquet)")
    assert connection.read_parquet(str(path)).fetchall() == asking.sql(ASK).fetchall()


def test_a_file_in_from(asking, connection, tmp_path):
    path = tmp_path / "movies.csv"
    connection.execute(f"COPY movies TO '{path}'")
    rows = asking.sql(f"SELECT id, llm('q', {{id}}) AS a FROM '{path}'").fetchall()
    assert rows == asking.sql(ASK).fetchall()


def test_other_statements_are_duckdbs(asking, connection):
    # sqlglot would write it in another way
    text = "SELECT  string_agg(title,'llm(' ORDER BY id)   FROM movies -- llm()"
    assert asking.sql(text).columns == connection.sql(text).columns
    assert asking.sql("SELECT 1 AS one; SELECT 2 AS two").columns == ["two"]
    with pytest.raises(duckdb.ParserException):
        asking.sql("SELEC 1")


def test_forms_of_a_result(asking):
    result = asking.sql(ASK)
    rows = result.fetchall()
    assert result.columns == ["id", "a"]
    assert result.fetchall() == rows
    assert list(result.df().itertuples(index=False, name=None)) == rows
    assert result.pl().rows() == rows
    assert [tuple(row.values()) for row in result.arrow().to_pylist()] == rows
    assert result.report.num_rows == 8
    assert result.errors == []


def test_types(asking):
    result = asking.sql(
        "SELECT llm('q', {id}) AS t, llm('q', {id}, return := 'int') AS i, "
        "llm('q', {id}, return := 'float') AS f, llm('q', {id}, return := 'bool') AS b, "
        "llm('q', {id}, schema := '{\"type\": \"object\"}') AS j FROM movies"
    )
    kinds = [str(kind) for kind in result.relation.types]
    assert kinds == ["VARCHAR", "BIGINT", "DOUBLE", "BOOLEAN", "JSON"]


def test_temporary_tables_go_with_their_result(asking, connection):
    def temporary():
        query = "SELECT count(*) FROM duckdb_tables() WHERE temporary"
        return connection.sql(query).fetchall()[0][0]

    result = asking.sql(ASK)
    assert temporary() == 1
    result = asking.sql(f"SELECT * FROM ({ASK}) WHERE a > 't1' AND llm('r', {{a}}) > 't1'")
    asking.explain(ASK)
    with pytest.raises(duckdb.Error):
        asking.sql("SELECT llm('q', {id: (title || 'x')::INT}) FROM movies")
    del result
    gc.collect()
    asking.sql(f"CREATE TABLE x AS {ASK}")
    assert temporary() == 0


def test_a_broken_transaction_says_what_broke_it(asking, connection):
    connection.execute("BEGIN")
    with pytest.raises(duckdb.ConversionException):
        asking.sql("SELECT llm('q', {id: (title || 'x')::INT}) FROM movies")
    connection.execute("ROLLBACK")
    assert len(asking.sql(ASK).fetchall()) == 8


def test_rows_that_a_job_leaves_out_are_no_nulls(connection):
    class Forgetful(FakeRunner):
        def answer(self, site: Site, counts: Counts) -> list[Answer]:
            return super().answer(site, counts)[2:]

    with pytest.raises(ValueError, match="shorter"):
        Connection(connection, Forgetful(connection)).sql(ASK)


def test_functions_of_users_are_evaluated_once(connection):
    connection.execute("CREATE MACRO coin() AS random() < 0.5")
    runner = FakeRunner(connection)
    text = "SELECT n FROM numbers WHERE coin() OR llm('q', {n}) = 't1'"
    rows = Connection(connection, runner).sql(text).fetchall()
    found = {fields["n"]: answer for fields, answer in runner.answers("q")}
    assert 300 < len(found) < 700
    assert [n for (n,) in rows] == [n for n in range(1000) if found.get(n, "t1") == "t1"]


def test_fields_have_any_name(connection):
    runner = FakeRunner(connection)
    names = ["relay_answer", "Relay_Error", "place", "j0", "number"]
    fields = ", ".join(f'"{name}": id' for name in names)
    Connection(connection, runner).sql(f"SELECT llm('q', {{{fields}}}) FROM movies")
    assert [list(each) for each in runner.rows_asked("q")] == [names] * 8


def test_numbers_of_single_precision_are_as_they_are_written():
    engine = FakeEngine()
    with connect(engine=engine) as asking:
        asking.sql(
            "SELECT llm('q', {a, b: [a], c: 1}) "
            "FROM (SELECT unnest([0.1, 16777216, -2.5e-7, NULL])::FLOAT AS a)"
        )
    lines = [line for each in engine.prompts for line in each.message.splitlines()]
    asked = sorted(line for line in lines if line.startswith('"a": '))
    assert asked == ['"a": -2.5e-7', '"a": 0.1', '"a": 16777216.0', '"a": null']


def test_errors_give_null_and_are_kept(connection):
    result = Connection(connection, FakeRunner(connection, failing)).sql(ASK)
    nulls = [id for id, answer in result.fetchall() if answer is None]
    assert nulls == [3, 6]
    found = sorted((error.fields["id"], error.error) for error in result.errors)
    assert found == [(3, "no answer to 3"), (6, "no answer to 6")]
    assert result.errors[0].call == "llm('q', {'id': id})"


def test_errors_as_columns(connection):
    asking = Connection(connection, FakeRunner(connection, failing), on_error="column")
    result = asking.sql("SELECT llm('q', {id}) AS a, id, upper(llm('q', {id})) FROM movies")
    assert result.columns[0::3] == ["a", "a_error"]
    assert [row[3] for row in result.fetchall() if row[0] is None] == [
        "no answer to 3",
        "no answer to 6",
    ]
    # other queries have none
    assert asking.sql(f"SELECT DISTINCT a FROM ({ASK})").columns == ["a"]


def test_errors_that_raise(connection):
    asking = Connection(connection, FakeRunner(connection, failing), on_error="raise")
    with pytest.raises(AnswerFailedError, match=r"2 rows have no answer to llm\('q'.*no answer to"):
        asking.sql(ASK)
    with pytest.raises(ValueError, match=r"on_error='x' given, expected one of \['null'"):
        Connection(connection, FakeRunner(connection), on_error="x")


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, pa.table])
def test_tables_of_others(make, tmp_path):
    path = tmp_path / "a'b.csv"
    path.write_text("x,y\n1,2\n")
    tables = {"own": make({"x": [1, 2]}), "a file": path}
    asking = connect(engine=FakeEngine(), tables=tables)
    assert asking.sql("SELECT sum(x) FROM own").fetchall() == [(3,)]
    assert asking.sql('SELECT y FROM "a file"').fetchall() == [(2,)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SELECT llm(title, {id}) FROM movies", "line 1, column 8: the first argument of llm"),
        (
            "SELECT\n  llm('q') FROM movies",
            "line 2, column 3: llm.. has 1 arguments without a name",
        ),
        ("SELECT llm('q', title) FROM movies", "second argument of llm.. is title, expected "),
        ("SELECT llm('q', {title || 'x'}) FROM movies", "has no name: write {name: title"),
        (
            "SELECT llm('q', {title}, choice := ['a']) FROM movies",
            "no parameter 'choice', expected",
        ),
        (
            "SELECT llm('q', {title}, seed := 1, seed := 2) FROM movies",
            "'seed' of llm.. is given tw",
        ),
        (
            "SELECT llm('q', {title}, seed := 'x') FROM movies",
            "seed := 'x' given to llm.., expected",
        ),
        ("SELECT llm('q', {title}, choices := 'x') FROM movies", "expected a list of texts"),
        ("SELECT llm('q', {title}, return := 'x') FROM movies", "return type 'x' given, expected"),
        ("SELECT llm('q {x}', {title}) FROM movies", r"names \['x'\], expected some of its fields"),
        ("SELECT llm('q', {a: 1, A: 2}) FROM movies", "differ by more than case"),
        (
            "SELECT llm('q', *) FROM movies m JOIN reviews r ON m.id = r.id",
            "differ by more than cas",
        ),
        ("SELECT llm('q', {title}) FROM movies ORDER BY llm('q')", "1 arguments"),
        ("CREATE VIEW v AS SELECT llm('q', {id}) FROM movies", "A view cannot ask: make a table"),
        ("PREPARE p AS SELECT llm('q', {id}) FROM movies", "expected SELECT, CREATE TABLE"),
        ("EXPLAIN ANALYZE SELECT llm('q', {id}) FROM movies", "EXPLAIN ANALYZE of a query"),
        ("SELECT llm('q', {id} FROM movies", "cannot be read"),
        (
            "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT llm('q', {n}) FROM r) "
            "SELECT * FROM r",
            "llm.. in WITH RECURSIVE 'r'",
        ),
    ],
)
def test_refused(asking, text, message):
    with pytest.raises(SqlError, match=message):
        asking.sql(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SELECT llm('q', {nothing}) FROM movies", "nothing"),
        ("SELECT llm('q', {id}) FROM nowhere", "nowhere"),
        ("SELECT title, max(llm('q', {id})) FROM movies", "must appear in the GROUP BY"),
        ("SELECT m.id FROM movies m JOIN reviews r ON true WHERE llm('q', {id}) = 'x'", "mbiguous"),
        ("SELECT id FROM movies WHERE llm('q', {id}) + 1 = DATE '2020-01-01'", "Binder"),
    ],
)
def test_what_duckdb_refuses(connection, text, message):
    runner = FakeRunner(connection)
    with pytest.raises(duckdb.Error, match=message):
        Connection(connection, runner).sql(text)
    assert runner.asked == []


def test_rows_that_differ_in_case_only_keep_their_answers():
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t (id INT, a VARCHAR COLLATE NOCASE)")
    connection.execute("INSERT INTO t VALUES (1, 'Yes'), (2, 'YES'), (3, 'Yes')")
    engine = FakeEngine(answer=lambda fields: fields["a"])
    asking = connect(connection, engine=engine)
    rows = asking.sql("SELECT id, llm('What?', {a}) FROM t").fetchall()
    assert rows == [(1, '"Yes"'), (2, '"YES"'), (3, '"Yes"')]
    assert len(engine.prompts) == 2


def test_columns_of_errors_are_added_where_there_is_place():
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t AS SELECT 1 AS id; CREATE TABLE answers (a VARCHAR)")
    asking = connect(connection, engine=FakeEngine(answer=lambda fields: "x"), on_error="column")
    unread = "SELECT count(*) FROM (SELECT llm('What?', {id}) AS a, id FROM t)"
    assert asking.sql(unread).fetchall() == [(1,)]
    asking.sql("INSERT INTO answers SELECT llm('What?', {id}) FROM t")
    assert asking.sql("FROM answers").fetchall() == [("x",)]


def test_a_random_condition_asks_about_all_rows():
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t AS SELECT range AS id FROM range(40)")
    asking = connect(connection, engine=FakeEngine(answer=lambda fields: "x"))
    query = "SELECT count(*) FILTER (WHERE random() < 0.5 AND llm('What?', {id}) IS NULL) FROM t"
    assert asking.sql(query).fetchall() == [(0,)]


def test_changes_in_a_transaction(asking, connection):
    """They are run to see what they ask, and undone, which a transaction of the caller is not."""
    connection.execute("BEGIN")
    with pytest.raises(SqlError, match="inside an open transaction"):
        asking.sql("UPDATE movies SET title = llm('q', {id})")
    connection.execute("COMMIT")
    asking.sql("UPDATE movies SET title = llm('q', {id})")
    expected = sorted((str(a),) for _, a in asking.sql(ASK).fetchall())
    assert sorted(connection.sql("SELECT title FROM movies").fetchall()) == expected


def test_changes_that_differ_each_time(connection):
    runner = FakeRunner(connection)
    with pytest.raises(SqlError, match=r"random\(\) differs each time"):
        Connection(connection, runner).sql("DELETE FROM movies WHERE llm('q', {x: random()}) = 'x'")
    assert runner.asked == []


def test_a_summary(asking):
    rows = asking.sql(f"SUMMARIZE {ASK}").fetchall()
    assert [row[0] for row in rows] == ["id", "a"]


def test_a_description_asks_nothing(connection):
    runner = FakeRunner(connection)
    rows = Connection(connection, runner).sql(f"DESCRIBE {ASK}").fetchall()
    assert [row[:2] for row in rows] == [("id", "INTEGER"), ("a", "VARCHAR")]
    assert runner.asked == []


def test_what_sqlglot_would_write_in_another_way(asking):
    text = (
        "SELECT {} x'41', name.upper() AS n, json_extract('{{\"a.b\": 1}}', '\"a.b\"') "
        "FROM (SELECT id, title AS name FROM movies WHERE id = 1)"
    )
    result, plain = asking.sql(text.format("llm('q', {id}), ")), asking.sql(text.format(""))
    assert [row[1:] for row in result.fetchall()] == plain.fetchall()
    assert result.columns[1:] == plain.columns


@pytest.mark.parametrize(
    "text",
    [
        "SELECT id, llm('q', {id}) AS a FROM movies ORDER BY a",
        "SELECT id, llm('q', {id}) AS a FROM movies WHERE a <> 'x'",
        "SELECT llm('q', {id}) AS a, count(*) FROM movies GROUP BY a",
        "SELECT m.id FROM movies m JOIN reviews r ON m.id = r.id AND llm('q', {body}) <> ''",
    ],
)
def test_names_that_are_looked_up_do_not_end_a_transaction(connection, text):
    connection.execute("BEGIN")
    connection.execute("INSERT INTO movies (id) VALUES (100)")
    assert Connection(connection, FakeRunner(connection)).sql(text).fetchall()
    connection.execute("COMMIT")
    assert connection.execute("SELECT count(*) FROM movies").fetchall() == [(9,)]


def test_rows_may_be_taken_one_after_the_other(connection: duckdb.DuckDBPyConnection) -> None:
    asking = Connection(connection, FakeRunner(connection))
    for text in (ASK, "SELECT n FROM numbers", "SELECT n FROM numbers WHERE false"):
        result = asking.sql(text)
        rows = result.fetchall()
        assert list(result) == list(result) == rows
        assert [result.fetchone() for _ in range(len(rows) + 1)] == [*rows, None]


def test_a_result_shows_itself_as_a_table(connection: duckdb.DuckDBPyConnection) -> None:
    asking = Connection(connection, FakeRunner(connection))
    shown = repr(asking.sql("SELECT n, repeat('long ', 1000) AS text FROM numbers"))
    assert "1000 rows" in shown and len(shown.splitlines()) < 40
    assert max(map(len, shown.splitlines())) < 200
    result = Result(connection.sql("SELECT 1 AS one"), report=JobReport(num_errors=2))
    assert "one" in repr(result) and repr(result).endswith("2 without an answer")
    assert repr(Result(None)) == "no rows"


def test_parameters_are_for_statements_that_do_not_ask(
    connection: duckdb.DuckDBPyConnection,
) -> None:
    asking = Connection(connection, FakeRunner(connection))
    assert asking.sql("SELECT ? + 1", [1]).fetchall() == [(2,)]
    assert asking.sql("SELECT $a + $b", {"a": 1, "b": 2}).fetchall() == [(3,)]
    asking.sql("CREATE TABLE made AS SELECT $1 AS n", [7])
    assert asking.sql("FROM made").fetchall() == [(7,)]
    with pytest.raises(SqlError, match="parameters given with a statement that calls llm"):
        asking.sql("SELECT llm('q', {id}) FROM movies WHERE id = ?", [1])
    with pytest.raises(duckdb.Error):
        asking.sql("SELECT ?", [])


def test_an_error_shows_a_long_row_in_short(connection: duckdb.DuckDBPyConnection) -> None:
    def failing(question, fields):
        raise RowError("no")

    asking = Connection(connection, FakeRunner(connection, failing), on_error="raise")
    with pytest.raises(AnswerFailedError, match="text='aaa.* ... a*': no") as raised:
        asking.sql("SELECT llm('q', {text: repeat('a', 10000)})")
    assert len(str(raised.value)) < 300
