# SPDX-License-Identifier: Apache-2.0
"""Contexts that are computed when an engine starts, on an engine without a model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.long_context.context_engine import Engine, OnlineRenderer, chat, letters
from tests.support.starts import cancel_the_first_of_two
from vllm_relay import wiring
from vllm_relay.commands import at_start
from vllm_relay.config import RelayConfig
from vllm_relay.long_context.client import list_contexts, preload_contexts, preload_contexts_async
from vllm_relay.long_context.start_checks import check_context_dir, check_contexts

TEXT = "be brief and kind " * 4


def preload_in_loop(engine: Engine) -> None:
    asyncio.run(preload_contexts_async(engine))


def preload_in_server(engine: Engine) -> None:
    asyncio.run(preload_contexts_async(engine, OnlineRenderer()))


in_all_engines = pytest.mark.parametrize(
    "preload", [preload_contexts, preload_in_loop, preload_in_server], ids=["sync", "async", "http"]
)


def as_system_message(text: str) -> list[int]:
    """Conversations go on with the user's turn."""
    return [*chat([{"role": "system", "content": text}]), *letters("<user>")]


@in_all_engines
def test_texts_and_files_become_contexts(preload: Callable[[Engine], None], tmp_path: Path) -> None:
    path = tmp_path / "handbook.txt"
    path.write_text("from a file\n" * 6, encoding="utf-8")
    engine = Engine(contexts=[TEXT, f"@{path}"])
    preload(engine)
    wanted = [as_system_message(TEXT), as_system_message("from a file\n" * 6)]
    assert engine.prompts == wanted
    assert [each.num_tokens for each in list_contexts(engine)] == list(map(len, wanted))


@in_all_engines
def test_without_a_chat_template_prompts_begin_with_the_text(
    preload: Callable[[Engine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_start, "_has_chat_template", lambda *args: False)
    engine = Engine(contexts=[TEXT])
    preload(engine)
    assert engine.prompts == [letters(TEXT)]


@in_all_engines
def test_contexts_that_are_stored_are_not_computed(preload: Callable[[Engine], None]) -> None:
    earlier = Engine(contexts=[TEXT])
    preload(earlier)
    engine = Engine(contexts=[TEXT, TEXT.upper()])
    engine.core.workers[0].contexts |= earlier.core.workers[0].contexts
    preload(engine)
    assert engine.prompts == [as_system_message(TEXT.upper())]
    assert len(list_contexts(engine)) == 2


@in_all_engines
def test_no_texts_ask_for_nothing(preload: Callable[[Engine], None]) -> None:
    engine = Engine()
    preload(engine)
    assert engine.prompts == [] and not engine.core.long_contexts.contexts.has_loaded


@in_all_engines
@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("too short", r"contexts\[1\]: a prompt of 23 tokens was given, expected at least min_con"),
        ("x" * 400, r"contexts\[1\]: a prompt of 414 tokens was given, expected fewer than max_mo"),
        ("@/no/such/file", r"contexts\[1\]: '@/no/such/file' was given, .*No such file"),
        (" \n", r"contexts\[1\]: ' \\n' was given, expected a text that is not empty"),
    ],
    ids=["short", "long", "missing_file", "empty"],
)
def test_a_text_that_cannot_be_kept_stops_the_start(
    preload: Callable[[Engine], None], second: str, message: str
) -> None:
    with pytest.raises(ValueError, match=r"additional_config\.relay\." + message):
        preload(Engine(contexts=[TEXT, second]))


def test_an_empty_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"contexts\[0\]: .*expected a text that is not empty"):
        preload_contexts(Engine(contexts=[f"@{tmp_path / 'empty.txt'}"]))


def test_too_little_host_memory_stops_the_start() -> None:
    with pytest.raises(ValueError, match=r"relay\.contexts\[1\]: a context of .* bytes of host"):
        preload_contexts(Engine(contexts=[TEXT, TEXT.upper()], host_granules=2))


def test_what_is_ready_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    logger = logging.getLogger("vllm.relay")
    monkeypatch.setattr(logger, "info", lambda line, *args: lines.append(line % args))
    preload_contexts(Engine())
    assert lines == []
    preload_contexts(Engine(contexts=[TEXT, TEXT.upper()]))
    num_tokens = 2 * len(as_system_message(TEXT))
    name = "vllm-relay: additional_config.relay.contexts"
    assert lines[0] == f"{name}[0]: computing {num_tokens // 2} tokens"
    assert lines[1].startswith(f"{name}[0]: done in ")
    assert lines[2] == f"{name}[1]: computing {num_tokens // 2} tokens"
    assert lines[4:] == [f"vllm-relay: contexts are ready: 2, tokens: {num_tokens}"]


def test_contexts_are_computed_once_though_who_asked_first_is_cancelled() -> None:
    engine = Engine(contexts=[TEXT])
    cancel_the_first_of_two(engine, preload_contexts_async, OnlineRenderer())
    assert len(engine.prompts) == 1


def test_without_its_contexts_an_async_engine_takes_no_request() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.async_llm import AsyncLLM

    wiring.prepare_new_engines()
    engine: Any = Engine(contexts=["too short"])
    engine.vllm_config.scheduler_config = SimpleNamespace(scheduler_cls=None)

    async def ask() -> None:
        for _ in range(2):
            message = r"additional_config\.relay\.contexts\[0\]: a prompt of 23 tokens"
            with pytest.raises(VLLMValidationError, match=message):
                await AsyncLLM.add_request(engine, "a", {"prompt_token_ids": [1]}, None)

    asyncio.run(ask())


def config(
    *,
    caching: bool = True,
    engines: int = 1,
    skip_tokenizer_init: bool = False,
    is_hybrid: bool = False,
) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
        parallel_config=SimpleNamespace(data_parallel_size=engines),
        model_config=SimpleNamespace(
            skip_tokenizer_init=skip_tokenizer_init, is_hybrid=is_hybrid, is_attention_free=False
        ),
    )


@pytest.mark.parametrize(
    ("kwargs", "way_out"),
    [
        ({"caching": False}, "set --enable-prefix-caching"),
        ({"engines": 2}, "set --data-parallel-size 1"),
        ({"skip_tokenizer_init": True}, "remove --skip-tokenizer-init, or keep token ids with"),
        ({"is_hybrid": True}, "keys and values of all layers"),
    ],
)
def test_configurations_without_contexts(kwargs: dict[str, Any], way_out: str) -> None:
    options = RelayConfig(contexts=(TEXT,))
    check_contexts(config(), options)
    check_contexts(config(**kwargs), RelayConfig())
    with pytest.raises(ValueError, match=r"relay\.contexts needs") as caught:
        check_contexts(config(**kwargs), options)
    assert way_out in str(caught.value)


def test_a_folder_is_of_no_use_to_models_whose_contexts_cannot_be_kept(tmp_path: Path) -> None:
    options = RelayConfig(context_dir=str(tmp_path / "contexts"))
    check_context_dir(config(), options)
    with pytest.raises(ValueError, match=r"relay\.context_dir needs keys and values of all layers"):
        check_context_dir(config(is_hybrid=True), options)


def test_files_are_looked_for_before_the_engine_starts() -> None:
    with pytest.raises(ValueError, match=r"contexts\[0\]: '@/no/such/file' was given"):
        check_contexts(config(), RelayConfig(contexts=("@/no/such/file",)))
