# SPDX-License-Identifier: Apache-2.0
"""Queries give what they give with llm() as an ordinary function."""

from datetime import timedelta

import pytest

from tests.tables.sql.fake_runner import FakeRunner, hashed_answer
from tests.tables.sql.oracle import plain_rows
from vllm_relay.tables.sql import Connection

ASK = "llm('t', {title})"
PASS = "llm('p', {info, id}, return := 'bool')"
RATE = "llm('r', {info}, return := 'int')"

ORDERED = [
    f"SELECT * REPLACE (upper({ASK}) AS title) FROM movies",
    f"SELECT id AS i, * EXCLUDE (info) REPLACE ({ASK} AS title, score + 1 AS score) FROM movies",
    f"SELECT m.* REPLACE ({ASK} AS info), r.stars FROM movies m JOIN reviews r ON m.id = r.id "
    "ORDER BY r.stars",
    f"SELECT * LIKE '%i%', {ASK} AS a FROM movies",
    f"SELECT * NOT LIKE '%i%', {ASK} AS a FROM movies",
    f"SELECT * SIMILAR TO 't.*', {ASK} AS a FROM movies",
    f"SELECT count(*) FROM movies WHERE {PASS}",
    f"SELECT id, {ASK} FROM movies QUALIFY row_number() OVER (PARTITION BY type ORDER BY id) = 1",
    f"SELECT id, {ASK} AS a, row_number() OVER (ORDER BY score, id) AS n, n + 1, "
    "count(*) OVER () AS all_of_them FROM movies WHERE id > 1 QUALIFY n > 2 ORDER BY n",
    f"SELECT id, {ASK} AS a, rank() OVER (ORDER BY id) AS n FROM movies QUALIFY n > 2 "
    "ORDER BY a, id LIMIT 3",
    f"SELECT id, {ASK} AS a FROM movies QUALIFY row_number() OVER (ORDER BY id DESC) > 2 "
    "ORDER BY id LIMIT 3 OFFSET 1",
    "SELECT id, llm('q', {s: sum(id) OVER (ORDER BY id)}) AS k FROM movies "
    "QUALIFY k IS NOT NULL AND id > 2",
    "SELECT id, llm('q', {s: count(*) OVER ()}) AS k FROM movies "
    "QUALIFY row_number() OVER (ORDER BY id) > 2",
    f"SELECT id, {ASK} AS a, count(*) OVER w AS n FROM movies WINDOW w AS (PARTITION BY type) "
    "QUALIFY row_number() OVER (PARTITION BY type ORDER BY id) = 1 ORDER BY id",
    "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r WHERE n < 5) "
    "SELECT n, llm('c', {n}) FROM r ORDER BY n",
    "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 5), "
    "s AS (SELECT n, llm('c', {n}) AS a FROM r) SELECT * FROM s JOIN movies m ON s.n = m.id "
    "ORDER BY n",
    "SELECT * FROM (WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r WHERE n < 5) "
    "SELECT n, llm('c', {n}) AS a FROM r) ORDER BY n",
    *(
        f"SELECT * FROM (SELECT {constant} AS k, count({ASK}) AS n FROM movies GROUP BY ALL) "
        f"WHERE k = 7"
        for constant in ("1 + 1", "NULL", "(SELECT 8)")
    ),
    f"SELECT id, {ASK} FROM movies LIMIT 50%",
    f"SELECT id, CASE WHEN row_number() OVER (ORDER BY -id) < 3 THEN {ASK} END FROM movies "
    "ORDER BY id",
    f"SELECT id FROM movies QUALIFY row_number() OVER (PARTITION BY type ORDER BY id) = 1 "
    f"AND {PASS} ORDER BY id",
    f"SELECT s.id, r.stars, a FROM ((SELECT id, {ASK} AS a FROM movies) s RIGHT JOIN reviews r "
    "ON s.id = r.id) WHERE a IS NULL ORDER BY r.stars",
    f"SELECT q FROM ((SELECT id, {ASK} AS a FROM movies) s(p, q) JOIN reviews r ON p = r.id) "
    "ORDER BY r.stars",
    f"SELECT id, {ASK} FROM movies",
    f"SELECT id, {ASK} AS a FROM movies WHERE type = 'Fresh'",
    f"SELECT {ASK} || '!' AS a, id FROM movies WHERE score > 2 OR type IS NULL",
    f"SELECT id FROM movies WHERE {PASS}",
    f"SELECT id, {RATE} AS r FROM movies WHERE NOT {PASS} AND id > 1",
    f"SELECT id FROM movies WHERE {RATE} > 1 AND {PASS}",
    f"SELECT id FROM movies WHERE type = 'Fresh' OR {PASS}",
    f"SELECT id FROM movies WHERE (type = 'Fresh' AND {RATE} > 1) OR (score > 2 AND {PASS})",
    f"SELECT id FROM movies WHERE ({RATE} > 1) IS NULL OR {PASS}",
    f"SELECT id FROM movies WHERE {RATE} > 1 OR {PASS} OR id = 4",
    f"SELECT id, CASE WHEN id < 3 THEN {ASK} WHEN {PASS} THEN 'p' ELSE {RATE}::VARCHAR END "
    "FROM movies",
    f"SELECT id, CASE type WHEN 'Fresh' THEN {ASK} WHEN {ASK} THEN 'x' END FROM movies",
    f"SELECT id, COALESCE(title, {ASK}), ifnull(score, {RATE}) FROM movies",
    f"SELECT id, if(id < 4, {ASK}, 'no'), if({PASS}, 1, {RATE}) FROM movies",
    f"SELECT id, x, x || {ASK} FROM (SELECT *, {ASK} AS x FROM movies) WHERE id > 2",
    f"SELECT id, {RATE} AS r FROM movies ORDER BY r DESC NULLS LAST, id",
    f"SELECT id FROM movies ORDER BY {RATE} + id, id DESC",
    f"SELECT id, {ASK} FROM movies ORDER BY score NULLS FIRST, id LIMIT 3",
    f"SELECT id, {ASK} FROM movies ORDER BY 1 DESC LIMIT 3 OFFSET 2",
    f"SELECT id, {ASK} FROM movies LIMIT 3",
    f"SELECT id, {ASK} FROM movies LIMIT 0",
    f"SELECT id, {ASK} FROM movies WHERE {PASS} LIMIT 2 OFFSET 1",
    f"SELECT id, {ASK} FROM movies WHERE {PASS} ORDER BY -id LIMIT 2",
    f"SELECT -id AS id, {ASK} FROM movies ORDER BY id LIMIT 3",
    f"SELECT -id AS id, {ASK} FROM movies WHERE id > 3 ORDER BY id + 0",
    "SELECT id * 2 AS twice, twice + 1 AS more, llm('m', {more}) FROM movies WHERE twice > 4",
    f"SELECT id AS b, {ASK} AS a FROM movies WHERE a > 't1'",
    f"SELECT id, {ASK} AS a, a || a AS aa, llm('x', {{a}}) FROM movies",
    "SELECT id, llm('o', {s: llm('i', {info}), id}) FROM movies",
    f"SELECT id FROM movies WHERE type = 'Fresh' OR llm('o', {{s: {ASK}}}) > 't2'",
    "SELECT id, llm('e', {x: score * 2 + id, 'long name': upper(title)}) FROM movies",
    "SELECT m.id, m.title, llm('j', {m.title, r.body}) FROM movies m JOIN reviews r ON m.id = r.id "
    "ORDER BY m.id, r.stars",
    "SELECT m.id, r.id, llm('j', {m.title, r.body}) FROM movies m LEFT JOIN reviews r ON "
    "m.id = r.id WHERE m.score > 1 ORDER BY 1, r.stars",
    "SELECT id, m.id, body, llm('j', {id, body}) FROM movies m FULL JOIN reviews USING (id) "
    "ORDER BY id, stars",
    "SELECT *, llm('j', {title, body}) FROM movies m JOIN reviews r USING (id) ORDER BY stars",
    "SELECT *, llm('j', {title, body}) FROM movies m JOIN reviews r ON m.id = r.id ORDER BY stars",
    "SELECT r.*, llm('j', {title, body}) FROM movies m NATURAL JOIN reviews r ORDER BY stars",
    "SELECT m.id, stars FROM movies m JOIN reviews r ON m.id = r.id AND "
    "llm('j', {title, body}, return := 'bool') ORDER BY stars",
    "SELECT m.id, stars FROM movies m JOIN reviews r ON llm('j', {title, body}, return := 'bool') "
    "LEFT JOIN movies n ON n.id = r.id ORDER BY m.id, stars",
    'SELECT "the id", llm(\'u\', {"select", "ÜnïCODE"}) FROM "odd names" WHERE "the ID" > 2',
    "SELECT ID, Llm('c', {TITLE}) FROM Movies WHERE Id > 3",
    f"SELECT * EXCLUDE (info), {ASK} FROM movies",
    f"SELECT * REPLACE (upper(title) AS title), {ASK}, title FROM movies",
    f"SELECT movies.*, main.movies.title, {ASK} FROM main.movies",
    f"SELECT COLUMNS('t.*'), {ASK} FROM movies",
    f"SELECT id, row_number() OVER (ORDER BY {RATE}, id) FROM movies ORDER BY id",
    f"SELECT id, sum({RATE}) OVER (PARTITION BY type ORDER BY id) FROM movies ORDER BY id",
    f"SELECT id FROM movies QUALIFY row_number() OVER (PARTITION BY {ASK} ORDER BY id) = 1 "
    "ORDER BY id",
    f"SELECT id FROM movies WINDOW w AS (ORDER BY {RATE}, id) QUALIFY row_number() OVER w < 3 "
    "ORDER BY id",
    f"SELECT id, {ASK}, (SELECT max(stars) FROM reviews r WHERE r.id = movies.id) FROM movies",
    f"SELECT id, {ASK} FROM movies m WHERE EXISTS (SELECT 1 FROM reviews r WHERE r.id = m.id)",
    f"SELECT id FROM movies m WHERE id IN (SELECT r.id FROM reviews r WHERE r.id = m.id) OR {PASS}",
    "SELECT id FROM movies WHERE id IN (SELECT stars / 10 FROM reviews WHERE "
    "llm('b', {body}, return := 'bool'))",
    "SELECT id, (SELECT max(llm('b', {body})) FROM reviews) FROM movies",
    "SELECT id FROM movies WHERE EXISTS (SELECT 1 FROM reviews WHERE "
    f"llm('b', {{body}}, return := 'int') = 4) OR {PASS}",
    f"WITH a AS (SELECT id, {ASK} AS x FROM movies), b AS (SELECT * FROM a WHERE id > 2) "
    "SELECT a.id, b.x, llm('w', {b.x}) FROM a JOIN b USING (id) ORDER BY id",
    "WITH a AS MATERIALIZED (SELECT id FROM movies) SELECT id, llm('w', {id}) FROM a LIMIT 3",
    f"WITH unused AS (SELECT {ASK} FROM movies) SELECT id, {PASS} FROM movies",
    f"SELECT id, {ASK} AS x FROM movies UNION ALL SELECT stars, llm('b', {{body}}) FROM reviews "
    "ORDER BY 1, 2",
    f"(SELECT id, {ASK} FROM movies ORDER BY id DESC LIMIT 2) UNION ALL "
    "SELECT id, body FROM reviews ORDER BY 1, 2",
    "SELECT llm('none', {a: 1}), 5",
    f"SELECT #2, id FROM (SELECT id, {ASK} AS a FROM movies) WHERE #1 > 2 AND id < 7",
    f"SELECT id, s FROM (SELECT id, {ASK} AS a FROM movies) s WHERE id < 7",
    f"SELECT s.id, a FROM (SELECT *, {ASK} AS a FROM movies) s, reviews r WHERE s.id = r.id AND "
    "s.type IS NOT NULL AND upper(s.title) < 'F' ORDER BY s.id, stars",
    f"SELECT id, count(*) FROM (SELECT id, {ASK} AS a FROM movies) GROUP BY ALL ORDER BY ALL",
    f"SELECT (SELECT max(a) FROM (SELECT {ASK} AS a FROM movies)), id FROM movies",
    f"SELECT id, CASE WHEN id < 3 THEN 1 ELSE if(id > 5, {RATE}, llm('e', {{id}}, "
    "return := 'int')) END FROM movies",
    f"SELECT id, CASE if(id > 5, {RATE}, 2) WHEN 2 THEN {ASK} ELSE {ASK} || 'x' END FROM movies",
    f"SELECT id, CASE id WHEN 2 THEN if({PASS}, {ASK}, 'n') WHEN {RATE} THEN 'r' END FROM movies",
    f"SELECT unnest(numbers) AS n, {ASK}, id FROM movies LIMIT 3 OFFSET 1",
    f"SELECT unnest(m.numbers), {ASK}, m.id FROM movies m ORDER BY 1, id DESC LIMIT 4",
    f"SELECT type, m.type, max({ASK}) FROM movies m GROUP BY m.type ORDER BY m.type",
    f"SELECT m.type, max({ASK}), upper(m.type) FROM movies m GROUP BY type ORDER BY 1",
    "SELECT id, m.id, r.id, llm('u', {m.id, r: r.id}) FROM movies m FULL JOIN reviews r "
    "USING (id) ORDER BY id, stars",
    "SELECT m.id, id, llm('g', {m.id, n: count(*)}) FROM movies m FULL JOIN reviews r USING (id) "
    "GROUP BY m.id, id ORDER BY id",
    "SELECT type FROM movies GROUP BY type HAVING max(id) > 2 AND "
    "llm('g', {n: sum(id), type}, return := 'bool') OR type IS NULL ORDER BY type",
    f"SELECT type FROM movies GROUP BY type HAVING max(id) > 2 AND max({RATE}) > 1 ORDER BY type",
    f"SELECT s.id, s.a FROM (SELECT id, {ASK} AS a FROM movies) s LEFT JOIN reviews r ON "
    "r.id = s.id WHERE s.id > 3 AND (r.stars > 1 OR r.stars IS NULL) ORDER BY 1, r.stars",
    f"SELECT id, a FROM (SELECT m.id, {ASK} AS a FROM movies m RIGHT JOIN reviews r ON "
    "m.id = r.id) WHERE id IS NULL OR id > 1 ORDER BY id, a",
    f"SELECT id, a FROM (SELECT unnest(numbers) AS n, id, {ASK} AS a FROM movies) WHERE id > 2 "
    "ORDER BY n",
    f"FROM movies SELECT id, {ASK}",
    f"SELECT id, {ASK} FROM (VALUES (1, 'x'), (2, NULL)) v(id, title)",
    "SELECT id, n, llm('n', {n}) FROM movies, unnest(numbers) u(n) ORDER BY id, n",
    "SELECT id, n, llm('n', {n}) FROM movies, LATERAL (SELECT unnest(numbers)) u(n) ORDER BY n",
    "SELECT s.title, llm('s', {s.title, s.id}) FROM (SELECT {title: title, id: id} AS s "
    "FROM movies)",
    f"SELECT rowid, {ASK} FROM movies WHERE rowid > 2",
    f"SELECT movies, {ASK} FROM movies",
    f"SELECT id, list_transform(numbers, lambda x: x + 1), {ASK} FROM movies",
    f"SELECT list_filter(numbers, lambda id: id > 4), {ASK} FROM movies",
    f"SELECT id, {RATE} BETWEEN 1 AND 3, {ASK} IN ('t1', 't2'), {ASK} LIKE '%1' FROM movies",
    f"SELECT type, {RATE} AS r FROM movies ORDER BY ALL",
    f"SELECT id, {ASK} FROM movies LIMIT 1 + 1",
    f"SELECT type, count(*) AS n FROM movies GROUP BY type HAVING n > 1 AND "
    f"avg({RATE}) > 1 ORDER BY type",
    f"SELECT {ASK} AS a, count(*) FROM movies GROUP BY a ORDER BY a",
    f"SELECT {ASK}, count(*) FROM movies GROUP BY 1 ORDER BY 1",
    f"SELECT {ASK} AS a, count(*) AS n FROM movies GROUP BY ALL ORDER BY ALL",
    f"SELECT upper({ASK}) AS a, max(id) FROM movies GROUP BY upper({ASK}) ORDER BY a",
    f"SELECT type, avg({RATE}) FILTER (WHERE id > 2), count(*) FROM movies GROUP BY type "
    "ORDER BY type",
    f"SELECT count(*) FILTER (WHERE {PASS}), sum({RATE}), count(DISTINCT {ASK}) FROM movies",
    f"SELECT CASE WHEN count(*) > 2 THEN sum({RATE}) ELSE min({RATE}) END FROM movies "
    "GROUP BY type ORDER BY type",
    f"SELECT type, string_agg({ASK}, ',' ORDER BY id) FROM movies GROUP BY type ORDER BY type",
    f"SELECT DISTINCT {ASK} AS a, type FROM movies ORDER BY a, type",
    f"SELECT DISTINCT ON ({ASK}) {ASK}, id FROM movies ORDER BY {ASK}, id",
    f"SELECT type, {ASK} AS a, count(*) FROM movies GROUP BY ROLLUP (type, a) ORDER BY ALL",
    "SELECT type, llm('g', {type}), count(*) FROM movies GROUP BY type ORDER BY type",
    "SELECT type, llm('g', {all: string_agg(info, ',' ORDER BY id)}) AS s FROM movies "
    "GROUP BY type ORDER BY type",
    "SELECT llm('g', {n: count(*)}) FROM movies",
    "SELECT type AS t, count(*) AS n, llm('g', {t, n}) AS a FROM movies GROUP BY t HAVING n > 1 "
    "ORDER BY a, t",
    "SELECT type FROM movies GROUP BY type HAVING llm('g', {n: sum(id), type}, return := 'bool') "
    "ORDER BY type",
    f"SELECT type, llm('g', {{m: max({ASK})}}) FROM movies WHERE {PASS} GROUP BY type ORDER BY 1",
    "SELECT type || '!', llm('g', {t: upper(type), n: count(*)}) FROM movies GROUP BY type "
    "ORDER BY count(*) DESC, type LIMIT 2",
    "SELECT count(*) OVER (), type, llm('g', {type}) FROM movies GROUP BY type ORDER BY type",
    f"SELECT a, count(*) FROM (SELECT {ASK} AS a, {RATE} AS b FROM movies) WHERE a > 't0' "
    "GROUP BY a ORDER BY a",
    f"SELECT s.a, r.body FROM (SELECT id, {ASK} AS a FROM movies) s JOIN reviews r ON s.id = r.id "
    "WHERE s.a > 't1' AND r.stars > 10 AND s.id < 6 ORDER BY stars",
]
ORDERED += [
    f"SELECT m.id, r.stars FROM movies m LEFT JOIN reviews r ON m.id = r.id AND {ASK} > 't2' "
    "ORDER BY ALL",
    "SELECT m.id, r.stars FROM movies m LEFT JOIN reviews r ON llm('q', {body}) = 't1' "
    "ORDER BY ALL",
    "SELECT id, range FROM movies m, range(llm('q', {id: 1}, return := 'int')) ORDER BY ALL",
    "SELECT list_transform(numbers, lambda x: llm('q', {y: x})) FROM movies ORDER BY id",
    "SELECT id, (SELECT llm('q', {body, m.title}) FROM reviews r ORDER BY stars LIMIT 1) "
    "FROM movies m ORDER BY id",
    "SELECT id, (SELECT max(llm('q', {body, m.title})) FROM reviews r WHERE r.id = m.id) "
    "FROM movies m ORDER BY id",
    "SELECT llm('q', {s: (SELECT max(llm('i', {body})) FROM reviews)}) FROM movies",
    "WITH a AS (SELECT 1 AS x) SELECT * FROM (WITH a AS (SELECT llm('q', {x}) AS y FROM a) "
    "SELECT * FROM a) UNION ALL SELECT x::VARCHAR FROM a",
    "SELECT type, llm('q', {n: count(*)}) FROM movies GROUP BY ROLLUP (type) ORDER BY ALL",
    "SELECT #1, llm('q', {id}) FROM movies ORDER BY id",
    "SELECT llm('q', {x: #2}) FROM movies ORDER BY id",
    "SELECT min(COLUMNS('i.*')), max(llm('q', {id})) FROM movies",
    "SELECT id FROM movies ORDER BY id LIMIT llm('q', {a: 1}, return := 'int')",
    "SELECT id, llm('q', {id}) FROM movies UNION ALL SELECT id, body FROM reviews ORDER BY ALL "
    "LIMIT llm('n', {a: 1}, return := 'int')",
    "SELECT id FROM movies m WHERE id > 2 AND EXISTS (SELECT 1 FROM reviews r WHERE "
    "llm('q', {body, m.title}) = 't1') ORDER BY id",
    "SELECT id FROM movies SEMI JOIN reviews USING (id) WHERE llm('q', {title}) > 't1' ORDER BY id",
    "WITH a AS (SELECT id, llm('q', {id}) AS x FROM movies) SELECT r.stars, x, x IS NULL FROM "
    "reviews r LEFT JOIN a ON a.id = r.id ORDER BY x, r.stars",
    "SELECT x AS y, count(*) FROM (SELECT llm('q', {id}) AS x FROM movies) GROUP BY x ORDER BY y",
    "SELECT *, x || 'b' AS z FROM (SELECT id, llm('q', {id}) AS x FROM movies) s ORDER BY z, id",
    "SELECT s.* FROM (SELECT id, llm('q', {id}) AS x FROM movies) s JOIN reviews r USING (id) "
    "ORDER BY s.x, stars",
    "SELECT id, x FROM (SELECT id, llm('q', {id}) AS x FROM movies) ORDER BY x DESC, id LIMIT 3",
    "SELECT x FROM (SELECT * FROM (SELECT id, llm('q', {id}) AS x FROM movies) WHERE id > 2) "
    "WHERE x > 't1' ORDER BY id",
    "SELECT DISTINCT x FROM (SELECT id, llm('q', {id}) AS x FROM movies) ORDER BY x",
    "SELECT x FROM (SELECT id, llm('q', {id}) AS x FROM movies) UNION SELECT 't9' ORDER BY x",
    "SELECT a.x, b.x FROM (SELECT id, llm('q', {id}) AS x FROM movies) a JOIN (SELECT id, "
    "llm('r', {id}) AS x FROM movies) b ON a.id = b.id ORDER BY a.id",
    "SELECT max(x), min(s.x) FROM (SELECT id, llm('q', {id}) AS x FROM movies) s WHERE s.x > 't0'",
    "SELECT id, llm('o', {x}) FROM (SELECT id, llm('q', {id}) AS x FROM movies) ORDER BY id",
    "SELECT s.id, x FROM (SELECT *, llm('t', {title}) AS x FROM movies) s RIGHT JOIN reviews r "
    "ON r.id = s.id AND s.x IS NOT NULL ORDER BY score, s.id, stars LIMIT 3",
]
BAGS = [
    f"SELECT {ASK} FROM movies UNION SELECT llm('b', {{body}}) FROM reviews",
    f"SELECT DISTINCT {ASK} FROM movies WHERE {PASS}",
    "SELECT m.id, stars FROM movies m, reviews r WHERE llm('j', {title, body}, return := 'bool') "
    "AND m.id < r.id",
    f"SELECT type, max({ASK}) FROM movies GROUP BY type",
    "FROM movies m ASOF JOIN reviews r ON m.id >= r.id AND llm('q', {body}) = 't1'",
]


