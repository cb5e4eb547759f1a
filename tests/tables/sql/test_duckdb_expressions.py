# SPDX-License-Identifier: Apache-2.0
"""Expressions of DuckDB stay what they are when a query with llm() is written anew."""

import re

import pytest

from tests.tables.sql.fake_runner import FakeRunner
from vllm_relay.tables.sql import Connection

EXPRESSIONS = [
    "7 / 2, 7 // 2, -7 // 2, 7 % 3, 2 ** 3, 2 ^ 3, 5 & 3, 5 | 3, xor(5, 3), ~5, 1 << 3",
    "id::DOUBLE / 2, TRY_CAST(title AS INT), CAST('1' AS DECIMAL(5, 2)), 1.50, 1e3, 0.1 + 0.2",
    "title || '-' || info, concat(title, info), title LIKE 'A%', title ILIKE 'a%', title GLOB 'A*'",
    "title SIMILAR TO 'A.*', regexp_matches(title, 'l'), regexp_extract(title, '(.)a', 1)",
    "regexp_replace(title, 'a', 'b', 'g'), string_split(info, ' '), split_part(info, ' ', 2)",
    "title[1], title[2:3], title[-1], substring(title, 2, 2), left(title, 2), right(title, 2)",
    "numbers[1], numbers[1:1], list_value(1, 2), [x * 2 FOR x IN numbers IF x > 1], len(numbers)",
    "list_contains(numbers, 1), array_length(numbers), list_sum(numbers), numbers || [9]",
    "list_transform(numbers, lambda x: x + id), list_filter(numbers, lambda x: x > 1)",
    "{'a': id, 'b c': title}, struct_pack(a := id), row(1, 'x'), {'a': {'b': id}}.a.b",
    "MAP {'k': id}, MAP {'k': id}['k'], map_keys(MAP {'k': 1}), MAP([1, 2], ['a', 'b'])",
    "DATE '2024-01-31' + INTERVAL 1 MONTH, DATE '2024-03-01' - DATE '2024-02-01', "
    "date_trunc('month', DATE '2024-02-29'), date_part('dow', DATE '2024-02-29')",
    "strftime(TIMESTAMP '2024-01-02 03:04:05', '%Y/%m'), strptime('2024', '%Y'), "
    "EXTRACT(year FROM DATE '2024-01-01'), date_diff('day', DATE '2024-01-01', DATE '2024-02-01')",
    "epoch(TIMESTAMP '2024-01-02 03:04:05'), epoch_ms(1000), make_date(2024, 1, 2), "
    "TIMESTAMPTZ '2024-01-01 00:00:00+00' > now(), INTERVAL '1' DAY, to_days(3), "
    "age(DATE '2024-01-01', DATE '2023-01-01')",
    "'{\"a\": [1, 2]}'::JSON -> 'a', '{\"a\": \"x\"}'::JSON ->> 'a', '{\"a\": 1}'::JSON ->> '$.a', "
    "json_extract('{\"a\": 1}', '$.a'), to_json({'a': id})",
    "CASE WHEN id > 2 THEN 'x' END, if(id > 2, 1, 0), ifnull(title, 'n'), "
    "nullif(id, 1), coalesce(score, 0), greatest(id, 3), least(id, 3)",
    "id BETWEEN 2 AND 4, id NOT IN (1, 2), title IS NULL, title IS DISTINCT FROM 'B', NOT id = 1",
    "id IN (SELECT r.id FROM reviews r), EXISTS (SELECT 1 FROM reviews r WHERE r.id = movies.id)",
    "round(2.5), round(-1.25, 1), floor(-1.5), trunc(1.9), mod(7, 3), abs(-1), sign(-2), "
    "log(100), ln(2), log2(8), power(2, 3), sqrt(2), cbrt(8), pi()",
    "upper(title), lower(title), trim('  a '), ltrim('xa', 'x'), lpad('a', 3, '-'), "
    "repeat('a', 3), reverse('ab'), replace('aa', 'a', 'b'), strlen('é'), chr(97)",
    "md5('a'), hash(1) IS NOT NULL, to_base64('a'::BLOB), '\\x41'::BLOB, hex('a'), bin(5), "
    "format('{}-{}', 1, 'a'), printf('%d', 3)",
    "levenshtein('a', 'b'), starts_with(title, 'A'), contains(title, 'l'), instr('abc', 'c'), "
    "title ^@ 'A', strpos('abc', 'b'), unicode('a'), ascii('a')",
    "1 = 1 AND NULL, (1 = 1) IS TRUE, NOT NULL, 'a' < 'b', 'it''s', E'a\\nb', $$dollar$$",
    "typeof(id), typeof(1.5), typeof(1::HUGEINT), typeof([1]), typeof(NULL), typeof(1::UTINYINT), "
    "typeof('a'::VARCHAR(3)), typeof(1::FLOAT), typeof(1::REAL), "
    "typeof('2024-01-01'::TIMESTAMP_S)",
    'id AS "quoted ""name"""',
    "range(3), generate_series(1, 3), list_sort([3, 1]), list_distinct([1, 1]), "
    "flatten([[1], [2]])",
    "first_value(id) OVER (ORDER BY id ROWS BETWEEN 1 PRECEDING AND CURRENT ROW), "
    "lag(id, 1, 0) OVER (ORDER BY id), ntile(2) OVER (ORDER BY id), "
    "sum(id) OVER (ORDER BY id RANGE BETWEEN UNBOUNDED PRECEDING AND 1 FOLLOWING EXCLUDE TIES), "
    "last_value(title IGNORE NULLS) OVER (ORDER BY id)",
]
AGGREGATES = [
    "count(*), count(title), sum(id), avg(score), min(title), max(id), any_value(type)",
    "string_agg(title, '-' ORDER BY id DESC), list(title ORDER BY id), array_agg(id ORDER BY id)",
    "median(id), mode(type), quantile_cont(id, 0.3), quantile_disc(id, [0.2, 0.6]), stddev(id), "
    "var_pop(id), approx_count_distinct(id), bit_and(id), bool_or(id > 2), product(id)",
    "percentile_cont(0.5) WITHIN GROUP (ORDER BY id), arg_max(title, id), min_by(title, id), "
    "first(title ORDER BY id), last(id ORDER BY id), histogram(type), count(DISTINCT type)",
    "sum(id) FILTER (WHERE id > 2), max(id, 2), arg_min(id, score - id, 2), entropy(id), "
    "kurtosis(id), corr(id, score), covar_pop(id, score), regr_slope(id, score), count_if(id > 2), "
    "sumkahan(id)",
]


