# SPDX-License-Identifier: Apache-2.0
"""Statements that DuckDB refuses as a whole: nothing is asked, and nothing is changed."""

import os

import duckdb
import pytest

from tests.tables.sql.fake_runner import FakeRunner
from vllm_relay.tables.sql import Connection

ASK = "SELECT llm('q', {id}) AS a, id FROM movies"
EXTRA = """
CREATE VIEW seen AS FROM movies;
CREATE SCHEMA part; CREATE TABLE part.own (a VARCHAR, id INT);
CREATE TABLE answers (a VARCHAR, id INT PRIMARY KEY);
CREATE TEMP TABLE held (a VARCHAR);
CREATE SEQUENCE numbering;
ATTACH ':memory:' AS other; CREATE TABLE other.own (a VARCHAR, id INT);
"""
_TABLES = "SELECT database_name, schema_name, table_name FROM duckdb_tables() ORDER BY ALL"


@pytest.fixture
def runner(connection):
    connection.execute(EXTRA)
    return FakeRunner(connection)


@pytest.fixture
def asking(connection, runner):
    return Connection(connection, runner)


@pytest.mark.parametrize("prefix", ["", "EXPLAIN "])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"INSERT INTO nope {ASK}", "Table with name nope does not exist"),
        (f"INSERT INTO seen {ASK}", "seen is not an table"),
        (f"INSERT INTO answers (a) {ASK}", "expected 1 columns but 2 values"),
        ("INSERT INTO answers SELECT 1, 2, llm('q', {id}) FROM movies", "has 2 columns but 3 val"),
        (f"INSERT INTO answers (a, nothing) {ASK}", 'have a column with name "nothing"'),
        (f"INSERT INTO answers BY NAME {ASK.replace('AS a', 'AS b')}", 'column with name "b"'),
        (f"INSERT INTO answers {ASK} ON CONFLICT (a) DO NOTHING", "not referenced by a UNIQUE"),
        (f"INSERT INTO answers {ASK} RETURNING nothing", "nothing"),
        (f"CREATE TABLE answers AS {ASK}", 'Table with name "answers" already exists'),
        (f"CREATE TABLE memory.ANSWERS (x, y) AS {ASK}", 'Table with name "ANSWERS" already exi'),
        (f"CREATE TABLE part.own AS {ASK}", 'Table with name "own" already exists'),
        (f"CREATE TABLE other.own AS {ASK}", 'Table with name "own" already exists'),
        (f"CREATE TABLE other.main.own AS {ASK}", 'Table with name "own" already exists'),
        (f"CREATE TEMP TABLE held AS {ASK}", 'Table with name "held" already exists'),
        (f"CREATE TABLE seen AS {ASK}", 'View with name "seen" already exists'),
        (f"CREATE OR REPLACE TABLE seen AS {ASK}", '"seen" is of type View'),
        (f"CREATE TABLE nowhere.x AS {ASK}", "Schema with name nowhere does not exist"),
        (f"CREATE TABLE x (a, b, c) AS {ASK}", "more column names than query result"),
        (f"COPY ({ASK}) TO '/nope/x.csv'", 'Cannot open file "/nope/x.csv": No such file or dir'),
        (f"COPY ({ASK}) TO $$/nope/x.csv$$", 'Cannot open file "/nope/x.csv": No such file or d'),
        (f"COPY ({ASK}) TO '/dev/null/x.csv'", "Not a directory"),
        (f"COPY ({ASK}) TO '/nope/x' (FORMAT parquet, PARTITION_BY (a))", "No such file"),
        (f"COPY ({ASK}) TO '{os.path.dirname(__file__)}' (PARTITION_BY a)", "is not empty"),
        (f"COPY ({ASK}) TO 'x' (FORMAT nope)", "Copy Function with name nope does not exist"),
        (f"COPY ({ASK}) TO 'x' (FORMAT csv, nope 1)", 'Unrecognized option "nope"'),
        (f"COPY ({ASK}) TO 'x' (FORMAT parquet, PARTITION_BY (b))", "b"),
        (f"{ASK} UNION SELECT 1", "same number of result columns"),
        (f"SELECT 1 UNION ALL {ASK}", "same number of result columns"),
        (f"{ASK} UNION SELECT nothing, 1 FROM movies", "nothing"),
        (f"SELECT nothing FROM ({ASK})", "nothing"),
        (f"WITH w(a, b, c) AS ({ASK}) SELECT c FROM w", "c"),
        (f"SELECT * FROM ({ASK}) x JOIN ({ASK}) y USING (nothing)", "nothing"),
        (f"SELECT a + DATE '2020-01-01' FROM ({ASK})", "No function matches"),
    ],
)
def test_what_duckdb_refuses_is_not_asked(asking, runner, connection, prefix, text, message):
    before = connection.sql(_TABLES).fetchall()
    with pytest.raises(duckdb.Error, match=message) as raised:
        asking.sql(prefix + text)
    assert runner.asked == [] and runner.estimated == []
    assert "CASE" not in str(raised.value)
    assert connection.sql(_TABLES).fetchall() == before
    assert connection.sql("SELECT count(*) FROM answers").fetchall() == [(0,)]


