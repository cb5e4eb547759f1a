# SPDX-License-Identifier: Apache-2.0
"""Fields that a question names itself."""

from __future__ import annotations

import duckdb
import pytest

from tests.tables.sql.fake_runner import FakeRunner
from vllm_relay.tables.sql.connection import Connection
from vllm_relay.tables.sql.expressions import SqlError


@pytest.fixture
def runner() -> FakeRunner:
    connection = duckdb.connect()
    connection.execute(
        "CREATE TABLE birds AS SELECT i AS id, 'bird ' || i % 3 AS \"Wildlife Species\", "
        "i % 2 AS größe FROM range(12) AS numbers(i)"
    )
    return FakeRunner(connection)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Is {Wildlife Species} a raptor?", ["Wildlife Species"]),
        ("Is {b.Wildlife Species} a raptor?", None),
        ("Is {größe} more than {id}? {größe} {{id}}", ["größe", "id"]),
        ("Is {b.größe} much?", ["b.größe"]),
    ],
)
def test_the_question_names_its_fields(
    runner: FakeRunner, text: str, names: list[str] | None
) -> None:
    sql = Connection(runner._connection, runner)
    query = f"SELECT id, llm('{text}') AS x FROM birds AS b WHERE llm('{text}', return := 'bool')"
    if names is None:
        with pytest.raises(duckdb.Error, match="b.Wildlife Species"):
            sql.sql(query)
        return
    result = sql.sql(query)
    assert result is not None
    asked = runner.rows_asked(text)
    assert all(list(each) == names for each in asked)
    values = ", ".join(f'b."{name.removeprefix("b.")}"' for name in names)
    distinct = runner._connection.execute(f"SELECT DISTINCT {values} FROM birds AS b").fetchall()
    assert {tuple(each.values()) for each in asked} == set(distinct)
    assert len(result.fetchall()) <= 12


def test_names_that_are_no_column_are_refused_with_those_there_are(runner: FakeRunner) -> None:
    sql = Connection(runner._connection, runner)
    with pytest.raises(duckdb.Error, match=r"(?s)Speces.*Wildlife Species"):
        sql.sql("SELECT llm('Is {Wildlife Speces} a raptor?') FROM birds")
    with pytest.raises(SqlError, match=r"names \['x y'\], expected some of its fields \['id'\]"):
        sql.sql("SELECT llm('Is {x y} good?', {id}) FROM birds")
    for fields in ("", ", {id}"):
        with pytest.raises(SqlError, match=r"line 1, column 8: .*'\{' without its '\}'"):
            sql.sql(f"SELECT llm('Is {{id good?'{fields}) FROM birds")
    assert not runner.asked


@pytest.mark.parametrize("function", ["llm", "llm_agg"])
@pytest.mark.parametrize("fields", ["", ", id", ", {id}", ", *"])
def test_braces_without_a_name_are_refused(runner: FakeRunner, function: str, fields: str) -> None:
    sql = Connection(runner._connection, runner)
    expected = r"line 1, column 8: .*'Is \{\} good\?' names \[''\], .*\{name\}.*\{\{"
    with pytest.raises(SqlError, match=expected):
        sql.sql(f"SELECT {function}('Is {{}} good?'{fields}) FROM birds")
    assert not runner.asked
