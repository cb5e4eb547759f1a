# SPDX-License-Identifier: Apache-2.0
"""The model is asked about the rows that matter, and about no others."""

import pytest

from tests.tables.sql.fake_runner import FakeRunner
from vllm_relay.tables.sql import Connection

EVEN = "llm('even', {n}, return := 'bool')"
TENTH = "llm('tenth', {n}, return := 'bool')"


def by_number(question, fields):
    divisor = {"even": 2, "tenth": 10, "hundredth": 100}[question.text]
    value = fields["n"] % divisor == 0
    return value if question.output.type == "bool" else str(value)


def asked(connection, text, answer_of=None):
    """The numbers of rows asked, by question, and the rows of the result."""
    runner = FakeRunner(connection, answer_of) if answer_of else FakeRunner(connection)
    rows = Connection(connection, runner).sql(text).fetchall()
    counts: dict[str, int] = {}
    for question, _ in runner.asked:
        counts[question.text] = counts.get(question.text, 0) + 1
    return counts, rows


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SELECT llm('q', {id}) FROM movies WHERE type = 'Fresh'", {"q": 4}),
        ("SELECT llm('q', {title}) FROM movies", {"q": 7}),
        (
            "SELECT id FROM (SELECT * FROM movies ORDER BY id LIMIT 8) "
            "WHERE type = 'Fresh' AND llm('q', {id}) = 'x'",
            {"q": 4},
        ),
        ("SELECT llm('q', {id}) FROM movies LIMIT 3", {"q": 3}),
        ("SELECT llm('q', {id}) FROM movies LIMIT 0", {}),
        ("SELECT llm('q', {id}) FROM movies ORDER BY score LIMIT 3 OFFSET 4", {"q": 3}),
        ("SELECT llm('q', {id}) AS a FROM movies ORDER BY a LIMIT 3", {"q": 8}),
        ("SELECT id FROM movies QUALIFY row_number() OVER (ORDER BY llm('q', {id})) = 1", {"q": 8}),
        (
            "SELECT id, llm('q', {id}), count(*) OVER () FROM movies "
            "QUALIFY row_number() OVER (PARTITION BY type ORDER BY id) = 1",
            {"q": 4},
        ),
        (
            "SELECT id, llm('q', {id}) FROM movies "
            "QUALIFY row_number() OVER (PARTITION BY type ORDER BY id) = 1 LIMIT 2",
            {"q": 2},
        ),
        ("SELECT llm('q', {id}), upper(llm('q', {id})) FROM movies", {"q": 8}),
        ("SELECT avg(llm('q', {id}, return := 'int')) FROM movies WHERE id < 3", {"q": 2}),
        ("SELECT id FROM movies WHERE type = 'Fresh' OR llm('q', {id}) = 'x'", {"q": 4}),
        ("SELECT id FROM movies WHERE llm('q', {id}) = 'x' OR id < 4", {"q": 5}),
        ("SELECT id FROM movies WHERE (id < 4 AND llm('q', {id}) = 'x') OR id = 1", {"q": 2}),
        (
            "SELECT CASE WHEN id < 3 THEN 'a' WHEN id < 5 THEN llm('q', {id}) END FROM movies",
            {"q": 2},
        ),
        ("SELECT CASE WHEN id < 3 THEN 'a' ELSE llm('q', {id}) END FROM movies", {"q": 6}),
        ("SELECT CASE id WHEN 3 THEN 'a' WHEN 4 THEN llm('q', {id}) END FROM movies", {"q": 1}),
        ("SELECT if(id = 3, llm('q', {id}), 'b') FROM movies", {"q": 1}),
        ("SELECT coalesce(title, llm('q', {id})) FROM movies", {"q": 1}),
        ("SELECT ifnull(score, llm('q', {id}, return := 'float')) FROM movies", {"q": 1}),
        ("SELECT max(llm('q', {id})) FILTER (WHERE id > 6) FROM movies", {"q": 2}),
        ("SELECT CASE WHEN count(*) > 9 THEN max(llm('q', {id})) END FROM movies", {"q": 8}),
        (
            "SELECT CASE WHEN id = 1 THEN llm('o', {s: llm('i', {id})}) END FROM movies",
            {"o": 1, "i": 1},
        ),
        ("SELECT llm('g', {type}), count(*) FROM movies GROUP BY type", {"g": 4}),
        ("SELECT llm('g', {type}) FROM movies GROUP BY type HAVING count(*) > 1", {"g": 2}),
        (
            "SELECT llm('g', {n: count(*)}) FROM movies GROUP BY type ORDER BY type LIMIT 1",
            {"g": 1},
        ),
        (
            "SELECT m.id FROM movies m JOIN reviews r ON m.id = r.id AND llm('q', {body}) = 'x'",
            {"q": 4},
        ),
        (
            "WITH unused AS (SELECT llm('q', {id}) FROM movies) SELECT llm('r', {id}) FROM movies "
            "WHERE id = 1",
            {"r": 1},
        ),
        ("SELECT id FROM (SELECT id, llm('q', {title}) AS a FROM movies)", {}),
        ("SELECT a FROM (SELECT id, llm('q', {id}) AS a FROM movies) WHERE id > 6", {"q": 2}),
        (
            "SELECT a FROM (SELECT *, llm('q', {id}) AS a, llm('r', {id}) AS b FROM movies) s "
            "WHERE s.id > 6",
            {"q": 2},
        ),
        (
            "WITH s AS (SELECT id, llm('q', {id}) AS a, llm('r', {id}) FROM movies) "
            "SELECT a FROM s WHERE id < 3",
            {"q": 2},
        ),
        (
            "SELECT s.a FROM (SELECT id, llm('q', {id}) AS a FROM movies) s JOIN reviews r "
            "ON s.id = r.id WHERE r.stars > 1 AND s.id < 3",
            {"q": 2},
        ),
        (
            "SELECT s.a FROM reviews r LEFT JOIN (SELECT id, llm('q', {id}) AS a FROM movies) s "
            "ON s.id = r.id WHERE s.id IS NULL",
            {},
        ),
        (
            "SELECT a FROM (SELECT id, llm('q', {id}) AS a FROM movies LIMIT 4) WHERE id > 2",
            {"q": 2},
        ),
        (
            "SELECT a, n FROM (SELECT id, llm('q', {id}) AS a, count(*) OVER () AS n FROM movies) "
            "WHERE id > 2",
            {"q": 6},
        ),
        ("SELECT count(*) FROM (SELECT DISTINCT llm('q', {id}) FROM movies)", {"q": 8}),
        (
            "SELECT a FROM (SELECT id, llm('q', {id}) AS a FROM movies UNION ALL "
            "SELECT stars, llm('r', {id}) FROM reviews) WHERE id > 7",
            {"q": 1, "r": 5},
        ),
        (
            "SELECT a FROM (SELECT id, llm('q', {id}) AS a FROM movies) "
            "WHERE id IN (SELECT id FROM reviews WHERE stars < 40)",
            {"q": 2},
        ),
        (
            "SELECT * FROM (SELECT id, llm('q', {id}) AS a FROM movies) s "
            "WHERE EXISTS (FROM reviews r WHERE r.id = s.id)",
            {"q": 4},
        ),
        (
            "SELECT * FROM (SELECT type, max(llm('q', {id})) AS a, count(*) AS n FROM movies "
            "GROUP BY type) WHERE type IN (SELECT 'Fresh') AND n > 1",
            {"q": 4},
        ),
        (
            "SELECT * FROM (SELECT id + 1 AS k, max(llm('q', {id})) FROM movies GROUP BY k) "
            "WHERE k < 4",
            {"q": 2},
        ),
        (
            "SELECT * FROM (SELECT id AS k, type, max(llm('q', {id})) FROM movies GROUP BY ALL) "
            "WHERE k < 4",
            {"q": 3},
        ),
        (
            "SELECT * FROM (SELECT type, llm('q', {type}) FROM movies GROUP BY 1) "
            "WHERE type = 'Fresh'",
            {"q": 1},
        ),
        (
            "SELECT * FROM (SELECT id, max(llm('q', {id})) FROM movies GROUP BY ROLLUP (id)) "
            "WHERE id < 4",
            {"q": 8},
        ),
        (
            "SELECT * FROM (SELECT type, max(llm('q', {id})) AS a, max(score) AS b FROM movies "
            "GROUP BY type) WHERE b > 4",
            {"q": 8},
        ),
        (
            "SELECT * FROM (SELECT score, max(llm('q', {id})) AS a FROM movies GROUP BY score) "
            "WHERE score > 4",
            {"q": 3},
        ),
        (
            "SELECT * FROM (SELECT score::DOUBLE AS s, max(llm('q', {id})) AS a FROM movies "
            "GROUP BY s) WHERE s > 4",
            {"q": 3},
        ),
        (
            "SELECT * FROM (SELECT DISTINCT id, llm('q', {id}) FROM movies) WHERE id < 4",
            {"q": 3},
        ),
        (
            "SELECT * FROM (SELECT DISTINCT ON (type) id, llm('q', {id}) FROM movies) WHERE id < 4",
            {"q": 2},
        ),
    ],
)
def test_counts(connection, text, expected):
    counts, _ = asked(connection, text)
    assert counts == expected


