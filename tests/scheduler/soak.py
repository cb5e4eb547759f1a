# SPDX-License-Identifier: Apache-2.0
"""Random arrivals, aborts, pins, unpins and resets, on an engine in this process."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm import LLMEngine, SamplingParams
from vllm.lora.request import LoRARequest

from tests.integration.engine_main import tokens
from tests.support.records import records_of_queue
from vllm_relay.commands.errors import CommandError
from vllm_relay.modules.prompt.plan import EXTRA_ARG as PLAN_ARG
from vllm_relay.modules.prompt.plan import ModulePlan
from vllm_relay.prefix_cache.pins.table import EXTRA_ARG

SECONDS = float(os.environ.get("RELAY_SOAK_S", "60"))
FIRST_SEED = int(os.environ.get("RELAY_SOAK_FIRST_SEED", "0"))

OUTPUT_TOKENS = 20
MAX_OUTSTANDING = 30
SALTS = (None, None, None, "a")


def prompts() -> list[list[int]]:
    """Four families, whose members share 32 to 160 tokens; some prompts are equal."""
    made = []
    for family in range(4):
        root = tokens(family, 32 * (1 + family))
        for member in range(12):
            branch = tokens(50 + family, 48) if member % 3 == 0 else []
            made.append(root + branch + tokens(100 + member % 10, 5 + 7 * member))
    return made


def adapters(count: int) -> tuple[LoRARequest | None, ...]:
    """None, and so many adapters."""
    return (None, *(LoRARequest(f"a{i}", i, f"a{i}") for i in range(1, count + 1)))


@dataclass(frozen=True)
class Question:
    prompt: int
    salt: str | None
    adapter: LoRARequest | None
    output_tokens: int


@dataclass
class Soak:
    """Does one random thing per step; raises AssertionError for a lost or a wrong answer.

    Args:
        engine: in this process.
        check: is given every question and the tokens of its answer.
        sampling: more sampling parameters of every request.
        priorities: of which every request gets one.
        adapters: the same.
        prompts: of which questions are made.
        plans: of those with modules, by their place.
    """

    engine: LLMEngine
    seed: int
    check: Callable[[Question, list[int]], None]
    sampling: dict[str, Any] = field(default_factory=dict)
    priorities: tuple[int, ...] = (0,)
    adapters: tuple[LoRARequest | None, ...] = (None,)
    prompts: list[list[int]] = field(default_factory=prompts)
    plans: dict[int, ModulePlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.rng = random.Random(self.seed)
        self.outstanding: dict[str, Question] = {}
        self.counts = dict.fromkeys(
            ("added", "finished", "aborted", "pinned", "refused", "unpinned", "resets"), 0
        )

    def add(self, pin: int | None = None) -> None:
        """A random question, or the prefill of a pinned prompt."""
        prompt = self.rng.randrange(len(self.prompts)) if pin is None else pin
        salt = self.rng.choice(SALTS) if pin is None else None
        adapter = self.rng.choice(self.adapters) if pin is None else None
        question = Question(prompt, salt, adapter, self.rng.randint(1, OUTPUT_TOKENS))
        request_id = str(self.counts["added"])
        self.counts["added"] += 1
        extra_args: dict[str, Any] = {} if pin is None else {EXTRA_ARG: f"pin-{pin}"}
        if prompt in self.plans:
            extra_args[PLAN_ARG] = self.plans[prompt].to_argument()
        self.engine.add_request(
            request_id,
            {"prompt_token_ids": self.prompts[prompt], "cache_salt": salt},
            SamplingParams(
                temperature=0,
                max_tokens=question.output_tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args={**extra_args, "salt": salt},
                **self.sampling,
            ),
            priority=self.rng.choice(self.priorities),
            lora_request=adapter,
        )
        self.outstanding[request_id] = question

    def abort(self) -> None:
        request_id = self.rng.choice(sorted(self.outstanding))
        self.engine.abort_request([request_id])
        del self.outstanding[request_id]
        self.counts["aborted"] += 1

    def pin(self) -> None:
        index = self.rng.randrange(len(self.prompts))
        plan = self.plans.get(index)
        token_ids = self.prompts[index] if plan else self.prompts[index][:64]
        try:
            self.scheduler.pins.declare(f"pin-{index}", token_ids, plan)
        except CommandError:
            self.counts["refused"] += 1
            return
        self.counts["pinned"] += 1
        self.add(pin=index)

    def unpin(self) -> None:
        pins = self.scheduler.pins.entries()
        if pins:
            self.scheduler.pins.unpin(self.rng.choice(pins)["id"])
            self.counts["unpinned"] += 1

    def reset(self) -> None:
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.counts["resets"] += 1

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self.counts["finished"] += 1
                question = self.outstanding.pop(output.request_id)
                self.check(question, list(output.outputs[0].token_ids))

    def act(self) -> None:
        chance = self.rng.random()
        if chance < 0.5 and len(self.outstanding) < MAX_OUTSTANDING:
            for _ in range(self.rng.choice((1, 1, 2, 8))):
                self.add()
        elif chance < 0.55 and self.outstanding:
            self.abort()
        elif chance < 0.6:
            self.pin()
        elif chance < 0.66:
            self.unpin()
        elif chance < 0.665:
            self.reset()
        if self.engine.has_unfinished_requests():
            self.step()

    def run_while(self, goes_on: Callable[[], bool]) -> None:
        while goes_on():
            self.act()
        # an engine also has requests of its scheduler's own: modules of requests that were aborted
        while self.engine.has_unfinished_requests() or self.scheduler.has_requests():
            self.step()

    def run(self, actions: int) -> None:
        """So many random things, until all is answered and nothing is left."""
        left = iter(range(actions))
        self.run_while(lambda: next(left, None) is not None)
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        assert not self.outstanding
        assert self.counts["added"] == self.counts["finished"] + self.counts["aborted"]
        for pin in self.scheduler.pins.entries():
            self.scheduler.pins.unpin(pin["id"])
        assert len(self.scheduler.waiting) == 0
        assert records_of_queue(self.scheduler.waiting) == 0
        assert not self.scheduler.next_use._waiting
        assert self.engine.reset_prefix_cache()
