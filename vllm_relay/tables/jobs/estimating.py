# SPDX-License-Identifier: Apache-2.0
"""What a plan is expected to take, counted prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from vllm_relay.tables.engines.base import Engine, PromptShape
from vllm_relay.tables.jobs.answers import expected_tokens, likely_cut
from vllm_relay.tables.jobs.job_plan import AskedRows, JobPlan, SettledRows, Step
from vllm_relay.tables.jobs.report import Estimate
from vllm_relay.tables.ordering.cached_tokens import cached_tokens
from vllm_relay.tables.ordering.sequences import TokenSequences
from vllm_relay.tables.question import Question

_PROMPTS_PER_PART = 4096


def estimate_of(
    plan: JobPlan,
    question: Question,
    engine: Engine,
    num_rows: int,
    on_counted: Callable[[int], None],
) -> Estimate:
    """
    Args:
        plan: of which no step was taken yet.
        question: as it was given.
        on_counted: called now and then with the number of prompts that are counted.
    """
    counted = _Counted(plan, on_counted)
    cached = None
    if engine.cache is not None:
        cached = int(np.sum(cached_tokens(counted.prompts(), engine.cache)))
        cached += counted.cached_module_tokens
    else:
        counted.count()
    output_tokens = counted.num_asked * expected_tokens(question, engine)
    estimate = Estimate(
        num_rows=num_rows,
        num_prompts=counted.num_prompts,
        num_known=counted.num_known,
        prompt_tokens=counted.prompt_tokens,
        cached_tokens=cached,
        output_tokens=output_tokens,
        order=plan.order_name,
        seconds=_seconds(counted, plan.question, engine, cached or 0, output_tokens),
        tokens_are_exact=engine.tokenizer is not None and question.images is None,
        num_refused=counted.num_refused,
        num_modular=counted.num_modular,
        warning=likely_cut(question, engine, counted.longest_prompt_tokens),
    )
    return estimate


def tokens_per_prompt(plan: JobPlan, question: Question, engine: Engine) -> float:
    """Of an average prompt and its answer, about; as for `estimate_of`."""
    counted = _Counted(plan, lambda num_prompts: None)
    counted.count()
    per_prompt = counted.prompt_tokens / max(counted.num_asked, 1)
    return per_prompt + expected_tokens(question, engine)


class _Counted:
    """The prompts of a plan, counted while they are gone through."""

    def __init__(self, plan: JobPlan, on_counted: Callable[[int], None]) -> None:
        self._plan = plan
        self._on_counted = on_counted
        self.num_asked = 0
        self.num_known = 0
        self.num_refused = 0
        self.num_modular = 0
        self.prompt_tokens = 0
        self.longest_prompt_tokens = 0
        self.cached_module_tokens = 0

    def count(self) -> None:
        for _ in self.prompts():
            pass

    def prompts(self) -> Iterator[TokenSequences]:
        """Those without modules, in parts, so that not all tokens are in memory at once."""
        asked = self._asked(self._plan.steps())
        while chunk := list(islice(asked, _PROMPTS_PER_PART)):
            self._on_counted(self.num_prompts)
            yield TokenSequences.from_lists(chunk)
        self._on_counted(self.num_prompts)

    @property
    def num_prompts(self) -> int:
        return self.num_asked + self.num_known + self.num_refused

    def _asked(self, steps: Iterator[Step]) -> Iterator[list[int]]:
        for step in steps:
            if isinstance(step, AskedRows):
                planned = step.planned
                self.num_asked += 1
                self.prompt_tokens += len(planned.token_ids)
                self.longest_prompt_tokens = max(self.longest_prompt_tokens, len(planned.token_ids))
                modules = planned.prompt.modules
                if modules is None:
                    yield planned.token_ids
                    continue
                self.num_modular += 1
                self.cached_module_tokens += (
                    sum(modules.module_tokens.values()) - planned.num_encoded_tokens
                )
            elif isinstance(step, SettledRows):
                self.num_known += step.known is not None
                self.num_refused += step.known is None


def _seconds(
    counted: _Counted, question: Question, engine: Engine, cached_tokens: int, output_tokens: int
) -> float | None:
    num_prompts = counted.num_asked
    if num_prompts == 0:
        return 0.0
    shape = PromptShape(
        num_cached_tokens=cached_tokens // num_prompts,
        num_new_tokens=(counted.prompt_tokens - cached_tokens) // num_prompts,
        num_output_tokens=output_tokens // num_prompts,
    )
    speed = engine.prompts_per_s(shape, question)
    return None if speed is None else num_prompts / speed
