# SPDX-License-Identifier: Apache-2.0
"""The forms in which DuckDB writes texts."""

import json

import pytest

from tests.tables.sql.fake_runner import FakeRunner
from vllm_relay.tables.sql import Connection

SCHEMA = '{"type": "object", "title": "it\'s"}'


@pytest.mark.parametrize(
    "text",
    [
        "'Is it good?'",
        "'it''s\\n'",
        "$$Is it good?$$",
        "$$it's\\n; SELECT llm($$",
        "$tag$a $$ b$tag$",
        r"E'a\nb'",
        r"e'a\tit\'s ''\\ \" \u \xc3\xa9'",
    ],
)
def test_a_text_is_what_duckdb_reads(connection, text):
    runner = FakeRunner(connection)
    asking = Connection(connection, runner)
    expected = connection.sql(f"SELECT {text}").fetchall()[0][0]
    result = asking.sql(f"SELECT llm({text}, {{id}}, choices := [{text}, 'x']) FROM movies")
    assert len(result.fetchall()) == 8
    for question, _ in runner.asked:
        assert (question.text, question.output.choices) == (expected, (expected, "x"))
    assert len(runner.asked) == 8
    named = f"SELECT llm('q', {{id}}, choices := [{text}, 'x'], return := $$text$$) = {text} AS x"
    assert {x for (x,) in asking.sql(f"{named} FROM movies").fetchall()} <= {True, False}


@pytest.mark.parametrize("text", [f"$${SCHEMA}$$", "E'" + SCHEMA.replace("'", "\\'") + "'"])
def test_a_schema(connection, text):
    runner = FakeRunner(connection)
    asking = Connection(connection, runner)
    asking.sql(f"SELECT llm('q', {{id}}, schema := {text}) FROM movies")
    assert json.loads(runner.asked[0][0].output.schema_json) == json.loads(SCHEMA)
