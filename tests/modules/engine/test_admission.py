# SPDX-License-Identifier: Apache-2.0
"""Who waits for modules, and who computes them, step by step in vLLM's engine with a simulated
worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vllm import LLMEngine, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from tests.integration.tiny_models import save_model
from tests.modules.engine.test_scheduling import BLOCK_SIZE, WordTokenizer
from tests.scheduler.simulated_engine import start
from tests.support.records import records_of_modules
from vllm_relay.modules.engine.admission import ENCODING_PREFIX
from vllm_relay.modules.markup.schema import Module, Schema
from vllm_relay.modules.prompt.plan import EXTRA_ARG, plan_of_request
from vllm_relay.modules.prompt.schema_store import SchemaStore

NUM_BLOCKS = 20
MODULE_BLOCKS = 2


class Engine:
    """An engine, and modules m0, m1, ... of two blocks each."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.scheduler: Any = engine.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.num_free_blocks = self.pool.get_num_free_blocks()
        self.modules = self.scheduler.modules
        self.store = SchemaStore(WordTokenizer(), block_size=BLOCK_SIZE)
        words = " ".join(["w9"] * (MODULE_BLOCKS * BLOCK_SIZE - 5))
        self.store.add(Schema("s", *(Module(f"m{n}", f"{words} w{20 + n} ") for n in range(6))))

    def add(self, name: str, *numbers: int, priority: int = 0) -> Any:
        imports = "".join(f"<m{number}/>" for number in numbers)
        rendered = self.store.render(f'<prompt schema="s">{imports} w7</prompt>')
        assert rendered.plan is not None
        self.engine.add_request(
            name,
            {"prompt_token_ids": rendered.token_ids},
            SamplingParams(
                temperature=0,
                max_tokens=2,
                ignore_eos=True,
                detokenize=False,
                extra_args={EXTRA_ARG: rendered.plan.to_argument()},
            ),
            priority=priority,
        )
        return self.requests()[-1]

    def add_plain(self, name: str) -> None:
        self.engine.add_request(
            name,
            {"prompt_token_ids": [11] * 40},
            SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False),
        )

    def requests(self) -> list[Any]:
        return list(self.scheduler.requests.values())

    def encodings(self) -> list[Any]:
        return [each for each in self.requests() if each.request_id.startswith(ENCODING_PREFIX)]

    def names(self) -> list[str]:
        """Of the modules that are computed, those first that run first."""
        order = [*self.scheduler.running, *self.scheduler.waiting]
        plans = [plan_of_request(each) for each in order if each in self.encodings()]
        return [plan.segments[-1].name for plan in plans if plan is not None]

    def finish(self) -> list[str]:
        """Names of requests, in the order in which they end."""
        done = []
        while self.engine.has_unfinished_requests():
            done += [each.request_id for each in self.engine.step() if each.finished]
        assert records_of_modules(self.modules) == 0
        assert self.pool.get_num_free_blocks() == self.num_free_blocks
        return done


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model("llama", tmp_path_factory.mktemp("model")))


@contextmanager
def started(model: str, max_num_seqs: int = 12, **options: Any) -> Iterator[Engine]:
    llm_engine = start(
        model,
        asynchronous=False,
        attention_backend="relay",
        num_gpu_blocks_override=NUM_BLOCKS,
        max_num_seqs=max_num_seqs,
        scheduling_policy="priority",
        additional_config={"relay": {"scheduler": True, **options}},
    )
    try:
        yield Engine(llm_engine)
    finally:
        llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


@pytest.fixture
def engine(model: str) -> Iterator[Engine]:
    with started(model) as engine:
        yield engine


def test_a_module_is_computed_once_for_all_who_wait(engine: Engine) -> None:
    for number in range(5):
        engine.add(str(number), 0, 1 + number % 2)
    engine.modules.prepare()
    engine.modules.prepare()
    assert sorted(engine.names()) == ["m0", "m1", "m2"]
    assert sorted(engine.finish()) == list("01234")
    engine.add("later", 1, 0)
    engine.modules.prepare()
    assert not engine.encodings()
    assert engine.finish() == ["later"]


