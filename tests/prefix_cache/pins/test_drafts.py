# SPDX-License-Identifier: Apache-2.0
"""Pins where drafts of EAGLE or MTP depend on the token behind a block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm import LLMEngine, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from tests.integration.tiny_models import save_model
from tests.prefix_cache.pins.pin_scheduler import (
    BLOCK_SIZE,
    HAS_LOOKAHEAD_HASHES,
    Scheduler,
    tokens,
)
from tests.scheduler.simulated_engine import start
from vllm_relay.commands.errors import CommandError
from vllm_relay.prefix_cache.pins.client import Declaration, pin_tokens
from vllm_relay.prefix_cache.predict.executor import StubExecutor

needs_lookahead_hashes = pytest.mark.skipif(
    not HAS_LOOKAHEAD_HASHES, reason="this vLLM has no lookahead block hashes"
)


@pytest.mark.parametrize("sliding_window", [None, 6, 9])
def test_a_pin_saves_with_eagle_what_its_prompt_saves_right_after_it_ran(
    sliding_window: int | None,
) -> None:
    stock = Scheduler(60, sliding_window=sliding_window, use_eagle=True)
    stock.run(tokens(16))
    expected = stock.run([*tokens(16), 200, 201, 202, 203, 204])
    assert expected == 12  # vLLM computes the last block again

    scheduler = Scheduler(60, sliding_window=sliding_window, use_eagle=True)
    entry = scheduler.pin("a", tokens(18))
    assert (entry["resident"], entry["tokens"]) == (True, 16)
    scheduler.flood()
    assert scheduler.run([*tokens(16), 200, 201, 202, 203, 204]) == expected
    scheduler.flood()
    assert scheduler.run([*tokens(16), 300, 301, 302, 303, 304]) == expected


def test_all_blocks_of_an_unpinned_prompt_are_given_back_with_eagle() -> None:
    scheduler = Scheduler(use_eagle=True)
    assert scheduler.pin("a", tokens(16))["blocks"] == 4
    scheduler.pin("b", tokens(8))
    assert scheduler.pins.num_blocks == 4
    scheduler.pins.unpin("a")
    assert scheduler.pins.num_blocks == 2
    scheduler.pins.unpin("b")
    assert scheduler.num_free == 30


def test_a_pin_is_cold_with_eagle_while_its_last_block_is_not_there() -> None:
    scheduler = Scheduler(use_eagle=True)
    scheduler.pins.declare("a", tokens(16))
    request = scheduler.request(tokens(16), "a")
    scheduler.prefill(request, 12)
    scheduler.free(request)
    assert not scheduler.entry("a")["resident"]
    assert scheduler.num_free == 30


def test_one_block_cannot_be_pinned_with_eagle() -> None:
    scheduler = Scheduler(use_eagle=True)
    with pytest.raises(CommandError, match="7 tokens was given.* expected at least 8 tokens") as e:
        scheduler.pins.declare("a", tokens(7))
    assert e.value.status == 400
    assert "computes the last block" in str(e.value)


@needs_lookahead_hashes
@pytest.mark.parametrize("sliding_window", [None, 6, 9])
@pytest.mark.parametrize("lookahead_tokens", [1, 3])
def test_a_pin_holds_the_blocks_whose_names_its_prompt_decides(
    lookahead_tokens: int, sliding_window: int | None
) -> None:
    for num_tokens in range(16, 22):
        scheduler = Scheduler(60, sliding_window=sliding_window, lookahead_tokens=lookahead_tokens)
        held = (num_tokens - lookahead_tokens) // BLOCK_SIZE * BLOCK_SIZE
        entry = scheduler.pin("a", tokens(num_tokens))
        assert (entry["resident"], entry["tokens"]) == (True, held), num_tokens
        scheduler.flood()
        # whatever comes behind the prompt
        assert scheduler.run([*tokens(num_tokens), 200, 201, 202, 203]) == held
        scheduler.flood()
        assert scheduler.run([*tokens(num_tokens), 300, 301, 302, 303]) == held


@needs_lookahead_hashes
def test_a_prompt_that_differs_behind_a_block_has_another_name_for_it() -> None:
    scheduler = Scheduler(lookahead_tokens=1)
    scheduler.pin("a", tokens(17))
    scheduler.flood()
    assert scheduler.run([*tokens(16), 200, 201]) == 12
    with pytest.raises(CommandError, match="another prompt"):
        scheduler.pins.declare("a", [*tokens(16), 200])
    assert scheduler.pin("b", [*tokens(16), 200])["resident"]
    assert scheduler.pins.num_blocks == 5  # the last one of each, and three of both


@needs_lookahead_hashes
def test_what_stands_behind_the_last_block_has_to_be_given() -> None:
    scheduler = Scheduler(lookahead_tokens=3)
    with pytest.raises(CommandError, match="6 tokens was given.* expected at least 7 tokens") as e:
        scheduler.pins.declare("a", tokens(6))
    assert e.value.status == 400
    assert "3 tokens behind" in str(e.value)
    assert scheduler.pin("a", tokens(7))["resident"]


@needs_lookahead_hashes
def test_room_is_counted_for_the_blocks_that_two_pins_do_not_share() -> None:
    """Where names differ, so do blocks, also if the tokens in them are the same."""
    scheduler = Scheduler(21, lookahead_tokens=1)  # of 20 blocks, 10 are for the longest request
    scheduler.pin("a", tokens(33))  # 8 blocks
    scheduler.pins.declare("b", [*tokens(32), 200])  # one of its own
    scheduler.pins.unpin("b")
    with pytest.raises(CommandError, match="needs 3 KV blocks") as e:
        scheduler.pins.declare("c", [*tokens(28), *range(200, 209)])  # the 7th differs too
    assert e.value.status == 507


def cached_tokens(engine: LLMEngine, prompt: list[int]) -> int:
    """How many tokens of a prompt its request has found."""
    params = SamplingParams(max_tokens=1, detokenize=False)
    engine.add_request("question", {"prompt_token_ids": prompt}, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].num_cached_tokens is not None
    return outputs[-1].num_cached_tokens


class OneTokenExecutor(StubExecutor):
    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self.sampler = lambda request_id: [7]
        return super().execute_model(*args, **kwargs)


@pytest.mark.parametrize(
    "looks_ahead",
    [False, pytest.param(True, marks=needs_lookahead_hashes)],
    ids=["legacy", "lookahead"],
)
def test_a_prompt_is_pinned_in_an_engine_with_eagle(tmp_path: Path, looks_ahead: bool) -> None:
    target = save_model("llama", tmp_path / "target")
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    config = json.loads((target / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    drafts: dict[str, Any] = {"method": "eagle", "model": str(drafter), "num_speculative_tokens": 2}
    if HAS_LOOKAHEAD_HASHES and not looks_ahead:
        drafts["disable_lookahead_block_hashes"] = True
    engine = start(
        str(target),
        asynchronous=False,
        executor_class=OneTokenExecutor,
        speculative_config=drafts,
        additional_config={"relay": {"scheduler": True}},
    )
    try:
        system_prompt = [3 + number % 400 for number in range(100)]
        pin = pin_tokens(engine, Declaration(system_prompt))
        assert (pin.resident, pin.tokens, pin.blocks) == (True, 96, 3)
        pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))
        assert cached_tokens(engine, [*system_prompt, 401, 402]) == (96 if looks_ahead else 64)
    finally:
        engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
