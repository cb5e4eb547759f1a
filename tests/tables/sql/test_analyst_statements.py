# SPDX-License-Identifier: Apache-2.0
"""Statements of an analyst: rows are those of an ordinary function, prompts are the fewest."""

import duckdb
import pytest

from tests.tables.sql.fake_runner import FakeRunner, hashed_answer
from tests.tables.sql.oracle import plain_rows
from vllm_relay.tables.sql import Connection

TABLES = """
CREATE TABLE papers AS SELECT range AS id, 2000 + range % 20 AS year, 'topic ' || (range % 7) AS
    topic, 'title ' || range AS title, (range * 7919) % 601 AS score, range % 40 AS author
    FROM range(600);
CREATE TABLE authors AS SELECT range AS author, 'name ' || range AS name, 'land ' || (range % 5) AS
    land FROM range(40);
CREATE TABLE picks AS SELECT range * 100 AS id, range AS place FROM range(3);
CREATE TABLE reviews AS SELECT range % 300 AS id, 'body ' || range AS body, range % 5 AS stars
    FROM range(200);
CREATE TABLE kept (id BIGINT, a VARCHAR);
"""
A = "llm('q', {title})"
IS = "llm('p', {title}, return := 'bool')"
WITH_A = f"WITH a AS (SELECT id, year, topic, score, author, {A} AS x FROM papers)"

