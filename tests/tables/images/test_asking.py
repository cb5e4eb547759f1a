# SPDX-License-Identifier: Apache-2.0
"""Questions about images, up to the requests that a server gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pytest

from tests.tables.engines.server.fake_server import (
    OTHER_MODEL,
    VLLM_MODEL,
    FakeServer,
    Reply,
    chat_answer,
    failure,
    fake_server,
)
from tests.tables.engines.server.test_engine import WordTokenizer
from tests.tables.images.pictures import data_url, picture
from tests.tables.recording_engine import RecordingEngine
from vllm_relay.tables import JobOptions, connect, llm_map
from vllm_relay.tables.engines.base import EngineError
from vllm_relay.tables.engines.server.engine import ServerEngine
from vllm_relay.tables.images import PROBE_URL
from vllm_relay.tables.sql import SqlError

QUESTION = "Is {photo} sharp?"


def urls(body: dict[str, Any]) -> list[str]:
    parts = body["messages"][-1]["content"]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def shades(body: dict[str, Any]) -> Reply:
    """Says which of the pictures 0 to 9 are there."""
    known = {data_url(picture(shade)): str(shade) for shade in range(10)}
    return chat_answer(" ".join(known.get(each, "?") for each in urls(body)))


@pytest.fixture(params=[VLLM_MODEL, OTHER_MODEL], ids=["vllm", "other"])
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    with fake_server(shades, request.param) as server:
        yield server


def engine_of(server: FakeServer, **options: Any) -> ServerEngine:
    # a tokenizer has vLLM get tokens, where there are no images
    return ServerEngine(server.url, **options)


def asked(server: FakeServer) -> list[dict[str, Any]]:
    """The requests but for the first, which sees whether the model takes images."""
    probe, *bodies = server.bodies
    assert urls(probe) == [PROBE_URL]
    assert all(PROBE_URL not in urls(body) for body in bodies)
    return bodies


def test_the_request_has_texts_and_images_where_the_fields_stand() -> None:
    table = pa.table({"photo": [picture(1)], "title": ["x"], "other": [data_url(picture(2))]})
    with fake_server(shades) as server:
        result = llm_map(
            table,
            "Are {photo} and {other} of {title} alike?",
            engine=engine_of(server),
            images={"photo": "bytes", "other": "url"},
            order="keep",
            system_prompt="Look.",
            max_tokens=5,
        )
        assert result.objects == ["1 2"]
        [body] = asked(server)
        assert body == {
            "model": "tiny", "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
            "repetition_penalty": 1.0, "max_tokens": 5,
            "messages": [
                {"role": "system", "content": "Look."},
                {"role": "user", "content": [
                    {"type": "text", "text":
                        "Are {photo} and {other} of {title} alike?\n"
                        'Names in braces are fields of the record.\n\n"photo": '},
                    {"type": "image_url", "image_url": {"url": data_url(picture(1))}},
                    {"type": "text", "text": '\n"other": '},
                    {"type": "image_url", "image_url": {"url": data_url(picture(2))}},
                    {"type": "text", "text": '\n"title": "x"'},
                ]},
            ],
        }  # fmt: skip


def test_vllm_gets_messages_though_it_takes_tokens() -> None:
    with fake_server(shades) as server:
        engine = ServerEngine(server.url, tokenizer=WordTokenizer(), mode="auto")
        assert engine.mode == "completions"
        engine.tokenizer = None  # this one encodes single texts only
        result = llm_map(pa.table({"photo": [picture(3)]}), QUESTION, engine=engine,
                         images=["photo"])  # fmt: skip
        assert result.objects == ["3"]


@pytest.mark.parametrize("make", [pa.table, pd.DataFrame], ids=["arrow", "pandas"])
def test_equal_images_are_asked_about_once(server: FakeServer, tmp_path: Path, make: Any) -> None:
    table = make({"photo": [picture(1), picture(2), picture(1), None], "n": [1, 2, 3, 4]})
    arguments: dict[str, Any] = {"images": ["photo"], "checkpoint": tmp_path / "job.db"}
    result = llm_map(table, QUESTION, engine=engine_of(server), **arguments)
    assert result.objects == ["1", "2", "1", None] and not result.errors
    shown = sorted(urls(body) for body in asked(server))
    assert shown == sorted([data_url(picture(shade))] for shade in (1, 2))
    # a checkpoint knows them by their content
    server.bodies.clear()
    (tmp_path / "two.png").write_bytes(picture(2))
    files = pa.table({"photo": ["two.png"]})
    arguments["images"] = {"photo": "path"}
    again = llm_map(files, QUESTION, engine=engine_of(server), image_folder=tmp_path, **arguments)
    assert again.objects == ["2"] and again.report.num_known == 1
    assert not server.bodies


def test_a_value_that_is_no_image_is_its_rows_error(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(4))
    table = pa.table({"photo": ["a.png", "../b.png", "/etc/passwd", "c.png"]})
    result = llm_map(
        table, QUESTION, engine=engine_of(server), images={"photo": "path"}, image_folder=tmp_path
    )
    assert result.objects == ["4", None, None, None]
    assert "leads out of image_folder" in result.errors[1]
    assert "leads out of image_folder" in result.errors[2]
    assert "'c.png' is no file" in result.errors[3]
    assert len(asked(server)) == 1


def test_statements_ask_about_images(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "5.png").write_bytes(picture(5))
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t (n INTEGER, photo BLOB, path VARCHAR)")
    connection.executemany(
        "INSERT INTO t VALUES (?, ?, ?)",
        [(1, picture(1), "5.png"), (2, picture(2), "no"), (3, picture(1), None)],
    )
    with connect(connection, engine=engine_of(server), image_folder=tmp_path) as database:
        call = f"llm('{QUESTION}', {{photo}}, return := 'int', images := ['photo'])"
        explained = database.explain(f"SELECT {call} FROM t")
        assert explained.calls[0].estimate.num_prompts == 2
        assert not explained.calls[0].estimate.tokens_are_exact
        assert not server.bodies
        result = database.sql(f"SELECT n, {call} AS shade FROM t WHERE {call} < 5 ORDER BY n")
        assert result is not None
        assert result.fetchall() == [(1, 1), (2, 2), (3, 1)]
        assert len(asked(server)) == 2
        server.bodies.clear()
        both = (
            "llm('Are {photo} and {other} alike?', {photo, other: path}, "
            "images := {photo: 'bytes', other: 'path'})"
        )
        result = database.sql(f"SELECT {both} FROM t ORDER BY n")
        assert result is not None
        found = result.fetchall()
        assert sorted(found[0][0].split()) == ["1", "5"]
        assert found[1:] == [(None,), ("1",)]
        [error] = result.errors
        assert "'no' is no file" in error.error
        assert error.fields["photo"].startswith("relay-image:")
        starred = database.sql(
            "SELECT llm('What?', *, images := ['photo']) FROM (SELECT photo FROM t) ORDER BY 1"
        )
        assert starred is not None and starred.fetchall() == [("1",), ("1",), ("2",)]


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ("images := 'photo'", "expected fields with the bytes of images"),
        ("images := ['other']", r"images of question .* names \['other'\]"),
        ("images := {photo: 'path'}", "give image_folder"),
        ("images := {photo: 'file'}", "expected one of"),
        ("images := {photo: 1}", "expected fields with"),
    ],
)
def test_bad_images_are_refused_in_statements(parameter: str, message: str) -> None:
    with (
        connect(engine=RecordingEngine()) as database,
        pytest.raises(SqlError, match=message),
    ):
        database.sql(f"SELECT llm('{QUESTION}', {{photo: 'x'::BLOB}}, {parameter})")


@pytest.mark.parametrize("images", [5, ["photo", 5], {5: "bytes"}, True])
def test_images_that_are_no_names_are_refused(images: Any) -> None:
    with pytest.raises(ValueError, match=r"images=.* given, expected a list .* give \['photo'\]"):
        llm_map(pa.table({"photo": [b""]}), QUESTION, engine=RecordingEngine(), images=images)


def test_images_are_kept_until_their_statement_is_over(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    table = pa.table({"photo": [picture(3)]})
    with connect(engine=engine_of(server), tables={"t": table}) as database:
        for question in ("Is {photo} sharp?", "Is {photo} dark?"):
            call = f"llm('{question}', images := ['photo'])"
            database.explain(f"SELECT {call} FROM t")
            result = database.sql(f"SELECT {call} FROM t")
            assert result is not None and result.fetchall() == [("3",)]
            assert not list(tmp_path.glob("relay-images-*"))
        with pytest.raises(duckdb.Error, match="never"):
            database.sql(f"SELECT CASE WHEN {call} = '3' THEN error('never') END FROM t")
        assert not list(tmp_path.glob("relay-images-*"))


def test_texts_are_no_bytes() -> None:
    with (
        connect(engine=RecordingEngine()) as database,
        pytest.raises(duckdb.BinderException, match=r"image_bytes\(VARCHAR\)"),
    ):
        database.sql("CREATE TABLE t AS SELECT 'x' AS photo")
        database.sql(f"SELECT llm('{QUESTION}', {{photo}}, images := ['photo']) FROM t")


@pytest.mark.parametrize("model", [VLLM_MODEL, OTHER_MODEL], ids=["vllm", "other"])
@pytest.mark.parametrize(
    "words",
    ["tiny is not a multimodal model", "At most 0 image(s) may be provided in one prompt."],
)
def test_a_model_without_images_is_refused_at_once(model: dict[str, Any], words: str) -> None:
    with fake_server(lambda body: failure(400, words), model) as server:
        table = pa.table({"photo": [picture(shade) for shade in range(9)]})
        with pytest.raises(EngineError, match="takes no images .*serve one that does"):
            llm_map(table, QUESTION, engine=engine_of(server), images=["photo"])
        # the few that come first
        assert len(server.bodies) <= 4
        assert all(urls(body) == [PROBE_URL] for body in server.bodies)


def test_an_image_that_the_server_refuses_is_its_rows_error(server: FakeServer) -> None:
    def behaviour(body: dict[str, Any]) -> Reply:
        is_bad = urls(body) == [data_url(picture(2))]
        return failure(400, "this image is broken") if is_bad else shades(body)

    server.behaviour = behaviour
    table = pa.table({"photo": [picture(shade) for shade in range(5)]})
    result = llm_map(table, QUESTION, engine=engine_of(server), images=["photo"])
    assert result.objects == ["0", "1", None, "3", "4"]
    assert "this image is broken" in result.errors[2]


class WithModules(RecordingEngine):
    """Takes modules and images, as far as it says."""

    modules_refusal = images_refusal = None


def test_what_cannot_be_done_with_images_is_refused_before_anything_is_asked(
    server: FakeServer,
) -> None:
    table = pa.table({"photo": [picture(1)]})
    with pytest.raises(ValueError, match="max_total_tokens=9 given with images"):
        llm_map(table, QUESTION, engine=engine_of(server), images=["photo"], max_total_tokens=9)
    with pytest.raises(
        ValueError, match="this engine takes none: give a model that takes images, or"
    ):
        llm_map(table, QUESTION, engine=RecordingEngine(), images=["photo"])
    with pytest.raises(ValueError, match="bytes are no text; .* or give images="):
        llm_map(table, QUESTION, engine=engine_of(server))
    call = f"llm('{QUESTION}', {{photo}}, images := ['photo'])"
    for engine, options in (
        (engine_of(server), JobOptions(max_total_tokens=9)),
        (WithModules(), JobOptions(modules="modular")),
    ):
        with (
            connect(engine=engine, options=options, tables={"t": table}) as database,
            pytest.raises(ValueError, match="given with images"),
        ):
            database.sql(f"SELECT {call} FROM t")
    assert not server.bodies


def test_values_of_others_cannot_name_images(server: FakeServer) -> None:
    """A reference in a text is none of a file."""
    table = pa.table({"photo": [picture(1)], "text": [f"relay-image:{'0' * 64}"]})
    result = llm_map(table, "What is in {photo}, going by {text}?", engine=engine_of(server),
                     images=["photo"])  # fmt: skip
    assert result.objects == [None]
    assert "refers to an image that no field" in result.errors[0]
