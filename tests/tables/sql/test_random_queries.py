# SPDX-License-Identifier: Apache-2.0
"""Random queries over random tables give what they give with llm() as an ordinary function."""

import duckdb
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from tests.tables.sql.fake_runner import FakeRunner, hashed_answer
from tests.tables.sql.oracle import plain_rows
from vllm_relay.tables.sql import Connection

small = st.one_of(st.none(), st.integers(0, 3))
texts = st.one_of(st.none(), st.sampled_from(["", "a", "b"]))
tables = st.lists(st.tuples(small, small, texts), max_size=12)

fields = st.sampled_from(["{a}", "{b}", "{c}", "{a, c}", "{x: a + b}", "{x: coalesce(b, 0), c}"])
nested_fields = st.one_of(fields, fields.map(lambda inner: f"{{s: llm('n', {inner})}}"))
int_calls = nested_fields.map(lambda inner: f"llm('i', {inner}, return := 'int')")
bool_calls = nested_fields.map(lambda inner: f"llm('b', {inner}, return := 'bool')")
int_leaves = st.one_of(int_calls, st.sampled_from(["a", "b", "id", "2"]))
ints = st.recursive(
    int_leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: f"({p[0]} + {p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"coalesce({p[0]}, {p[1]})"),
        st.tuples(inner, inner, inner).map(
            lambda p: f"CASE WHEN {p[0]} > 1 THEN {p[1]} ELSE {p[2]} END"
        ),
        st.tuples(inner, inner, inner).map(
            lambda p: f"CASE {p[0]} WHEN 1 THEN {p[1]} WHEN {p[2]} THEN 7 END"
        ),
        st.tuples(inner, inner).map(lambda p: f"if({p[0]} = 1, {p[1]}, 0)"),
    ),
    max_leaves=4,
)
bool_leaves = st.one_of(
    bool_calls,
    ints.map(lambda value: f"{value} > 1"),
    ints.map(lambda value: f"{value} IS NULL"),
    st.sampled_from(["c = 'a'", "a = b", "id IN (1, 2, 3)", "b IS NOT NULL"]),
)
bools = st.recursive(
    bool_leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: f"({p[0]} AND {p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"({p[0]} OR {p[1]})"),
        inner.map(lambda p: f"(NOT {p})"),
        inner.map(lambda p: f"({p}) IS NOT TRUE"),
        st.tuples(inner, inner, inner).map(
            lambda p: f"CASE WHEN {p[0]} THEN {p[1]} ELSE {p[2]} END"
        ),
    ),
    max_leaves=5,
)
wheres = st.lists(bools, max_size=3).map(
    lambda parts: " WHERE " + " AND ".join(f"({part})" for part in parts) if parts else ""
)
limits = st.one_of(
    st.just(""),
    st.integers(0, 6).map(lambda n: f" LIMIT {n}"),
    st.tuples(st.integers(0, 6), st.integers(0, 4)).map(lambda p: f" LIMIT {p[0]} OFFSET {p[1]}"),
)


@st.composite
def plain_queries(draw):
    items = ", ".join(f"{item} AS v{i}" for i, item in enumerate(draw(st.lists(ints, max_size=3))))
    keys = draw(st.lists(st.one_of(ints, st.sampled_from(["c", "a DESC", "2"])), max_size=2))
    order = "".join(f"{key}, " for key in keys)
    order = f" ORDER BY {order}id" if draw(st.booleans()) or keys else ""
    source = draw(sources)
    listed = f"id, a, {items}" if items else "id, a"
    return f"SELECT {listed} FROM {source}{draw(wheres)}{order}{draw(limits)}"


inner_queries = st.tuples(ints, bools, wheres, limits).map(
    lambda p: (
        f"(SELECT id, a, b, c, {p[0]} AS v, {p[1]} AS w, llm('unused', {{a}}) AS u "
        f"FROM t{p[2]} ORDER BY id{p[3]})"
    )
)
inner_unordered = st.tuples(ints, wheres).map(lambda p: f"(SELECT *, {p[0]} AS v FROM t{p[1]})")
sources = st.one_of(
    st.just("t"),
    inner_queries.map(lambda query: f"{query} AS s"),
    inner_unordered.map(lambda query: f"{query} s"),
)


@st.composite
def grouped_queries(draw):
    key = draw(st.one_of(ints, st.just("c"), st.just("a")))
    value = draw(ints)
    passes = draw(bools)
    extra = draw(st.sampled_from(["", ", llm('g', {n: count(*), k: max(a)}) AS g"]))
    having = draw(st.sampled_from(["", " HAVING count(*) > 1", f" HAVING max({value}) > 1"]))
    how = draw(st.sampled_from(["k", "1", "ALL", key]))
    if how == key and key == "2":
        how = "k"
    return (
        f"SELECT {key} AS k, count(*) AS n, sum({value}) AS s, "
        f"max({value}) FILTER (WHERE {passes}) AS m{extra} FROM {draw(sources)}{draw(wheres)} "
        f"GROUP BY {how}{having} ORDER BY k NULLS LAST, n, s, m"
    )


