# SPDX-License-Identifier: Apache-2.0
"""Steps in which vLLM schedules less than it could: RelayScheduler in an engine with a simulated
worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm import LLMEngine, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.core.sched.scheduler import Scheduler

from tests.integration.engine_main import tokens
from tests.integration.tiny_models import save_model
from tests.scheduler.simulated_engine import answer, start
from tests.scheduler.soak import Question
from tests.support.records import records_of_queue

INTERVAL_STEPS = 4
needs_local_interval = pytest.mark.skipif(
    "local_prefill_interval" not in Scheduler.__init__.__code__.co_names,
    reason="this vLLM heeds prefill_schedule_interval with data parallelism only",
)
needs_skipping = pytest.mark.skipif(
    "can_skip_drafts" not in Scheduler.__init__.__code__.co_names,
    reason="this vLLM ends a step at a request that gets no tokens",
)

StartEngine = Callable[..., "Engine"]


class Engine:
    """Questions to an engine, and what its scheduler does with them.

    Attributes:
        steps: tokens that each step has scheduled, by the name of the question.
        prefills: by step, of which questions it has computed tokens before the last of the prompt.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.scheduler: Any = engine.engine_core.engine_core.scheduler
        self.steps: list[dict[str, int]] = []
        self.prefills: list[set[str]] = []
        self._prompts: dict[str, list[int]] = {}
        self._output_tokens: dict[str, int] = {}
        schedule = self.scheduler.schedule

        def schedule_and_note(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            counts = output.num_scheduled_tokens
            self.steps.append({self.name_of(each): count for each, count in counts.items()})
            requests = (self.scheduler.requests[each] for each in counts)
            self.prefills.append(
                {
                    self.name_of(each.request_id)
                    for each in requests
                    if each.num_computed_tokens - counts[each.request_id]
                    < each.num_prompt_tokens - 1
                }
            )
            return output

        self.scheduler.schedule = schedule_and_note

    def name_of(self, request_id: str) -> str:
        """Engine cores may know a question by its name and something behind it."""
        return max((each for each in self._prompts if request_id.startswith(each)), key=len)

    def add(self, name: str, prompt: list[int], output_tokens: int) -> None:
        self._prompts[name], self._output_tokens[name] = prompt, output_tokens
        params = SamplingParams(
            temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                name, prompt = output.request_id, self._prompts[output.request_id]
                question = Question(0, None, None, self._output_tokens[name])
                assert list(output.outputs[0].token_ids) == answer(question, prompt, ())

    def run(self, max_steps: int = 200) -> None:
        """Until all is answered; every answer is right, and nothing is left of the questions."""
        for _ in range(max_steps):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        assert not self.engine.has_unfinished_requests(), "questions that are never answered"
        assert records_of_queue(self.scheduler.waiting) == 0

    def prefill_steps(self, *names: str) -> list[int]:
        """Numbers of the steps that have computed tokens of these prompts, but their last one."""
        return [
            number for number, prefills in enumerate(self.prefills) if prefills.intersection(names)
        ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture
def start_engine(model: str) -> Iterator[StartEngine]:
    started: list[LLMEngine] = []

    def start_engine(**options: Any) -> Engine:
        relay = {"scheduler": True, "max_hold_s": 1e6}
        started.append(
            start(model, asynchronous=False, additional_config={"relay": relay}, **options)
        )
        return Engine(started[0])

    yield start_engine
    for engine in started:
        engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def add_a_family_beside_a_decode(engine: Engine) -> None:
    """One question that decodes, and two that share 160 tokens: of these, one waits for the other,
    which takes two steps of 96 tokens."""
    engine.add("decode", tokens(1, 40), output_tokens=40)
    engine.step()
    family = tokens(2, 160)
    engine.add("first", [*family, *tokens(3, 20)], output_tokens=2)
    engine.add("second", [*family, *tokens(4, 20)], output_tokens=2)


def assert_decodes_run_alone_between_prefills(engine: Engine) -> None:
    numbers = engine.prefill_steps("first", "second")
    gaps = [later - earlier for earlier, later in zip(numbers, numbers[1:], strict=False)]
    assert len(numbers) >= 3
    assert all(gap >= INTERVAL_STEPS for gap in gaps), (numbers, engine.steps)


def test_requests_that_are_held_do_not_end_the_throttling_of_prefills(
    start_engine: StartEngine,
) -> None:
    """As an engine core with data parallelism throttles them."""
    engine = start_engine()
    add_a_family_beside_a_decode(engine)
    schedule, number = engine.scheduler.schedule, 0

    def schedule_throttled(*_: Any) -> Any:
        nonlocal number
        output = schedule(throttle_prefills=number % INTERVAL_STEPS != 0)
        number += 1
        return output

    engine.scheduler.schedule = schedule_throttled
    engine.run()
    assert_decodes_run_alone_between_prefills(engine)


@needs_local_interval
def test_requests_that_are_held_leave_the_interval_of_prefills(start_engine: StartEngine) -> None:
    engine = start_engine(prefill_schedule_interval=INTERVAL_STEPS)
    add_a_family_beside_a_decode(engine)
    engine.run()
    assert_decodes_run_alone_between_prefills(engine)


@needs_local_interval
def test_requests_that_could_run_end_the_interval_of_prefills(start_engine: StartEngine) -> None:
    """As with vLLM's own scheduler: a queue that is not drained in a step must not grow."""
    engine = start_engine(prefill_schedule_interval=INTERVAL_STEPS)
    engine.add("decode", tokens(1, 40), output_tokens=40)
    engine.step()
    for number in range(4):
        engine.add(f"other-{number}", tokens(2 + number, 90), output_tokens=2)
    engine.run()
    numbers = engine.prefill_steps(*(f"other-{number}" for number in range(4)))
    first = numbers[0]  # three steps compute the four of 90 tokens, but for the end of the last
    assert numbers == [first, first + 1, first + 2, first + 2 + INTERVAL_STEPS]


def give_no_tokens(engine: Engine, name: str, while_: Callable[[], bool]) -> None:
    """As where its media have no room, or its drafts would lack tokens to read."""
    reserve = engine.scheduler._reserve_prefill_lookahead

    def reserve_prefill_lookahead(request: Any, num_computed: int, num_new: int) -> int:
        if engine.name_of(request.request_id) == name and while_():
            return 0
        return reserve(request, num_computed, num_new)

    engine.scheduler._reserve_prefill_lookahead = reserve_prefill_lookahead


def test_a_request_that_gets_no_tokens_waits_on(start_engine: StartEngine) -> None:
    engine = start_engine()
    give_no_tokens(engine, "first", lambda: len(engine.steps) < 5)
    family = tokens(2, 64)
    engine.add("first", [*family, 400], output_tokens=2)
    engine.add("second", [*family, 401], output_tokens=2)
    engine.add("other", tokens(3, 40), output_tokens=2)
    engine.run()
    assert min(number for number, step in enumerate(engine.steps) if "first" in step) >= 5


@needs_skipping
def test_others_run_in_a_step_in_which_a_request_gets_no_tokens(start_engine: StartEngine) -> None:
    """Also those that would wait until it has computed their prefix."""
    engine = start_engine()
    give_no_tokens(engine, "first", lambda: len(engine.steps) < 8)
    family = tokens(2, 64)
    engine.add("first", [*family, 400], output_tokens=2)
    engine.add("second", [*family, 401], output_tokens=2)
    engine.add("other", tokens(3, 40), output_tokens=2)
    engine.run()
    assert engine.prefill_steps("second", "other")[-1] <= 2
    assert engine.prefill_steps("first") == []  # all but its last token is cached by then
    assert any("first" in step for step in engine.steps)
