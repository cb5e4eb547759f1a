# SPDX-License-Identifier: Apache-2.0
"""What a statement would take."""

from dataclasses import replace

import duckdb
import pytest

from tests.tables.sql.fake_runner import FakeRunner
from vllm_relay.tables.jobs.report import Estimate
from vllm_relay.tables.sql import Connection, SqlError
from vllm_relay.tables.sql.jobs import Counts
from vllm_relay.tables.sql.text.call_sites import Site

ASK = "SELECT id, llm('q', {id}) AS a FROM movies"
INT, BOOL = "return := 'int'", "return := 'bool'"
EVERY_NUMBER = f"SELECT *, llm('i', {{n}}, {INT}) + 1 AS x FROM numbers"
PASSING = f"SELECT * FROM many WHERE llm('p', {{n}}, {BOOL})"


@pytest.fixture
def asking(connection):
    return Connection(connection, FakeRunner(connection))


def test_asks_nothing(connection):
    runner = FakeRunner(connection)
    asking = Connection(connection, runner)
    text = "SELECT llm('q', {id, s: llm('i', {title})}) FROM movies WHERE llm('p', {id}) = 'x'"
    explained = asking.explain(text)
    assert runner.asked == []
    calls = [(c.estimate.num_rows, c.estimate.num_prompts, c.is_bound) for c in explained.calls]
    assert calls == [(8, 8, False), (8, 7, True), (8, 8, True)]
    assert [c.estimate.tokens_are_exact for c in explained.calls] == [True, True, False]
    assert explained.num_tokens == (8 + 7 + 8) * 12
    lines = str(explained).splitlines()
    assert "  rows:           at most 8" in lines
    assert "  prompts:        8 different, 0 known" in lines
    assert "  prompt tokens:  at most about 80, of which cached: 40" in lines
    assert any(line.startswith("  stage: SELECT") for line in lines)
    assert asking.sql(f"explain\n{text}").fetchall() == [("llm", str(explained))]
    assert asking.sql("EXPLAIN SELECT 1").columns == ["explain_key", "explain_value"]
    with pytest.raises(SqlError, match="expected one statement that calls llm"):
        asking.explain("SELECT 1")


@pytest.mark.parametrize(
    "text",
    [
        "SELECT if(llm('q', {id}, return := 'bool'), llm('r', {id}), 'no') FROM movies",
        "SELECT sum(CASE WHEN llm('q', {id}, return := 'bool') THEN "
        "llm('r', {id}, return := 'int') END) FROM movies GROUP BY type",
        "SELECT coalesce(nullif(llm('q', {id}), ''), llm('r', {id})) FROM movies",
        "SELECT id FROM movies WHERE llm('q', {id}, return := 'bool') OR llm('r', {id}) = 'x'",
        "SELECT type FROM movies GROUP BY type HAVING max(llm('q', {id})) = 'x' "
        "AND max(llm('r', {id})) = 'x'",
    ],
)
def test_counts_all_that_answers_may_choose(asking, text):
    rows = {each.call[5]: each.estimate.num_rows for each in asking.explain(text).calls}
    assert rows == {"q": 8, "r": 8}