# a statement, and a query or a number of the fewest prompts
STATEMENTS = [
    # limits
    (f"SELECT id, {A} FROM papers LIMIT 10", 10),
    (f"SELECT id, {A} FROM papers ORDER BY score, id LIMIT 10", 10),
    (f"SELECT id, {A} FROM papers ORDER BY score, id LIMIT 5 OFFSET 20", 5),
    (f"{WITH_A} SELECT * FROM a LIMIT 10", 10),
    (f"{WITH_A} SELECT id, x FROM a ORDER BY score, id LIMIT 10", 10),
    (f"{WITH_A} SELECT id, upper(x) AS u FROM a WHERE year = 2003 ORDER BY id LIMIT 4", 4),
    (f"SELECT * FROM (SELECT id, {A} AS x FROM papers) ORDER BY id DESC LIMIT 3", 3),
    (f"SELECT id, x || '!' FROM (SELECT id, {A} AS x FROM papers ORDER BY score, id LIMIT 7)", 7),
    (f"SELECT p.id, name, {A} FROM papers p JOIN authors USING (author) ORDER BY score, p.id "
     "LIMIT 6", 6),
    (f"{WITH_A} SELECT a.id, name, x FROM a JOIN authors USING (author) ORDER BY a.score, a.id "
     "LIMIT 6", 6),
    ("SELECT topic, llm('g', {topic, n: count(*)}) FROM papers GROUP BY topic ORDER BY count(*) "
     "DESC, topic LIMIT 2", 2),
    # one round of 64
    (f"SELECT id FROM papers WHERE {IS} ORDER BY id LIMIT 3", 64),
    (f"SELECT id FROM papers WHERE {IS} AND year > 2009 ORDER BY id LIMIT 3", 64),
    (f"WITH f AS (SELECT id FROM papers WHERE {IS} ORDER BY id LIMIT 3) SELECT * FROM f", 64),
    (f"SELECT id, llm('r', {{id}}) FROM papers WHERE {IS} ORDER BY id LIMIT 3", 64 + 3),
    (f"SELECT id FROM (SELECT id, {IS} AS good FROM papers) WHERE good ORDER BY id LIMIT 3", 64),
    # joins
    (f"SELECT p.id, place, {A} FROM papers p JOIN picks USING (id) ORDER BY id", 3),
    (f"{WITH_A} SELECT a.id, x FROM a JOIN picks ON a.id = picks.id ORDER BY 1", 3),
    (f"{WITH_A} SELECT picks.id, x FROM picks LEFT JOIN a ON a.id = picks.id ORDER BY 1", 3),
    (f"SELECT p.id FROM papers p JOIN picks k ON p.id = k.id WHERE {IS} ORDER BY 1", 3),
    (f"SELECT p.id FROM papers p JOIN picks k ON p.id = k.id AND {IS} ORDER BY 1", 3),
    (f"SELECT p.id FROM papers p, picks k WHERE p.id = k.id AND {IS} ORDER BY 1", 3),
    (f"{WITH_A} SELECT a.id FROM a JOIN picks USING (id) WHERE x > 't1' ORDER BY 1", 3),
    (f"SELECT id FROM papers WHERE id IN (SELECT id FROM picks) AND {IS} ORDER BY 1", 3),
    (f"SELECT id FROM papers p WHERE EXISTS (FROM picks k WHERE k.id = p.id) AND {IS} ORDER BY 1",
     3),
    (f"{WITH_A} SELECT id, x FROM a WHERE id IN (SELECT id FROM picks) ORDER BY 1", 3),
    (f"{WITH_A} SELECT id, x FROM a SEMI JOIN picks USING (id) ORDER BY 1", 3),
    (f"SELECT p.id, {A} FROM papers p ANTI JOIN reviews r ON p.id = r.id WHERE year = 2000 "
     "ORDER BY 1", "SELECT count(*) FROM papers WHERE year = 2000 AND id NOT IN (SELECT id FROM "
     "reviews)"),
    ("SELECT k.id, llm('j', {title, body}) FROM picks k JOIN papers USING (id) JOIN reviews "
     "USING (id) ORDER BY 1", "SELECT count(*) FROM picks JOIN reviews USING (id)"),
    ("SELECT k.id FROM picks k LEFT JOIN reviews r ON r.id = k.id AND "
     "llm('b', {body}, return := 'bool') ORDER BY ALL",
     "SELECT count(*) FROM picks JOIN reviews USING (id)"),
    (f"SELECT a.land, count(*) FROM papers p JOIN authors a USING (author) WHERE {IS} AND "
     "year = 2001 GROUP BY ALL ORDER BY ALL", "SELECT count(*) FROM papers WHERE year = 2001"),
    # CTEs
    (f"{WITH_A} SELECT count(*) FROM a", 0),
    (f"{WITH_A} SELECT id, score FROM a ORDER BY id LIMIT 3", 0),
    (f"{WITH_A}, b AS (SELECT id, x FROM a WHERE year = 2005) SELECT * FROM b WHERE id < 100 "
     "ORDER BY id", "SELECT count(*) FROM papers WHERE year = 2005 AND id < 100"),
    (f"{WITH_A} SELECT s.id, t.x FROM a s JOIN a t ON s.id = t.id WHERE s.id < 4 ORDER BY 1", 4),
    (f"{WITH_A} SELECT id, x FROM a WHERE id < 3 UNION ALL SELECT id, x FROM a WHERE id > 597 "
     "ORDER BY 1", 5),
    (f"{WITH_A} SELECT DISTINCT topic FROM a WHERE year = 2002 ORDER BY 1", 0),
    (f"{WITH_A} SELECT x, count(*) FROM a WHERE year = 2002 GROUP BY x ORDER BY 1", 30),
    # windows
    (f"SELECT * FROM (SELECT id, topic, {A} AS x, row_number() OVER (PARTITION BY topic ORDER BY "
     "score, id) AS rn FROM papers) WHERE rn = 1 ORDER BY topic", 7),
    (f"SELECT id, {A} AS x FROM papers QUALIFY row_number() OVER (PARTITION BY topic ORDER BY "
     "score, id) = 1 ORDER BY id", 7),
    (f"{WITH_A}, r AS (SELECT *, rank() OVER (PARTITION BY year ORDER BY score, id) AS n FROM a) "
     "SELECT year, x FROM r WHERE n <= 2 ORDER BY year, n", 40),
    (f"SELECT DISTINCT ON (topic) topic, id, {A} AS x FROM papers ORDER BY topic, score, id", 7),
    (f"SELECT id, {A} AS x, count(*) OVER (PARTITION BY topic) AS n FROM papers WHERE id < 50 "
     "ORDER BY id", 50),
    # groups
    ("SELECT year, llm('g', {year}) FROM papers GROUP BY year HAVING year = 2003", 1),
    (f"SELECT year, max({A}) FROM papers GROUP BY year HAVING year = 2003", 30),
    ("SELECT topic FROM papers GROUP BY topic HAVING count(*) > 85 AND "
     "llm('g', {topic}, return := 'bool') ORDER BY 1",
     "SELECT count(*) FROM (SELECT topic FROM papers GROUP BY topic HAVING count(*) > 85)"),
    (f"SELECT topic, count(*) FILTER (WHERE year = 2004 AND {IS}) FROM papers GROUP BY topic "
     "ORDER BY 1", 30),
    (f"SELECT topic, max({A}) FILTER (WHERE year = 2004) FROM papers GROUP BY topic ORDER BY 1",
     30),
    (f"SELECT * FROM (SELECT topic, count(*) AS n, max({A}) AS x FROM papers GROUP BY topic) "
     "WHERE topic = 'topic 3'", "SELECT count(*) FROM papers WHERE topic = 'topic 3'"),
    ("SELECT * FROM (SELECT topic, count(*) AS n, llm('g', {topic}) AS x FROM papers "
     "GROUP BY topic) WHERE n > 85 ORDER BY 1",
     "SELECT count(*) FROM (SELECT topic FROM papers GROUP BY topic HAVING count(*) > 85)"),
    # conditions
    (f"SELECT id FROM papers WHERE year = 2000 OR {IS} ORDER BY id", 570),
    (f"SELECT id, CASE WHEN year = 2000 THEN {A} END FROM papers ORDER BY id", 30),
    (f"SELECT id, coalesce(nullif(title, 'title 3'), {A}) FROM papers ORDER BY id", 1),
    (f"SELECT id FROM papers WHERE year = 2000 AND ({IS} OR topic = 'topic 1') ORDER BY id",
     "SELECT count(*) FROM papers WHERE year = 2000 AND topic <> 'topic 1'"),
    ("SELECT id FROM papers p WHERE id < 10 AND (SELECT max(llm('b', {body})) FROM reviews r "
     "WHERE r.id = p.id) > 't1' ORDER BY id", 10),
    ("SELECT topic, llm('t', {topic}) FROM papers ORDER BY id", 7),
]  # fmt: skip

