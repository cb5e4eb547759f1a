# SPDX-License-Identifier: Apache-2.0
"""Which tokens a text pins, and which system prompts are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_relay import prefix_cache
from vllm_relay.commands.at_start import read_texts
from vllm_relay.commands.errors import CommandError
from vllm_relay.commands.prompts import (
    common_tokens,
    continued_conversations,
    continued_texts,
    is_tokens,
    text_tokens_async,
    tokens_of,
)
from vllm_relay.config import RelayConfig
from vllm_relay.prefix_cache.pins.system_prompts import check_system_prompts


def config(**kwargs: Any) -> Any:
    model = {"runner_type": "generate", "skip_tokenizer_init": False}
    defaults = {"scheduler": True, "caching": True}
    given = {**model, **defaults, **kwargs}
    return SimpleNamespace(
        additional_config={"relay": {"scheduler": given["scheduler"]}},
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        cache_config=SimpleNamespace(enable_prefix_caching=given["caching"]),
        model_config=SimpleNamespace(**{name: given[name] for name in model}),
    )


def test_tokens_that_depend_on_what_follows_are_left_out() -> None:
    def tokenize(text: str) -> list[str]:  # the last word goes on in "...sa"
        return text.replace(" ", " | ").split("|")

    prompts = [{"prompt_token_ids": tokenize(text)} for text in continued_texts("two words")]
    assert common_tokens(prompts) == ["two "]


class WordRenderer:
    """Letters up to a space are a token."""

    tokenizer = object()
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))

    def render_cmpl(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"prompt_token_ids": prompt["prompt"].split(" ")} for prompt in prompts]

    async def render_cmpl_async(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.render_cmpl(prompts)


def test_a_text_of_which_nothing_is_certain_is_refused_by_its_own_tokens() -> None:
    message = "a text of 1 tokens was given, .* expected at least a KV block of 16 tokens"
    renderer: Any = WordRenderer()
    for tokens in (
        lambda: tokens_of(SimpleNamespace(renderer=renderer), "hi"),
        lambda: asyncio.run(text_tokens_async(renderer, "hi")),
    ):
        with pytest.raises(CommandError, match=message) as caught:
            tokens()
        assert caught.value.status == 400
    assert tokens_of(SimpleNamespace(renderer=renderer), "hi there") == ["hi"]


def test_conversations_are_continued_by_the_other_side() -> None:
    system, user = ({"role": role, "content": "x"} for role in ("system", "user"))
    roles = [each[-1]["role"] for each in continued_conversations([system])]
    assert set(roles) == {"user"}
    roles = [each[-1]["role"] for each in continued_conversations([system, user])]
    assert set(roles) == {"assistant"}
    for role in (None, 5, ["user"]):
        with pytest.raises(CommandError, match="expected a text as role of every message"):
            continued_conversations([{"role": role, "content": "x"}])
    with pytest.raises(CommandError, match="expected a text as content of every message"):
        continued_conversations([{"role": "user", "content": [{"type": "image_url"}]}])


def test_prompts_are_told_apart() -> None:
    assert is_tokens([1, 2])
    assert not is_tokens("12")
    assert not is_tokens([{"role": "user", "content": "x"}])
    assert not is_tokens([True])
    assert not is_tokens([1 << 31])


@pytest.mark.parametrize("prompt", [[1.5], [1, True], [1 << 70], [-1], ["text"], [[1]]])
def test_a_list_of_neither_tokens_nor_messages_is_refused(prompt: Any) -> None:
    with pytest.raises(CommandError, match="was given in a prompt, expected token ids"):
        tokens_of(SimpleNamespace(renderer=None), prompt)


def test_texts_and_files(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("from a file\n", encoding="utf-8")
    options = RelayConfig(system_prompts=("text", f"@{path}"))
    assert read_texts("system_prompts", options.system_prompts) == ["text", "from a file\n"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("@/no/such/file", r"system_prompts\[0\]: '@/no/such/file' was given, .*No such file"),
        (" ", r"system_prompts\[0\]: ' ' was given, expected a text that is not empty"),
    ],
)
def test_bad_system_prompts(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_system_prompts(config(), RelayConfig(system_prompts=(given,)))


@pytest.mark.parametrize(
    ("kwargs", "way_out"),
    [
        ({"scheduler": False}, "set additional_config.relay.scheduler true"),
        ({"caching": False}, "set --enable-prefix-caching"),
        ({"runner_type": "pooling"}, "given --runner pooling"),
        ({"skip_tokenizer_init": True}, "remove --skip-tokenizer-init, or pin token ids"),
    ],
)
def test_configurations_without_system_prompts(kwargs: dict[str, Any], way_out: str) -> None:
    options = RelayConfig(system_prompts=("be brief",))
    check_system_prompts(config(), options)
    check_system_prompts(config(**kwargs), RelayConfig())
    with pytest.raises(ValueError, match=r"relay\.system_prompts needs") as caught:
        check_system_prompts(config(**kwargs), options)
    assert way_out in str(caught.value)


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ("pin", {"prompt": None}, "None was given as prompt, expected a text, token ids"),
        ("pin", {"prompt": {1, 2}}, "was given as prompt, expected a text, token ids"),
        ("pin", {"prompt": [1], "pin_id": 5}, "id: given 5, expected 1 to 128 of the letters"),
        ("pin", {"prompt": [1], "pin_id": ""}, "id: given '', expected 1 to 128 of the letters"),
        ("pin", {"prompt": [1], "pin_id": ["a"]}, r"id: given \['a'\], expected 1 to 128"),
        ("pin", {"prompt": [1], "ttl_s": "5"}, "ttl_s: given '5', expected seconds, more than 0"),
        ("pin", {"prompt": [1], "ttl_s": True}, "ttl_s: given True, expected seconds"),
        ("pin", {"prompt": [1], "ttl_s": float("nan")}, "ttl_s: given nan, expected seconds"),
        ("pin", {"prompt": [1], "ttl_s": 0}, "ttl_s: given 0, expected seconds, more than 0"),
        ("unpin", {"pin_id": None}, "id: given None, expected 1 to 128 of the letters"),
        ("unpin", {"pin_id": b"a"}, "id: given b'a', expected 1 to 128 of the letters"),
        ("top_prefixes", {"count": "3"}, "count: given '3', expected an integer from 0"),
        ("top_prefixes", {"count": -1}, "count: given -1, expected an integer from 0"),
    ],
)
def test_what_is_no_prompt_or_pin_is_refused(
    call: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(prefix_cache.PinError, match=message) as caught:
        getattr(prefix_cache, call)(None, **arguments)  # the engine is not asked
    assert caught.value.status == 400
