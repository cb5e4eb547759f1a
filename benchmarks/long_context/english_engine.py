# SPDX-License-Identifier: Apache-2.0
"""An engine that tells log-probabilities, of its own tokens or of given ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_process import EngineProcess


@dataclass(frozen=True)
class EnglishSettings:
    """`relay` are options under additional_config.relay."""

    engine: EngineSettings
    relay: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """
    Attributes:
        token_ids: that were generated, by choice or because they were given.
        logprobs: at each of them, of the most likely tokens and of itself, by token.
        best: at each of them, the token that the model would have chosen.
        num_searched_tokens, num_retrieved_tokens: of all searches; those that they could have
            given, and gave at least one query head.
    """

    token_ids: list[int]
    logprobs: list[dict[int, float]]
    best: list[int]
    num_searched_tokens: int
    num_retrieved_tokens: int


class EnglishEngine(EngineProcess):
    def __init__(self, name: str, settings: EnglishSettings, log_path: Path) -> None:
        super().__init__(name, "benchmarks.long_context.english_engine_main", settings, log_path)

    def continued(self, prompt: list[int], output_tokens: int) -> Answer:
        """Greedily."""
        self.order(prompt, None, output_tokens)
        answer: Answer = self.wait()
        return answer

    def forced(self, prompt: list[int], token_ids: list[int]) -> Answer:
        """With these tokens behind the prompt, whatever the model would choose."""
        self.order(prompt, token_ids, len(token_ids))
        answer: Answer = self.wait()
        return answer