def test_what_a_leader_waits_for_takes_its_priority(engine: Engine) -> None:
    engine.add("low", 0, 1, priority=5)
    engine.modules.prepare()
    assert {each.priority for each in engine.encodings()} == {5}
    engine.modules.release()
    engine.add("high", 1, 2, priority=1)
    engine.modules.prepare()
    by_name = dict(zip(engine.names(), [1, 1, 5], strict=True))
    assert set(by_name) == {"m0", "m1", "m2"} and by_name["m0"] == 5
    assert sorted(each.priority for each in engine.encodings()) == [1, 1, 5]
    assert engine.finish() == ["high", "low"]


def test_who_waits_behind_the_leader_gets_what_there_is_room_for(engine: Engine) -> None:
    engine.add("leader", 0, 1, 2, 3)
    engine.add("next", 4, 5)
    engine.modules.prepare()
    # four modules for the leader, and of half of the 19 blocks there is nothing left
    assert sorted(engine.names()) == ["m0", "m1", "m2", "m3"]
    assert engine.finish() == ["leader", "next"]


def test_an_aborted_leader_holds_nothing(engine: Engine) -> None:
    leader = engine.add("leader", 0, 1)
    while not engine.modules._lease._blocks:
        engine.engine.step()
    engine.add("next", 2, 3)
    engine.engine.abort_request(["leader"])
    assert not engine.modules.goes_first(leader)
    assert not any(map(engine.modules.goes_first, engine.encodings()))
    assert engine.finish() == ["next"]


def test_modules_that_are_reset_are_computed_again(engine: Engine) -> None:
    engine.add("waits", 0, 1, 2)
    while not engine.modules._lease._blocks:
        engine.engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.finish() == ["waits"]


@pytest.mark.parametrize("num_modules", [1, 6], ids=["that are there", "that are computed anew"])
def test_a_stream_of_modular_requests_starves_nobody(model: str, num_modules: int) -> None:
    with started(model, max_num_seqs=1, max_overtakes=8, max_hold_s=1e6) as engine:
        number, waiting, ended = 0, 0, []
        engine.add("first", 0)
        engine.engine.step()
        engine.add_plain("plain")
        for _ in range(400):
            while waiting < 30:
                engine.add(str(number), number % num_modules)
                number, waiting = number + 1, waiting + 1
            outputs = [each.request_id for each in engine.engine.step() if each.finished]
            ended += outputs
            waiting -= len(outputs)
            if "plain" in ended:
                break
        assert "plain" in ended, f"{len(ended)} others have run"
        engine.finish()


def test_who_has_all_modules_waits_like_any_other(engine: Engine) -> None:
    engine.add("computes", 0, 1)
    assert engine.finish() == ["computes"]
    request = engine.add("has all", 0, 1)
    engine.modules.prepare()
    assert not engine.modules.goes_first(request)
    assert not records_of_modules(engine.modules)
    assert engine.finish() == ["has all"]


def test_a_step_looks_at_few_of_those_who_wait(engine: Engine) -> None:
    """Waiting requests are looked at when something happens that concerns them."""
    prepare, calls = engine.modules.prepare, 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += 1

    def counted() -> None:
        sys.setprofile(count)
        try:
            prepare()
        finally:
            sys.setprofile(None)

    engine.modules.prepare = counted
    worst = []
    for waiting in (50, 800):
        for number in range(waiting):
            engine.add(f"{waiting}/{number}", number % 6, (number + 1) % 6)
        most = 0
        while engine.engine.has_unfinished_requests():
            calls = 0
            engine.engine.step()
            most = max(most, calls)
        worst.append(most)
        assert not records_of_modules(engine.modules)
    assert worst[1] < 3 * worst[0], worst