def test_a_limit_ends_the_questions(connection):
    text = f"SELECT n FROM numbers WHERE {TENTH} LIMIT 10"
    counts, rows = asked(connection, text, by_number)
    assert rows == [(n,) for n in range(0, 100, 10)]
    # 91 rows hold the ten; chunks grow no faster than the rows that were seen
    assert 91 <= counts["tenth"] <= 200


def test_a_limit_asks_about_all_if_too_few_pass(connection):
    text = f"SELECT n FROM numbers WHERE {TENTH} AND n < 500 LIMIT 70 OFFSET 3"
    counts, rows = asked(connection, text, by_number)
    assert rows == [(n,) for n in range(30, 500, 10)]
    assert counts == {"tenth": 500}


def test_rows_that_the_limit_takes_are_asked_about_last(connection):
    text = f"SELECT n, llm('even', {{n}}) FROM numbers WHERE {TENTH} LIMIT 5"
    counts, _ = asked(connection, text, by_number)
    assert counts["even"] == 5


@pytest.mark.parametrize("predicates", [f"{EVEN} AND {TENTH}", f"{TENTH} AND {EVEN}"])
def test_the_predicate_that_leaves_out_more_goes_first(connection, predicates):
    text = f"SELECT n FROM numbers WHERE {predicates} ORDER BY n"
    counts, rows = asked(connection, text, by_number)
    assert rows == [(n,) for n in range(0, 1000, 10)]
    assert counts["tenth"] == 1000
    # 100 passed, and 32 were the sample
    assert 100 <= counts["even"] <= 132