def test_tells_that_rows_depend_on_answers(asking):
    groups = (
        "SELECT llm('q', {id}, return := 'int') AS k, sum(llm('r', {id}, return := 'int')) AS s "
        "FROM movies GROUP BY ALL"
    )
    told = "a condition reads answers: how many rows are asked depends on them"
    for text in (
        f"SELECT s FROM ({groups}) WHERE k > 0",
        f"WITH a AS ({groups}) SELECT s FROM a WHERE k > 0",
    ):
        assert told in asking.explain(text).steps
    assert told not in asking.explain(groups).steps


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # the condition of the join goes below it, beside the one that asks
        (
            f"SELECT n FROM (SELECT *, llm('i', {{x: n}}, {INT}) AS x FROM numbers WHERE "
            f"llm('p', {{x: n}}, {BOOL})) s JOIN (SELECT n AS m FROM numbers) r ON m = s.n AND "
            f"s.x > 11",
            {"p": 1000, "i": 1000},
        ),
        (f"SELECT llm('z', {{n}}) FROM ({EVERY_NUMBER}) WHERE x > 11", {"i": 1000, "z": 1000}),
        (
            f"WITH s(k, y) AS ({EVERY_NUMBER}) SELECT llm('z', {{k}}) FROM s WHERE y > 11",
            {"i": 1000, "z": 1000},
        ),
        (
            f"WITH s(k, y) AS NOT MATERIALIZED ({EVERY_NUMBER}) "
            f"SELECT llm('z', {{k}}) FROM s WHERE y > 11",
            {"i": 1000, "z": 1000},
        ),
        (
            f"SELECT llm('z', {{n}}) FROM (SELECT n, y: llm('i', {{n}}, {INT}) + 1 FROM numbers) "
            f"WHERE y > 11",
            {"i": 1000, "z": 1000},
        ),
        (
            f"SELECT llm('z', {{n}}) FROM (SELECT n, 0 AS y FROM numbers WHERE n < 0 UNION ALL "
            f"{EVERY_NUMBER}) WHERE y > 11",
            {"i": 1000, "z": 1000},
        ),
        (
            f"SELECT llm('z', {{n}}) FROM numbers WHERE "
            f"n < (SELECT 0 * max(llm('i', {{n}}, {INT})) FROM numbers)",
            {"i": 1000, "z": 1000},
        ),
        (
            f"SELECT sum(llm('z', {{n}}, {INT})) FILTER (WHERE x > 11) FROM ({EVERY_NUMBER})",
            {"i": 1000, "z": 1000},
        ),
        # the limit counts rows that a condition lets through
        (f"SELECT llm('z', {{n}}) FROM ({PASSING}) LIMIT 3", {"p": 6000, "z": 3}),
        (f"WITH s AS ({PASSING}) SELECT n FROM s LIMIT 3", {"p": 6000}),
        (
            f"SELECT llm('z', {{n, m}}) FROM ({PASSING}), (SELECT n AS m FROM many LIMIT 2)",
            {"p": 6000, "z": 12000},
        ),
        (
            f"SELECT llm('z', {{n}}) FROM (SELECT -1 - n AS n FROM numbers WHERE n < 2 "
            f"UNION ALL SELECT n FROM ({EVERY_NUMBER}) WHERE x > 11) LIMIT 30",
            {"i": 1000, "z": 30},
        ),
        (f"SELECT llm('z', {{n}}), x FROM ({EVERY_NUMBER}) LIMIT 3", {"i": 3, "z": 3}),
    ],
)
def test_counts_rows_that_answers_may_leave_out(asking, text, expected):
    # more than DuckDB looks at in one go
    asking.sql("CREATE TABLE many AS FROM range(6000) t(n)")
    calls = asking.explain(text).calls
    assert {each.call[5]: each.estimate.num_rows for each in calls} == expected
    assert {each.call[5]: each.estimate.num_prompts for each in calls} == expected


def test_keeps_conditions_above_a_limit(asking):
    rows = asking.explain(
        "SELECT * FROM (SELECT id FROM movies WHERE llm('q', {id}, return := 'bool') "
        "ORDER BY id LIMIT 20) WHERE id > 6"
    ).calls
    assert rows[0].estimate.num_rows == 8


def test_tells_how_predicates_are_ordered(asking):
    where = "llm('p', {id}) = 'x' AND llm('r', {id}) = 'x'"
    steps = asking.explain(f"SELECT id FROM movies WHERE {where}").steps
    expected = "the 2 predicates that ask go in the order that a sample of 32 rows suggests"
    assert sum(step.startswith(expected) for step in steps) == 1


def test_of_subqueries(asking):
    inner = "SELECT id, llm('i', {title}) AS s FROM movies"
    explained = asking.explain(f"SELECT llm('q', {{s}}), id FROM ({inner})")
    assert [c.estimate.tokens_are_exact for c in explained.calls] == [True, False]
    # what is asked once is estimated once
    explained = asking.explain(f"{inner} UNION ALL {inner}")
    assert [c.estimate.tokens_are_exact for c in explained.calls] == [True]
    assert [c.estimate.num_prompts for c in explained.calls] == [7]


def test_warnings_are_part_of_an_explanation(connection: duckdb.DuckDBPyConnection) -> None:
    class Warning(FakeRunner):
        def estimate(self, site: Site, counts: Counts) -> Estimate:
            return replace(super().estimate(site, counts), warning="too small a context")

    explained = Connection(connection, Warning(connection)).explain(ASK)
    assert "  warning:        too small a context" in str(explained).splitlines()