def test_calls_beside_the_query(asking, runner, connection):
    rows = asking.sql(f"INSERT INTO answers {ASK} RETURNING llm('r', {{id}}), a, id").fetchall()
    assert connection.sql("SELECT count(*) FROM answers").fetchall() == [(8,)]
    known = {fields["id"]: value for fields, value in runner.answers("r")}
    assert {id: value for value, _, id in rows} == known and len(rows) == 8


def test_a_folder_that_cannot_be_written(asking, runner, tmp_path, monkeypatch):
    # root may write everywhere, so the system's answer is replaced
    asked_for = os.W_OK | os.X_OK
    monkeypatch.setattr(os, "access", lambda path, mode, **_: mode != asked_for)
    with pytest.raises(duckdb.IOException, match="Permission denied"):
        asking.sql(f"COPY ({ASK}) TO '{tmp_path}/x.csv'")
    assert runner.asked == []


def test_a_database_that_is_only_read(tmp_path):
    path = tmp_path / "movies.db"
    with duckdb.connect(path) as connection:
        connection.execute("CREATE TABLE movies AS SELECT range AS id FROM range(8)")
    with duckdb.connect(path, read_only=True) as connection:
        runner = FakeRunner(connection)
        with pytest.raises(duckdb.Error, match='of type "CREATE" on database "movies"'):
            Connection(connection, runner).sql(f"CREATE TABLE x AS {ASK}")
        assert runner.asked == []
        Connection(connection, runner).sql(f"CREATE TEMP TABLE x AS {ASK}")
        assert len(runner.asked) == 8


@pytest.mark.parametrize("name", ["answers", "seen", "part.own", "other.own", "memory.answers"])
def test_a_table_that_exists_is_not_asked_for(asking, runner, connection, name):
    text = f"CREATE TABLE IF NOT EXISTS {name} AS {ASK}"
    before = connection.sql(_TABLES).fetchall()
    assert asking.explain(text).calls == []
    result = asking.sql(text)
    assert result.report.num_rows == 0 and runner.asked == []
    assert connection.sql(_TABLES).fetchall() == before
    with pytest.raises(duckdb.BinderException, match="nothing"):
        asking.sql(text.replace("{id}", "{nothing}"))


def test_a_table_without_data_asks_nothing(asking, runner, connection):
    asking.sql(f"CREATE TABLE empty AS {ASK} WITH NO DATA")
    assert connection.sql("FROM empty").fetchall() == [] and runner.asked == []
    kinds = [str(kind) for kind in connection.sql("FROM empty").types]
    assert kinds == ["VARCHAR", "INTEGER"]


def test_the_check_changes_nothing(asking, runner, connection, tmp_path):
    count = "nextval('numbering')::INT"
    text = f"INSERT INTO answers SELECT llm('q', {{title}}), {count} FROM movies"
    asking.explain(f"INSERT INTO answers {ASK}")
    asking.explain(f"CREATE TABLE made AS {ASK}")
    asking.explain(f"COPY ({ASK}) TO '{tmp_path}/x.csv'")
    assert list(tmp_path.iterdir()) == []
    assert connection.sql("SELECT count(*) FROM answers").fetchall() == [(0,)]
    assert connection.sql("FROM duckdb_tables() WHERE table_name = 'made'").fetchall() == []
    asking.sql(text)
    found = connection.sql("SELECT id FROM answers ORDER BY id").fetchall()
    assert found == [(number,) for number in range(1, 9)]