def test_a_predicate_with_few_prompts_goes_first(connection):
    text = (
        f"SELECT n FROM numbers WHERE {TENTH} AND llm('few', {{n: n % 2}}, return := 'bool') "
        "ORDER BY n"
    )

    def answer_of(question, fields):
        return fields["n"] == 0 if question.text == "few" else by_number(question, fields)

    counts, rows = asked(connection, text, answer_of)
    assert rows == [(n,) for n in range(0, 1000, 10)]
    assert counts["few"] == 2
    assert 500 <= counts["tenth"] <= 532


def test_a_limit_with_two_predicates(connection):
    text = f"SELECT n FROM numbers WHERE {EVEN} AND {TENTH} LIMIT 4"
    counts, rows = asked(connection, text, by_number)
    assert rows == [(0,), (10,), (20,), (30,)]
    # the sample has the four
    assert counts == {"tenth": 32, "even": 32}


def test_few_rows_are_not_sampled(connection):
    text = f"SELECT n FROM numbers WHERE n < 100 AND {EVEN} AND {TENTH}"
    counts, _ = asked(connection, text, by_number)
    assert counts == {"even": 100, "tenth": 50}


def test_random_values_are_the_same_wherever_they_are_used(connection):
    text = (
        "SELECT x, llm('q', {x}) AS a FROM (SELECT random() AS x FROM numbers) "
        "WHERE x < 0.5 OR llm('q', {x}) = 't1'"
    )
    runner = FakeRunner(connection)
    result = Connection(connection, runner).sql(text)
    known = {fields["x"]: value for fields, value in runner.answers("q")}
    rows = result.fetchall()
    assert len(rows) > 300
    assert all(known[x] == answer for x, answer in rows)
    assert all(x < 0.5 or answer == "t1" for x, answer in rows)
    assert result.fetchall() == rows


def test_random_values_of_the_same_select(connection):
    runner = FakeRunner(connection)
    text = (
        "SELECT n, x, llm('q', {x}) AS a, x + 1 FROM (SELECT n, random() AS x FROM numbers) "
        "WHERE random() < 0.5 OR llm('r', {n}) = 't1'"
    )
    rows = Connection(connection, runner).sql(text).fetchall()
    known = {fields["x"]: value for fields, value in runner.answers("q")}
    assert all(known[x] == answer and more == x + 1 for _, x, answer, more in rows)
    passed = {fields["n"] for fields, value in runner.answers("r") if value == "t1"}
    not_asked = set(range(1000)) - {fields["n"] for fields, _ in runner.answers("r")}
    assert {row[0] for row in rows} == passed | not_asked