distinct_queries = st.tuples(ints, bools, wheres).map(
    lambda p: f"SELECT DISTINCT {p[0]} AS v, {p[1]} AS w FROM t{p[2]} ORDER BY v, w"
)
join_queries = st.tuples(ints, wheres, st.sampled_from(["JOIN", "LEFT JOIN", "FULL JOIN"])).map(
    lambda p: (
        f"SELECT id, s.v, other.w FROM (SELECT *, {p[0]} AS v FROM t{p[1]}) s {p[2]} "
        f"(SELECT id + 1 AS other_id, {p[0]} AS w FROM t) other ON s.id = other_id "
        f"WHERE s.id > 1 OR s.v IS NULL ORDER BY id, w, v"
    )
)
window_queries = st.tuples(ints, wheres).map(
    lambda p: f"SELECT id, sum({p[0]}) OVER (ORDER BY id) AS s FROM t{p[1]} ORDER BY id"
)
union_queries = st.tuples(inner_unordered, st.sampled_from(["id > 2", "v > 1", "a IS NULL"])).map(
    lambda p: (
        f"SELECT id, v FROM (SELECT id, a, v FROM {p[0]} UNION ALL "
        f"SELECT id, a, llm('i', {{b}}, return := 'int') FROM t) WHERE {p[1]} ORDER BY id, v"
    )
)
group_conditions = st.sampled_from(
    [
        "k IN (SELECT b FROM t WHERE b > 0)",
        "k IN (SELECT b FROM t)",
        "j IS NOT NULL AND k > 0",
        "j = 'a' OR s > 2",
        "k + 1 < (SELECT max(id) FROM t)",
        "EXISTS (SELECT 1 FROM t WHERE t.b = g.k)",
    ]
)
condition_on_groups_queries = st.tuples(
    st.one_of(ints, st.just("a")),
    ints,
    wheres,
    st.sampled_from(["k, c", "1, 2", "ALL"]),
    group_conditions,
).map(
    lambda p: (
        f"SELECT k, j, s FROM (SELECT {p[0]} AS k, c AS j, sum({p[1]}) AS s FROM t{p[2]} "
        f"GROUP BY {p[3]}) g WHERE {p[4]} ORDER BY k, j, s"
    )
)


@st.composite
def late_queries(draw):
    """Answers of a subquery that the query around it uses in some way."""
    tail = draw(
        st.sampled_from(["", " ORDER BY id LIMIT 3", " ORDER BY a DESC, id LIMIT 2 OFFSET 1"])
    )
    more = draw(st.sampled_from(["", " + 1"]))
    inner = f"SELECT *, {draw(int_calls)}{more} AS x FROM t{draw(wheres)}{tail}"
    if draw(st.booleans()):
        inner = f"SELECT * FROM ({inner}) WHERE {draw(st.sampled_from(['id > 1', 'x > 1']))}"
    used = ["id, x", "*", "s.*", "id, s.x + 1 AS y", "DISTINCT x", "max(x) AS m", "id, x AS b"]
    used += [
        "llm('z', {{id}}) AS z",
        "sum(llm('i', {{a}}, return := 'int')) FILTER (WHERE x > 1) AS z",
    ]
    join = draw(
        st.sampled_from(
            ["", *(f" {side} JOIN (SELECT id AS i, a AS j FROM t) r ON i = s.id{more}"
                   for side in ("", "LEFT", "RIGHT", "SEMI") for more in ("", " AND s.x > 1"))]
        )
    )  # fmt: skip
    where = draw(st.sampled_from(["", " WHERE x > 1", " WHERE s.x IS NULL OR id > 2"]))
    limit = draw(limits)
    query = f"{draw(st.sampled_from(used))} FROM {{}}{join}{where} ORDER BY ALL{limit}"
    if draw(st.booleans()):
        return f"WITH s AS ({inner}) SELECT {query.format('s')}"
    return f"SELECT {query.format(f'({inner}) s')}"


def check(rows, text):
    connection = duckdb.connect()
    try:
        connection.execute("CREATE TABLE t (id BIGINT, a BIGINT, b BIGINT, c VARCHAR)")
        if rows:
            numbered = [[i, *row] for i, row in enumerate(rows, 1)]
            connection.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", numbered)
        expected = plain_rows(connection, text, hashed_answer)
        runner = FakeRunner(connection)
        assert Connection(connection, runner).sql(text).fetchall() == expected, text
        if "llm(" not in text:
            return
        estimated = Connection(connection, FakeRunner(connection)).explain(text)
        most = sum(call.estimate.num_prompts for call in estimated.calls)
        assert most >= len(runner.asked), text
    finally:
        connection.close()


@settings(max_examples=cases(7), deadline=None)
@given(tables, plain_queries())
def test_plain(rows, text):
    check(rows, text)


@settings(max_examples=cases(3), deadline=None)
@given(tables, grouped_queries())
def test_grouped(rows, text):
    check(rows, text)


@settings(max_examples=cases(3), deadline=None)
@given(tables, st.one_of(distinct_queries, join_queries, window_queries, union_queries))
def test_others(rows, text):
    check(rows, text)


@settings(max_examples=cases(3), deadline=None)
@given(tables, condition_on_groups_queries)
def test_conditions_on_groups(rows, text):
    check(rows, text)


@settings(max_examples=cases(5), deadline=None)
@given(tables, late_queries())
@example(
    [(None, None, None)],
    "SELECT id, x FROM (SELECT *, llm('i', {x: coalesce(b, 0), c}, return := 'int') AS x FROM t "
    "WHERE (llm('b', {x: a + b}, return := 'bool'))) s JOIN (SELECT id AS i, a AS j FROM t) r "
    "ON i = s.id AND s.x > 1 ORDER BY ALL",
)
def test_answers_that_are_looked_up_late(rows, text):
    check(rows, text)
