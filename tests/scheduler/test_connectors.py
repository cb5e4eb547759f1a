# SPDX-License-Identifier: Apache-2.0
"""RelayScheduler beside a KV connector, in vLLM's engine with a simulated worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm import LLMEngine, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from tests.integration.engine_main import tokens
from tests.integration.tiny_models import save_model
from tests.scheduler.memory_connector import ConnectedExecutor, transfer_config
from tests.scheduler.simulated_engine import answer, start
from tests.scheduler.soak import Question, Soak, prompts
from tests.support.depth import cases


class PatientSoak(Soak):
    def reset(self) -> None:
        # vLLM cannot while something is loaded, or freed after a step that is under way
        if not (self.scheduler.kv_holding_waiting or self.scheduler.running):
            super().reset()


both_kinds = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model("llama", tmp_path_factory.mktemp("models") / "llama"))


Connected = Callable[..., LLMEngine]


@pytest.fixture
def connected(model: str) -> Iterator[Connected]:
    """Starts an engine with a connector."""
    engines = []

    def connected(
        *,
        relay: dict[str, Any],
        connector: dict[str, Any],
        asynchronous_steps: bool = False,
        **engine_args: Any,
    ) -> LLMEngine:
        engine = start(
            model,
            asynchronous=asynchronous_steps,
            executor_class=ConnectedExecutor,
            kv_transfer_config=transfer_config(**connector),
            additional_config={"relay": {"scheduler": True, "max_hold_s": 1e6, **relay}},
            **engine_args,
        )
        engines.append(engine)
        return engine

    yield connected
    for engine in engines:
        engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


@both_kinds
@pytest.mark.parametrize(
    ("eviction", "asynchronous_steps"), [("queue", False), ("queue", True), ("lru", False)]
)
def test_every_block_holds_what_its_request_needs(
    connected: Connected, asynchronous: bool, eviction: str, asynchronous_steps: bool
) -> None:
    engine = connected(
        asynchronous_steps=asynchronous_steps,
        relay={"eviction": eviction, "max_overtakes": 8},
        connector={"asynchronous": asynchronous, "max_blocks": 40, "answers_late": True},
        num_gpu_blocks_override=28,
        long_prefill_token_threshold=48,
    )
    texts = prompts()

    def check(question: Question, actual: list[int]) -> None:
        assert actual == answer(question, texts[question.prompt], ())

    soak = PatientSoak(engine, 0, check)
    soak.run(cases(300))
    assert soak.scheduler.connector.loaded_blocks > 0


def ask(engine: LLMEngine, name: str, prompt: list[int]) -> None:
    params = SamplingParams(max_tokens=2, temperature=0, detokenize=False)
    engine.add_request(name, {"prompt_token_ids": prompt}, params)


def finish(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def step(engine: LLMEngine) -> None:
    """One; `LLMEngine.step` goes on until there is an answer."""
    engine.engine_core.engine_core.step_fn()


def forget_on_device(engine: LLMEngine) -> Any:
    """Empties the prefix cache, not the connector; returns the scheduler."""
    scheduler: Any = engine.engine_core.engine_core.scheduler
    assert scheduler.reset_prefix_cache()
    return scheduler


PREFIX = tokens(1, 256)
PREFIX_BLOCKS = 8


@both_kinds
def test_nobody_waits_for_a_prefix_that_the_connector_can_load(
    connected: Connected, asynchronous: bool
) -> None:
    engine = connected(
        relay={}, connector={"asynchronous": asynchronous}, long_prefill_token_threshold=32
    )
    ask(engine, "first", PREFIX + tokens(2, 9))
    finish(engine)
    scheduler = forget_on_device(engine)
    stored = scheduler.connector.stored.copy()
    scheduler.connector.stored.clear()
    ask(engine, "computes", PREFIX + tokens(3, 9))
    step(engine)
    scheduler.connector.stored.update(stored)  # another engine shares the connector's memory
    ask(engine, "loads", PREFIX + tokens(4, 9))
    step(engine)
    assert scheduler.waiting.held_requests == 0
    assert scheduler.connector.loaded_blocks == 4  # the others are computed by then


def test_a_prefix_is_loaded_once(connected: Connected) -> None:
    engine = connected(relay={}, connector={"asynchronous": True}, long_prefill_token_threshold=32)
    ask(engine, "first", PREFIX + tokens(2, 9))
    finish(engine)
    scheduler = forget_on_device(engine)
    for seed in range(3, 8):
        ask(engine, str(seed), PREFIX + tokens(seed, 9))
    step(engine)
    assert scheduler.waiting.held_requests == 4
    finish(engine)
    assert scheduler.connector.loaded_blocks == PREFIX_BLOCKS


@both_kinds
def test_prefixes_that_the_connector_has_run_before_those_that_are_computed(
    connected: Connected, asynchronous: bool
) -> None:
    engine = connected(relay={}, connector={"asynchronous": asynchronous}, max_num_seqs=1)
    ask(engine, "first", PREFIX + tokens(2, 9))
    finish(engine)
    scheduler = forget_on_device(engine)
    for seed in range(3, 6):
        ask(engine, f"cold-{seed}", tokens(9, 256) + tokens(seed, 9))
    ask(engine, "stored", PREFIX + tokens(3, 9))
    step(engine)
    assert scheduler.connector.loaded_blocks == PREFIX_BLOCKS


@both_kinds
def test_no_look_up_is_made_twice(connected: Connected, asynchronous: bool) -> None:
    engine = connected(relay={}, connector={"asynchronous": asynchronous})
    ask(engine, "first", PREFIX + tokens(2, 9))
    finish(engine)
    scheduler = forget_on_device(engine)
    before = scheduler.connector.lookups
    for seed in range(3, 6):
        ask(engine, str(seed), tokens(seed, 20) if seed < 5 else PREFIX + tokens(seed, 9))
    step(engine)
    assert len(scheduler.running) + len(scheduler.kv_holding_waiting) == 3
    assert scheduler.connector.lookups == before + 3
