# SPDX-License-Identifier: Apache-2.0
"""A key goes only to the server that it was meant for."""

from __future__ import annotations

import pytest

from tests.tables.engines.server.fake_server import failure, fake_server
from tests.tables.engines.server.test_engine import QUESTION, engine_for, prompts
from vllm_relay.tables.engines.addresses import is_safe, key_from_environment
from vllm_relay.tables.engines.base import EngineError
from vllm_relay.tables.engines.server.engine import ServerEngine

BOTH = {"OPENAI_API_KEY": "sk-openai", "VLLM_API_KEY": "sk-vllm", "OTHER": "sk-other"}


@pytest.mark.parametrize(
    ("url", "variable", "expected"),
    [
        ("https://api.openai.com/v1", None, "sk-openai"),
        ("https://API.OpenAI.com", None, "sk-openai"),
        ("http://localhost:8000", None, "sk-vllm"),
        ("http://127.0.0.1:8000", None, "sk-vllm"),
        ("http://[::1]:8000", None, "sk-vllm"),
        ("https://models.example.org", None, "sk-vllm"),
        ("https://api.openai.com.example.org", None, "sk-vllm"),
        ("https://example.org/api.openai.com", None, "sk-vllm"),
        ("https://models.example.org", "OPENAI_API_KEY", "sk-openai"),
        ("https://models.example.org", "OTHER", "sk-other"),
        ("http://models.example.org", None, None),
        ("http://10.0.0.1:8000", None, None),
        ("http://localhost.example.org", None, None),
        ("http://api.openai.com", None, None),
    ],
)
def test_which_key_goes_where(url: str, variable: str | None, expected: str | None) -> None:
    assert key_from_environment(url, variable, environment=BOTH).value == expected


def test_no_key_of_openai_for_others() -> None:
    key = key_from_environment("https://other.org", None, environment={"OPENAI_API_KEY": "sk"})
    assert key.value is None
    assert (
        key.withheld == "OPENAI_API_KEY is sent to api.openai.com only: name it with --api-key-env"
    )


def test_a_key_in_the_open_is_refused() -> None:
    with pytest.raises(ValueError, match="OTHER is not sent to far without encryption.*https://"):
        key_from_environment("http://far:8000", "OTHER", environment=BOTH)
    found = key_from_environment("http://far:8000", "OTHER", over_http=True, environment=BOTH)
    assert found.value == "sk-other"
    with pytest.raises(ValueError, match="variable MISSING was named for the API key.*not set"):
        key_from_environment("https://far", "MISSING", environment=BOTH)


def test_keys_are_in_no_representation() -> None:
    assert "sk-" not in repr(key_from_environment("https://far", "OTHER", environment=BOTH))


def test_an_engine_refuses_it_too() -> None:
    with pytest.raises(ValueError, match="api_key is not sent to 192.0.2.1 without encryption"):
        ServerEngine("http://192.0.2.1:8000", api_key="secret")
    with pytest.raises(ValueError, match="a user's name in front of 'host'"):
        ServerEngine("http://me:secret@host:8000")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1.nip.io", "http://0.0.0.0.org", "ftp://localhost.x"]
)
def test_what_only_looks_like_this_machine(url: str) -> None:
    assert not is_safe(url)


def test_who_lets_nobody_in_is_told_what_was_sent() -> None:
    with fake_server(lambda body: failure(401, "who are you")) as server:
        with pytest.raises(EngineError, match="lets nobody in without an api_key: HTTP 401"):
            list(engine_for(server.url).generate(prompts(1), QUESTION))
        engine = engine_for(server.url, api_key="secret")
        with pytest.raises(EngineError, match="lets nobody in with this api_key: HTTP 401"):
            list(engine.generate(prompts(1), QUESTION))
        assert server.headers["authorization"] == "Bearer secret"
        key = key_from_environment(server.url, None, environment={"OPENAI_API_KEY": "sk"})
        with pytest.raises(EngineError, match="OPENAI_API_KEY is sent to api.openai.com only"):
            list(engine_for(server.url, api_key=key).generate(prompts(1), QUESTION))
        assert "authorization" not in server.headers
