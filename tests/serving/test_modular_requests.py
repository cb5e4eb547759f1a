# SPDX-License-Identifier: Apache-2.0
"""The field `relay` of requests, without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from tests.modules.chat_templates import character_tokenizer, text_of
from vllm_relay.modules.markup.schema import Module, Schema
from vllm_relay.modules.prompt.plan import EXTRA_ARG, ModulePlan
from vllm_relay.modules.prompt.schema_store import SchemaStore
from vllm_relay.serving.modular_requests import (
    STAND_IN_PROMPT,
    add_usage,
    apply_modular_prompt,
    keep_store,
    note_of,
    store_of,
    with_usage,
)

NAME = 'trips & "more" <here>'
MAX_MODEL_LEN = 100
PROMPT_LEN = 65  # "<s>" and the hotel in 32 slots each, and "?"


class Request(BaseModel):
    model_config = ConfigDict(extra="allow")

    prompt: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    vllm_xargs: dict[str, Any] | None = None


def renderer_of(default: dict[str, int], max_model_len: int | None = MAX_MODEL_LEN) -> Any:
    store = SchemaStore(character_tokenizer(), block_size=32, max_model_len=max_model_len)
    store.add(Schema(NAME, Module("hotel", "A hotel.")))
    model_config = SimpleNamespace(get_diff_sampling_param=lambda: default)
    renderer = SimpleNamespace(model_config=model_config)
    keep_store(renderer, store)
    return renderer


def request_of(prompt: str = "<hotel/>?", **fields: Any) -> Request:
    relay = {"schema": NAME, "prompt": prompt, **fields.pop("relay", {})}
    return Request.model_validate({"relay": relay, **fields})


def test_a_request_gets_its_plan() -> None:
    request = request_of(prompt="<hotel/>?", vllm_xargs={"x": 1})
    token_ids = apply_modular_prompt(renderer_of({}), request)
    assert token_ids is not None and len(token_ids) == PROMPT_LEN
    assert request.vllm_xargs is not None and request.vllm_xargs["x"] == 1
    plan = ModulePlan.of_argument(request.vllm_xargs[EXTRA_ARG])
    assert [segment.name for segment in plan.segments] == ["", "hotel"]
    assert apply_modular_prompt(renderer_of({}), Request(prompt="x")) is None


def test_an_exact_prompt_is_a_prompt_like_any() -> None:
    request = request_of(relay={"mode": "exact"}, max_tokens=10_000)
    token_ids = apply_modular_prompt(renderer_of({}), request)
    assert token_ids is not None and text_of(token_ids) == "<s>A hotel.?"
    assert (request.max_tokens, request.vllm_xargs) == (10_000, None)


@pytest.mark.parametrize(
    ("given", "default", "expected"),
    [
        ({}, {}, {"max_tokens": 35}),
        ({}, {"max_tokens": 20}, {"max_tokens": 20}),
        ({}, {"max_tokens": 50}, {"max_tokens": 35}),
        ({"max_tokens": 5}, {}, {"max_tokens": 5}),
        (
            {"max_completion_tokens": 5, "max_tokens": 50},
            {},
            {"max_completion_tokens": 5, "max_tokens": 50},
        ),
    ],
)
def test_there_are_no_more_tokens_than_positions(
    given: dict[str, int], default: dict[str, int], expected: dict[str, int]
) -> None:
    request = request_of(**given)
    apply_modular_prompt(renderer_of(default), request)
    names = ("max_tokens", "max_completion_tokens")
    limits = {name: getattr(request, name) for name in names}
    assert {name: limit for name, limit in limits.items() if limit is not None} == expected


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_positions_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: given 36, but the prompt leaves 35 tokens"):
        apply_modular_prompt(renderer_of({}), request_of(**{name: 36}))


def test_without_a_longest_length_requests_keep_what_they_ask_for() -> None:
    request = request_of(max_tokens=10_000)
    apply_modular_prompt(renderer_of({}, None), request)
    assert request.max_tokens == 10_000


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (request_of("<hotal/>?"), "relay.prompt: prompt:1:1: the prompt: unknown module <hotal>"),
        (request_of("a & b\n <hotal/>?"), "relay.prompt: prompt:2:2: "),
        (request_of("<hotel/>", relay={"schema": "trap"}), "prompt:1:1: unknown schema 'trap'"),
        (request_of(relay={"schema": None}), "relay: schema: expected the name of a schema"),
        (request_of('<prompt schema="x">?</prompt>'), "relay: the prompt is a <prompt>, leave"),
        (request_of("<promptly/>?"), "unknown module <promptly>"),
        (request_of(relay={"mode": "fast"}), "relay.mode: "),
        (request_of(relay={"repair_tokens": -1}), "relay.repair_tokens: "),
        (
            request_of(relay={"repair_tokens": 4}),
            "relay.repair_tokens: given 4 with mode 'modular', expected mode 'repair'",
        ),
        (request_of(relay={"mode": "exact", "repair_tokens": 16}), "given 16 with mode 'exact'"),
        (request_of(relay={"sceham": "x"}), "relay.sceham: "),
        (Request.model_validate({"relay": "x"}), "relay: "),
        (request_of(messages=[{"role": "user"}]), "messages: given beside relay"),
        (request_of(echo=True), "echo: not with relay"),
    ],
)
def test_what_cannot_be_rendered_is_refused(request_: Request, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        apply_modular_prompt(renderer_of({}), request_)
    assert message in str(caught.value)


def test_vllm_demands_a_prompt_that_does_not_count() -> None:
    request = request_of()
    request.prompt = STAND_IN_PROMPT
    assert apply_modular_prompt(renderer_of({}), request) is not None
    request.prompt = "another"
    with pytest.raises(ValueError, match="prompt: given beside relay"):
        apply_modular_prompt(renderer_of({}), request)


def test_a_renderer_without_schemas_says_why() -> None:
    renderer = SimpleNamespace()
    with pytest.raises(ValueError, match="prompt modules: the server has not started"):
        store_of(renderer)
    keep_store(renderer, "no such luck")
    with pytest.raises(ValueError, match="prompt modules: no such luck"):
        apply_modular_prompt(renderer, request_of())


async def _chunks(*chunks: str) -> AsyncIterator[str]:
    for chunk in chunks:
        yield chunk


async def _streamed(request: Request, *chunks: str) -> list[str]:
    return [chunk async for chunk in with_usage(request, _chunks(*chunks))]


def test_usage_tells_the_tokens_of_modules() -> None:
    request = request_of()
    apply_modular_prompt(renderer_of({}), request)
    expected = {"cached_tokens_by_module": {"": 1, "hotel": 8}}
    usage = SimpleNamespace()
    add_usage(request, usage)
    assert usage.relay == expected
    add_usage(request, None)
    text = 'data: {"choices":[{"text":"\\"usage\\":{"}],"usage":null}\n\n'
    last = 'data: {"choices":[],"text":"ä","usage":{"prompt_tokens":3}}\n\n'
    done = "data: [DONE]\n\n"
    first, with_relay, end = asyncio.run(_streamed(request, text, last, done))
    assert (first, end) == (text, done)
    data = json.loads(with_relay.removeprefix("data: "))
    assert data == {
        "choices": [],
        "text": "ä",
        "usage": {"prompt_tokens": 3, "relay": expected},
    }
    assert with_relay.endswith("}\n\n")


def test_usage_counts_what_was_in_the_cache() -> None:
    request = request_of()
    apply_modular_prompt(renderer_of({}), request)
    note = note_of(request)
    assert note is not None
    note(SimpleNamespace())
    note(SimpleNamespace(relay_missed_modules=[1]))
    usage = SimpleNamespace()
    add_usage(request, usage)
    assert usage.relay == {"cached_tokens_by_module": {"": 1, "hotel": 0}}
    assert note_of(Request(prompt="x")) is None


def test_usage_of_other_requests_is_left_alone() -> None:
    usage = SimpleNamespace()
    add_usage(Request(prompt="x"), usage)
    assert vars(usage) == {}
    chunk = 'data: {"usage":{"prompt_tokens":3}}\n\n'
    assert asyncio.run(_streamed(Request(prompt="x"), chunk)) == [chunk]
