# SPDX-License-Identifier: Apache-2.0
"""Contexts in Python, on an engine without a model."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.long_context.context_engine import Engine, chat, letters, tokens
from vllm_relay.commands.errors import CommandError
from vllm_relay.long_context.client import (
    Context,
    delete_context,
    keep_context,
    keep_context_async,
    list_contexts,
    list_contexts_async,
)
from vllm_relay.long_context.orders import KEEP_ARG
from vllm_relay.sparse.contexts.context_store import context_id_of


def test_contexts_come_and_go() -> None:
    engine = Engine(context_dir="contexts")
    context = keep_context(engine, tokens(90))
    assert isinstance(context, Context)
    assert (context.num_tokens, context.state, context.problem) == (90, "indexing", None)
    assert list_contexts(engine) == [context]
    engine.core.workers[0].build_indexes(file_bytes=77)
    [stored] = list_contexts(engine)
    assert (stored.state, stored.memory_bytes, stored.file_bytes) == ("stored", 0, 77)
    delete_context(engine, context.context_id)
    assert list_contexts(engine) == []
    with pytest.raises(CommandError, match="there is no context") as caught:
        delete_context(engine, context.context_id)
    assert caught.value.status == 404


def test_an_llm_is_asked_for_its_engine() -> None:
    engine = Engine()
    llm = SimpleNamespace(llm_engine=engine)
    context = keep_context(llm, tokens(90))
    assert list_contexts(llm) == [context]
    delete_context(llm, context.context_id)
    assert list_contexts(engine) == []


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        (tuple(tokens(60)), tokens(60)),
        ("z" * 60, letters("z" * 60)),
        (
            [{"role": "user", "content": "z" * 60}],
            [*chat([{"role": "user", "content": "z" * 60}]), *letters("<assistant>")],
        ),
    ],
    ids=["token_ids", "text", "messages"],
)
def test_prompts_of_all_forms(prompt: Any, token_ids: list[int]) -> None:
    engine = Engine()
    assert keep_context(engine, prompt).context_id == context_id_of(token_ids)
    assert engine.prompts == [token_ids]


def test_requests_begin_behind_what_they_share_to_the_token() -> None:
    engine = Engine()
    keep_context(engine, tokens(90))
    engine.core.blocks.manager.reset_prefix_cache()
    assert engine.ask([*tokens(77), 500, 501]) == 77
    engine.core.blocks.manager.reset_prefix_cache()
    assert engine.ask(tokens(90)) == 89  # the last token is computed, for its logits


def test_the_request_computes_one_token_and_asks_to_be_kept() -> None:
    engine = Engine()
    seen: list[Any] = []
    run = engine.core.run
    engine.core.run = lambda token_ids, params, status: (
        seen.append(params) or run(token_ids, params, status)
    )
    keep_context(engine, tokens(60))
    [params] = seen
    assert params.max_tokens == 1 and params.extra_args == {KEEP_ARG: True}


def test_a_context_that_is_there_is_found() -> None:
    engine = Engine()
    first = keep_context(engine, tokens(60))
    assert keep_context(engine, tokens(60)) == first
    assert asyncio.run(keep_context_async(engine, tokens(60))) == first
    assert len(engine.prompts) == 1
    engine.core.workers[0].contexts.clear()  # someone deleted the file
    keep_context(engine, tokens(61))  # lists them
    assert keep_context(engine, tokens(60)) == first
    assert len(engine.prompts) == 3


def test_a_context_does_not_stand_for_a_longer_one() -> None:
    engine = Engine()
    for length in (60, 61):
        keep_context(engine, tokens(length))
    assert [len(each) for each in engine.prompts] == [60, 61]
    assert [each.num_tokens for each in list_contexts(engine)] == [60, 61]


def test_an_async_engine() -> None:
    engine = Engine()

    async def use() -> None:
        context = await keep_context_async(engine, tokens(60))
        assert await list_contexts_async(engine) == [context]
        engine.status = RequestStatus.FINISHED_ABORTED
        with pytest.raises(CommandError, match="try again") as caught:
            await keep_context_async(engine, tokens(70))
        assert caught.value.status == 409

    asyncio.run(use())


def test_an_engine_that_is_busy_is_not_stepped() -> None:
    engine = Engine()
    engine.add_request("a", {"prompt_token_ids": tokens(60)}, None)
    with pytest.raises(RuntimeError, match="unfinished requests: finish them first"):
        keep_context(engine, tokens(60))
    assert engine.prompts == []


@pytest.mark.parametrize(
    ("prompt", "status", "message"),
    [
        (None, 400, "None was given as prompt, expected a text, token ids or messages"),
        ("", 400, "the text is empty"),
        ([{"role": "user"}], 400, "expected a text as content of every message"),
        (tokens(49), 400, "a prompt of 49 tokens was given, expected at least min_context_tokens"),
        (tokens(400), 400, "expected fewer than max_model_len=400"),
        (tokens(60), 507, "delete contexts, or raise host_memory_gib"),
    ],
)
def test_refusals(prompt: Any, status: int, message: str) -> None:
    engine = Engine(host_granules=1)
    with pytest.raises(CommandError, match=message) as caught:
        keep_context(engine, prompt)
    assert caught.value.status == status
    assert engine.prompts == []


def test_a_prompt_that_the_engine_refuses() -> None:
    engine = Engine()
    engine.fails = ValueError("token id 900 is out of vocabulary")
    with pytest.raises(CommandError, match="token id 900 is out of vocabulary") as caught:
        keep_context(engine, tokens(60))
    assert caught.value.status == 400


@pytest.mark.parametrize("options", [{"backend": "RELAY"}, {"engines": 2}])
def test_engines_without_contexts(options: dict[str, Any]) -> None:
    engine = Engine(**options)
    calls = [
        lambda: keep_context(engine, tokens(60)),
        lambda: list_contexts(engine),
        lambda: delete_context(engine, "a"),
        lambda: asyncio.run(keep_context_async(engine, tokens(60))),
        lambda: asyncio.run(list_contexts_async(engine)),
    ]
    for call in calls:
        with pytest.raises(CommandError) as caught:
            call()
        assert caught.value.status == 501