# a statement, what to read then, that with an ordinary function before, and the fewest prompts
CHANGES = [
    (f"INSERT INTO kept SELECT id, {A} FROM papers WHERE year = 2001", "FROM kept ORDER BY id",
     f"SELECT id, {A} FROM papers WHERE year = 2001 ORDER BY id", 30),
    (f"CREATE TABLE made AS {WITH_A} SELECT id, x FROM a JOIN picks USING (id)",
     "FROM made ORDER BY id", f"SELECT id, {A} FROM papers JOIN picks USING (id) ORDER BY id", 3),
    (f"UPDATE papers SET title = {A} WHERE id < 5", "SELECT title FROM papers ORDER BY id",
     f"SELECT CASE WHEN id < 5 THEN {A} ELSE title END FROM papers ORDER BY id", 5),
    (f"DELETE FROM papers WHERE year = 2001 AND {IS}", "SELECT id FROM papers ORDER BY id",
     f"SELECT id FROM papers WHERE NOT (year = 2001 AND {IS}) ORDER BY id", 30),
    (f"{WITH_A} INSERT INTO kept SELECT id, x FROM a WHERE id < 4", "FROM kept ORDER BY id",
     f"SELECT id, {A} FROM papers WHERE id < 4 ORDER BY id", 4),
    (f"MERGE INTO papers USING (SELECT id, {A} AS x FROM papers JOIN picks USING (id)) s ON "
     "papers.id = s.id WHEN MATCHED THEN UPDATE SET title = s.x",
     "SELECT title FROM papers ORDER BY id", "SELECT CASE WHEN id IN (SELECT id FROM picks) THEN "
     f"{A} ELSE title END FROM papers ORDER BY id", 3),
]  # fmt: skip


@pytest.fixture
def connection():
    connection = duckdb.connect()
    connection.execute(TABLES)
    yield connection
    connection.close()


def number(connection, fewest):
    return fewest if isinstance(fewest, int) else connection.sql(fewest).fetchall()[0][0]


@pytest.mark.parametrize(("text", "fewest"), STATEMENTS, ids=range(len(STATEMENTS)))
def test_queries(connection, text, fewest):
    expected = plain_rows(connection, text, hashed_answer)
    runner = FakeRunner(connection)
    assert Connection(connection, runner).sql(text).fetchall() == expected
    assert len(runner.asked) <= number(connection, fewest)


@pytest.mark.parametrize(("text", "read", "plain", "fewest"), CHANGES, ids=range(len(CHANGES)))
def test_changes(connection, text, read, plain, fewest):
    expected = plain_rows(connection, plain, hashed_answer)
    runner = FakeRunner(connection)
    Connection(connection, runner).sql(text)
    assert connection.sql(read).fetchall() == expected
    assert len(runner.asked) <= number(connection, fewest)