def check(connection, text, is_ordered):
    expected = plain_rows(connection, text, hashed_answer)
    rows = Connection(connection, FakeRunner(connection)).sql(text).fetchall()
    if not is_ordered:
        rows, expected = sorted(rows, key=repr), sorted(expected, key=repr)
    assert rows == expected


@pytest.mark.parametrize(
    ("source", "condition", "either"),
    [
        (
            "(VALUES (INTERVAL 30 DAY, 1), (INTERVAL 1 MONTH, 2)) v(c, i)",
            "datepart('month', c) = 1",
            timedelta(days=30),
        ),
        (
            "(SELECT c COLLATE NOCASE AS c, i FROM (VALUES ('A', 1), ('a', 2)) v(c, i))",
            "ascii(c) = 97",
            "a",
        ),
    ],
)
def test_a_group_has_all_its_rows_whichever_of_equal_values_it_shows(
    connection, source, condition, either
):
    """Values that are equal and differ: DuckDB shows one of them, and not always the same."""
    text = (
        f"SELECT * FROM (SELECT c, count(llm('q', {{i}}, return := 'int')) AS n FROM {source} "
        f"GROUP BY c) WHERE {condition}"
    )
    rows = Connection(connection, FakeRunner(connection)).sql(text).fetchall()
    assert rows in ([], [(either, 2)])


@pytest.mark.parametrize("text", ORDERED)
def test_rows_in_order(connection, text):
    check(connection, text, is_ordered=True)


@pytest.mark.parametrize("text", BAGS)
def test_rows_in_any_order(connection, text):
    check(connection, text, is_ordered=False)
