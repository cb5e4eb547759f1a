# SPDX-License-Identifier: Apache-2.0
"""What an engine takes for prompts of which it is known how many steps they need."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

from vllm_relay.prefix_cache.predict.step_costs import StepSample
from vllm_relay.progress import Show
from vllm_relay.tables.engines.base import Engine, Prompt, generate
from vllm_relay.tables.question import Question, RequestOptions

SHORT_TOKENS = 16
LONG_TOKENS = 2000
"""One step of vLLM's smallest budget of tokens, 2,048, where the context has room."""
ANSWER_TOKENS = 64
MAX_TOGETHER = 16
ROUNDS = 5


@dataclass(frozen=True)
class _Shape:
    """Prompts that are asked at once, without a common beginning."""

    num_prompts: int
    prompt_tokens: int
    output_tokens: int

    @property
    def expected(self) -> StepSample:
        """As all prompts fit into the first step, which gives the first token of each."""
        tokens = self.num_prompts * (self.prompt_tokens + self.output_tokens - 1)
        return StepSample(self.output_tokens, tokens, 0.0, waits=1)


def sample_steps(engine: Engine, show: Show = lambda what, part_done: None) -> list[StepSample]:
    """Few and many tokens a step, one step and many; of each the median of some rounds.

    The engine should have nothing else to do.

    Raises:
        ValueError: tokens cannot be sent to it, or its context is too short.
        EngineError: the engine is gone, or answers shorter than it is told.
    """
    if engine.tokenizer is None or getattr(engine, "mode", "completions") != "completions":
        raise ValueError(
            "prompts are measured by their tokens, which can be sent to vLLM alone, with the "
            "model's tokenizer at hand: give a vLLM server, or a model"
        )
    room = (engine.max_model_len or LONG_TOKENS + ANSWER_TOKENS) - ANSWER_TOKENS
    if room < 4 * SHORT_TOKENS:
        raise ValueError(
            f"a context of {engine.max_model_len} tokens given, expected at least "
            f"{4 * SHORT_TOKENS + ANSWER_TOKENS}: give a longer --max-model-len"
        )
    together = min(MAX_TOGETHER, getattr(engine, "max_running", MAX_TOGETHER))
    shapes = [
        _Shape(1, SHORT_TOKENS, 1),
        _Shape(1, min(LONG_TOKENS, room), 1),
        _Shape(1, SHORT_TOKENS, ANSWER_TOKENS),
        _Shape(together, SHORT_TOKENS, ANSWER_TOKENS),
    ]
    tokens = _ordinary_tokens(engine.tokenizer)
    samples = []
    for number, shape in enumerate(shapes):
        what = (
            f"{shape.num_prompts} prompts of {shape.prompt_tokens} tokens, "
            f"{shape.output_tokens} of each answer"
        )
        seconds = []
        for seed in range(ROUNDS + 1):
            show(what, (number + seed / (ROUNDS + 1)) / len(shapes))
            seconds.append(_seconds(engine, shape, tokens, seed))
        # the first is a warm-up
        samples.append(replace(shape.expected, seconds=statistics.median(seconds[1:])))
    return samples


def _seconds(engine: Engine, shape: _Shape, tokens: list[int], seed: int) -> float:
    rng = random.Random(f"{shape} {seed} {time.time_ns()}")  # nobody has had these before
    prompts = [
        Prompt(number, "", rng.choices(tokens, k=shape.prompt_tokens))
        for number in range(shape.num_prompts)
    ]
    told = RequestOptions(sampling={"ignore_eos": True, "min_tokens": shape.output_tokens})
    question = Question("?", ("text",), max_tokens=shape.output_tokens, request=told)
    began_s = time.perf_counter()
    completions = list(generate(engine, iter(prompts), question))
    seconds = time.perf_counter() - began_s
    for each in completions:
        if each.error or each.num_output_tokens != shape.output_tokens:
            reason = each.error or (
                f"an answer of {each.num_output_tokens} tokens came, expected {shape.output_tokens}"
            )
            raise ValueError(f"the engine cannot be measured: {reason}")
    return seconds


def _ordinary_tokens(tokenizer: Any) -> list[int]:
    """Those that stand for text: others may begin an image, say."""
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return [token for token in range(len(tokenizer)) if token not in special]
