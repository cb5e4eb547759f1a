# SPDX-License-Identifier: Apache-2.0
"""Random requests with and without modules in vLLM's engine, with a simulated worker: whatever is
aborted, preempted, reset or evicted, every token reads what its own plan says it sees."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from tests.integration.engine_main import tokens
from tests.integration.tiny_models import VOCAB_SIZE, save_model
from tests.modules.random_prompts import SchemaMaker, random_prompt
from tests.scheduler.simulated_engine import answer, start
from tests.scheduler.soak import FIRST_SEED, SECONDS, Question, Soak, adapters
from tests.support.records import records_of_modules
from vllm_relay.modules.engine.admission import ENCODING_PREFIX
from vllm_relay.modules.prompt.plan import ModulePlan, plan_of_request
from vllm_relay.modules.prompt.schema_store import SchemaStore

WORDS = [f"w{number}" for number in range(3, VOCAB_SIZE)]
BLOCK_SIZE = 32
STOP_TOKEN_IDS = tuple(range(3, 13))
MAX_PROMPT_SLOTS = 15 * BLOCK_SIZE


class WordTokenizer:
    """Words w3, w4, ... are their numbers."""

    bos_token_id = None
    unk_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [int(word[1:]) for word in text.split()]


@dataclass(frozen=True)
class Case:
    asynchronous: bool
    eviction: str
    policy: str
    num_adapters: int = 0
    num_blocks: int = 40
    threshold_tokens: int = 0
    seed: int = 0


@dataclass
class ModularPrompts:
    """Prompts with modules, of a few schemas, and plain ones."""

    seed: int
    token_ids: list[list[int]] = field(default_factory=list)
    plans: dict[int, ModulePlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        store = SchemaStore(WordTokenizer(), block_size=BLOCK_SIZE)
        while len(self.token_ids) < 30:
            schema = SchemaMaker(rng, WORDS, most_words=40).schema(f"s{len(self.token_ids)}")
            store.add(schema)
            for _ in range(6):
                mode = "repair" if rng.random() < 0.3 else "modular"
                prompt = store.render(random_prompt(rng, schema, WORDS), mode=mode)
                if prompt.min_model_len <= MAX_PROMPT_SLOTS:
                    if prompt.plan is not None:
                        self.plans[len(self.token_ids)] = prompt.plan
                    self.token_ids.append(prompt.token_ids)
        # as the tokens of modules, but without a plan
        self.token_ids += [self.token_ids[each] for each in (0, 7, 14)]
        self.token_ids += [tokens(each, 20 + 17 * each) for each in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model("llama", tmp_path_factory.mktemp("model")))


class Seen:
    """What a scheduler did, by kinds of requests."""

    def __init__(self, scheduler: Any) -> None:
        self.encodings = 0
        self.modules_pinned = False
        self.preempted: Counter[str] = Counter()
        add_request, preempt_request = scheduler.add_request, scheduler._preempt_request

        def add(request: Any) -> None:
            if request.request_id.startswith(ENCODING_PREFIX):
                self.encodings += 1
                pins = [pin for pin in scheduler.pins._pins.values() if pin.blocks]
                self.modules_pinned |= any(pin.plan for pin in pins)
                held = {each for pin in pins for each in pin.block_hashes}
                assert request.block_hashes[-1] not in held, "a pinned module is computed again"
            # workers are not told the salt
            args = {**(request.sampling_params.extra_args or {}), "salt": request.cache_salt}
            request.sampling_params.extra_args = args
            add_request(request)

        def preempt(request: Any, *args: Any, **keywords: Any) -> None:
            plan = plan_of_request(request)
            kind = "plain" if plan is None else "encoding" if plan.encodes else "modular"
            self.preempted[kind] += 1
            preempt_request(request, *args, **keywords)

        scheduler.add_request, scheduler._preempt_request = add, preempt


def run(case: Case, model: str, actions: int) -> Seen:
    """Raises AssertionError for a wrong answer, a lost request, a block that leaked, or one that is
    computed by a request that must not compute it."""
    engine = start(
        model,
        asynchronous=case.asynchronous,
        attention_backend="relay",
        num_gpu_blocks_override=case.num_blocks,
        scheduling_policy=case.policy,
        enable_lora=case.num_adapters > 0,
        long_prefill_token_threshold=case.threshold_tokens,
        max_num_batched_tokens=128,
        additional_config={
            "relay": {"scheduler": True, "eviction": case.eviction, "max_hold_s": 1e6}
        },
    )
    prompts = ModularPrompts(case.seed)

    def check(question: Question, actual: list[int]) -> None:
        plan = prompts.plans.get(question.prompt)
        prompt = prompts.token_ids[question.prompt]
        assert actual == answer(question, prompt, STOP_TOKEN_IDS, plan)

    try:
        soak = Soak(
            engine,
            case.seed,
            check,
            sampling={"stop_token_ids": list(STOP_TOKEN_IDS)},
            priorities=(0, 1, 2),
            adapters=adapters(case.num_adapters),
            prompts=prompts.token_ids,
            plans=prompts.plans,
        )
        scheduler = soak.scheduler
        seen = Seen(scheduler)
        soak.run(actions)
        assert records_of_modules(scheduler.modules) == 0
        return seen
    finally:
        engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("eviction", "policy", "num_adapters", "threshold_tokens"),
    [
        ("queue", "fcfs", 2, 0),
        ("queue", "priority", 0, 48),
        ("queue", "priority", 0, 0),
        ("lru", "fcfs", 0, 48),
    ],
)
def test_every_token_reads_what_its_plan_says(
    model: str,
    asynchronous: bool,
    eviction: str,
    policy: str,
    num_adapters: int,
    threshold_tokens: int,
) -> None:
    case = Case(
        asynchronous,
        eviction,
        policy,
        num_adapters=num_adapters,
        threshold_tokens=threshold_tokens,
        seed=2,
    )
    seen = run(case, model, actions=700)
    assert seen.encodings > 100 and seen.preempted["modular"] > 0 and seen.modules_pinned


@pytest.mark.soak
def test_random_engines_with_modules(model: str) -> None:
    end_s = time.monotonic() + SECONDS
    seed = FIRST_SEED
    preempted: Counter[str] = Counter()
    while time.monotonic() < end_s:
        rng = random.Random(seed)
        case = Case(
            asynchronous=rng.random() < 0.7,
            eviction=rng.choice(("queue", "lru")),
            policy=rng.choice(("fcfs", "priority")),
            num_adapters=rng.choice((0, 0, 2, 3)),
            num_blocks=rng.randint(34, 70),
            threshold_tokens=rng.choice((0, 16, 48)),
            seed=seed,
        )
        try:
            preempted += run(case, model, actions=1500).preempted
        except Exception as error:
            error.add_note(str(case))
            raise
        seed += 1
    print(f"{seed - FIRST_SEED} engines, preempted: {dict(preempted)}")
    assert SECONDS < 60 or preempted["encoding"] > 0