@pytest.mark.parametrize("expressions", EXPRESSIONS)
def test_of_rows(connection, expressions):
    asking = Connection(connection, FakeRunner(connection))
    expected = connection.sql(f"SELECT {expressions} FROM movies ORDER BY id").fetchall()
    text = f"SELECT {expressions}, llm('q', {{id}}) FROM movies ORDER BY id"
    assert repr([row[:-1] for row in asking.sql(text).fetchall()]) == repr(expected)
    # as a field, and as what a subquery with a call gives
    inner = f"SELECT * FROM (SELECT {expressions}, id AS the_id FROM movies)"
    text = f"SELECT * EXCLUDE (q) FROM (SELECT *, llm('q', {{the_id}}) AS q FROM ({inner}))"
    expected = connection.sql(f"{inner} ORDER BY the_id").fetchall()
    assert repr(asking.sql(f"{text} ORDER BY the_id").fetchall()) == repr(expected)


@pytest.mark.parametrize("expressions", AGGREGATES)
def test_of_groups(connection, expressions):
    asking = Connection(connection, FakeRunner(connection))
    query = "FROM movies GROUP BY type ORDER BY type"
    expected = connection.sql(f"SELECT {expressions} {query}").fetchall()
    for call in ("max(llm('q', {id}))", "llm('q', {type})", "llm('q', {n: count(*)})"):
        rows = asking.sql(f"SELECT {expressions}, {call} {query}").fetchall()
        assert shown([row[:-1] for row in rows]) == shown(expected)


def shown(rows):
    """Their text; numbers without what the order of additions rounds differently."""
    return re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.9g}", repr(rows))
