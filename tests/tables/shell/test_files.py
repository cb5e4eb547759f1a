# SPDX-License-Identifier: Apache-2.0
"""Files as tables."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from vllm_relay.tables.shell.files import check_output, open_files, table_name, write_relation


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".parquet", ".json", ".jsonl", ".csv.gz"])
def test_a_file_is_a_table(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"It's 2 films{ending}"
    formats = {".parquet": "(FORMAT parquet)", ".json": "(FORMAT json, ARRAY true)"}
    formats |= {".jsonl": "(FORMAT json)", ".tsv": "(FORMAT csv, DELIMITER '\t')"}
    name = str(path).replace("'", "''")
    duckdb.sql(f"COPY (SELECT 1 AS a, 'x, y' AS b) TO '{name}' {formats.get(ending, '')}")
    connection = open_files([path])
    assert connection.execute("SELECT a, b FROM it_s_2_films").fetchall() == [(1, "x, y")]


def test_databases_are_opened_and_attached(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with duckdb.connect(str(tmp_path / f"{name}.duckdb")) as made:
            made.execute(f"CREATE TABLE t AS SELECT '{name}' AS name")
    connection = open_files([tmp_path / "one.duckdb", tmp_path / "two.duckdb"])
    found = connection.execute("SELECT t.name, u.name FROM t, two.t AS u").fetchall()
    assert found == [("one", "two")]
    connection.execute("CREATE TABLE answers AS SELECT 1")
    with pytest.raises(duckdb.Error, match="read-only"):
        connection.execute("CREATE TABLE two.answers AS SELECT 1")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["no.csv"], "no such file"),
        (["a.txt"], "ends with one of"),
        (["a.csv", "A.parquet"], "would both be the table a"),
        (["bad.parquet"], "cannot be read"),
        (["bad.duckdb"], "cannot be read"),
    ],
)
def test_files_that_cannot_be_tables_are_refused(
    names: list[str], message: str, tmp_path: Path
) -> None:
    for name in ("a.txt", "a.csv", "bad.parquet", "bad.duckdb"):
        (tmp_path / name).write_text("a,b\n1,2\n" * 100)
    duckdb.sql(f"COPY (SELECT 1 AS a) TO '{tmp_path}/A.parquet'")
    with pytest.raises(ValueError, match=message):
        open_files([tmp_path / name for name in names])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Films.csv", "films"), ("2024 films.tar.csv", "t_2024_films"), ("é-à.csv", "é_à"),
     ("--.csv", "table")],
)  # fmt: skip
def test_names_need_no_quotes(name: str, expected: str) -> None:
    assert table_name(Path(name)) == expected
    if expected != "table":
        duckdb.connect().execute(f"CREATE TABLE {expected} (a INT)")


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".json", ".jsonl"])
def test_rows_are_written(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"out{ending}"
    check_output(path)
    connection = duckdb.connect()
    write_relation(connection, connection.sql("SELECT 1 AS a, 'é' AS b"), path)
    assert duckdb.sql(f"SELECT a, b FROM '{path}'").fetchall() == [(1, "é")]


@pytest.mark.parametrize(
    ("statement", "rows"),
    [
        ("SHOW TABLES", [("numbers",)]),
        ("PRAGMA show_tables", [("numbers",)]),
        ("SELECT column_name FROM (DESCRIBE numbers)", [("a",)]),
        ("INSERT INTO numbers VALUES (3) RETURNING a", [(3,)]),
        ("EXECUTE prepared", [(7,)]),
        ("SELECT a AS x, a AS x FROM numbers", [(2, 2)]),
    ],
)
@pytest.mark.parametrize("ending", [".csv", ".parquet", ".json", ".jsonl"])
def test_rows_of_any_statement_are_written(
    ending: str, statement: str, rows: list[tuple[object, ...]], tmp_path: Path
) -> None:
    path = tmp_path / f"out{ending}"
    connection = duckdb.connect()
    connection.execute("CREATE TABLE numbers AS SELECT 2 AS a; PREPARE prepared AS SELECT 7 AS b")
    write_relation(connection, connection.sql(statement), path)
    source = f"read_csv('{path}', header = true)" if ending == ".csv" else f"'{path}'"
    assert duckdb.sql(f"FROM {source}").fetchall() == rows
    assert connection.execute("SELECT name FROM (SHOW TABLES)").fetchall() == [("numbers",)]


def test_an_unknown_kind_of_output_is_refused() -> None:
    with pytest.raises(ValueError, match="ends with one of"):
        check_output(Path("out.xlsx"))
