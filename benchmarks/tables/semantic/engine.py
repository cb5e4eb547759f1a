# SPDX-License-Identifier: Apache-2.0
"""A model that answers by rule, and what its prefix cache would find of what it was asked."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.support.formatting import Row
from tests.tables.recording_engine import RecordingEngine
from vllm_relay.tables.engines.base import Completions, Prompt
from vllm_relay.tables.ordering import BlockCache, TokenSequences, cached_tokens
from vllm_relay.tables.question import Question

CACHE = BlockCache(16)
CONTEXT_TOKENS = 2048


@dataclass
class KnownEngine(RecordingEngine):
    """
    Attributes:
        prompts: tokens of those that were asked, in their order.
        question: that was asked last.
    """

    cache: Any = CACHE
    max_model_len: int | None = CONTEXT_TOKENS
    prompts: list[list[int]] = field(default_factory=list)
    question: Question | None = None

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        self.question = question
        yield from super().generate(map(self._counted, prompts), question)

    def _counted(self, prompt: Prompt) -> Prompt:
        self.prompts.append(prompt.token_ids)
        return prompt


class ScoringEngine(KnownEngine):
    """Its answers are probabilities of true, given as those of the first token."""

    def generate_scored(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        for completion in self.generate(prompts, question):
            score = float(completion.text)
            masses = {"true": score, "false": 1 - score}
            logs = {token: math.log(mass) for token, mass in masses.items() if mass > 0}
            yield replace(completion, text="true", first_logprobs=logs)


def asked(prompts: list[list[int]]) -> dict[str, float]:
    """How many prompts there are, their tokens, and those that an unlimited cache has not."""
    num_tokens = sum(map(len, prompts))
    found = int(cached_tokens(TokenSequences.from_lists(prompts), CACHE).sum()) if prompts else 0
    return {"prompts": len(prompts), "prompt tokens": num_tokens, "uncached": num_tokens - found}


def means(rounds: list[dict[str, float]]) -> Row:
    """Of each figure of several rounds."""
    return {name: round(sum(each[name] for each in rounds) / len(rounds)) for name in rounds[0]}