@pytest.mark.parametrize(
    ("text", "table"),
    [
        (f"CREATE OR REPLACE TABLE answers AS {ASK}", "answers"),
        (f"CREATE OR REPLACE TABLE fresh AS {ASK}", "fresh"),
        (f"CREATE TABLE IF NOT EXISTS fresh AS {ASK}", "fresh"),
        (f"CREATE TEMP TABLE answers AS {ASK}", "temp.answers"),
        (f"CREATE TABLE held AS {ASK}", "memory.held"),
        (f"CREATE TABLE own AS {ASK}", "main.own"),
        (f"CREATE TABLE part.answers AS {ASK}", "part.answers"),
        (f"CREATE TABLE other.answers AS {ASK}", "other.answers"),
        (f'CREATE TABLE "Ä b" (x) AS {ASK}', '"Ä b"'),
        (f"INSERT INTO other.own {ASK}", "other.own"),
        (f"INSERT INTO answers BY NAME {ASK}", "answers"),
        (f"INSERT INTO answers (id, a) SELECT id, a FROM ({ASK})", "answers"),
        (f"INSERT INTO answers {ASK} ON CONFLICT (id) DO UPDATE SET a = excluded.a", "answers"),
        (f"INSERT OR IGNORE INTO answers {ASK} RETURNING *", "answers"),
        (f"CREATE TABLE wide AS SELECT * FROM (PIVOT ({ASK}) ON a USING count(*))", "wide"),
    ],
)
def test_right_statements_are_run(asking, runner, connection, text, table):
    asking.sql(text)
    assert len(runner.asked) == 8
    assert connection.sql(f"SELECT count(*) FROM {table}").fetchall() == [(8,)]


def test_a_pivot_has_the_columns_of_its_answers(asking, connection):
    columns = ", ".join(f"t{number} INT" for number in range(5))
    connection.execute(f"CREATE TABLE counts (id INT, {columns})")
    asking.sql(f"INSERT INTO counts SELECT * FROM (PIVOT ({ASK}) ON a USING count(*))")
    assert connection.sql("SELECT count(*) FROM counts").fetchall() == [(8,)]


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("x.csv", ""),
        ("x.parquet", "(FORMAT parquet, COMPRESSION zstd)"),
        ("x.json", "(FORMAT 'json', ARRAY true)"),
        ("folder/", "(FORMAT parquet, PARTITION_BY (a), WRITE_PARTITION_COLUMNS)"),
        ("of empty ones", "(FORMAT csv, PARTITION_BY (a))"),
        ("filled", "(FORMAT csv, PARTITION_BY (a), OVERWRITE_OR_IGNORE)"),
        ("filled", "(FORMAT csv, PARTITION_BY (a), APPEND)"),
        ("filled/old.csv", "(HEADER false)"),
    ],
)
@pytest.mark.parametrize("scheme", ["", "file:"])
def test_right_copies_are_run(asking, runner, tmp_path, path, options, scheme):
    (tmp_path / "of empty ones" / "inner").mkdir(parents=True)
    (tmp_path / "filled").mkdir()
    (tmp_path / "filled" / "old.csv").write_text("a\n1\n")
    asking.sql(f"COPY ({ASK}) TO '{scheme}{tmp_path}/{path}' {options}")
    assert len(runner.asked) == 8
    assert (tmp_path / path).exists()


@pytest.mark.parametrize("target", ["'/dev/null'", "('/dev/' || 'null')", "E'/dev/null'"])
def test_targets_that_are_no_plain_files(asking, runner, target):
    asking.sql(f"COPY ({ASK}) TO {target}")
    assert len(runner.asked) == 8


def test_a_remote_folder_is_not_looked_for(asking, connection):
    text = f"COPY ({ASK}) TO 's3://nowhere/folder/x.csv'"
    assert len(asking.explain(text).calls) == 1


def test_a_transaction_goes_on(asking, connection):
    connection.execute("BEGIN")
    asking.sql(f"CREATE TABLE made AS {ASK}; INSERT INTO made {ASK}")
    with pytest.raises(duckdb.CatalogException, match="already exists"):
        asking.sql(f"CREATE TABLE made AS {ASK}")
    assert connection.sql("SELECT count(*) FROM made").fetchall() == [(16,)]
    connection.execute("ROLLBACK")
    assert len(asking.sql(f"CREATE TABLE made AS {ASK}; {ASK}").fetchall()) == 8


def test_the_schema_in_use(asking, runner, connection):
    connection.execute("CREATE SCHEMA other.second; USE other.second")
    text = "CREATE TABLE {} AS SELECT llm('q', {{id}}) FROM memory.main.movies"
    for name in ("own", "answers", "other.held"):
        asking.sql(text.format(name))
    assert len(runner.asked) == 8
    for name in ("own", "other.own", "second.own", "other.main.own", "memory.answers"):
        with pytest.raises(duckdb.CatalogException, match="already exists"):
            asking.sql(text.format(name).replace("'q'", "'r'"))
    assert runner.rows_asked("r") == []
