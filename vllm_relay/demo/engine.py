# SPDX-License-Identifier: Apache-2.0
"""The engine that answers the demo's questions, seen from outside its process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_relay.demo.engine_process import EngineProcess


@dataclass(frozen=True)
class EngineSettings:
    """Everything an engine is started with; `attention_backend` None is vLLM's own choice."""

    model: str
    attention_backend: str | None
    dtype: str
    max_model_len: int
    max_num_seqs: int


@dataclass(frozen=True)
class RoundResult:
    """What one engine did with one round of requests; `counters` are increases of metrics."""

    token_ids: list[list[int]]
    generation_s: float
    counters: dict[str, int]


class Engine(EngineProcess):
    """An engine of `engine_main`."""

    def __init__(self, name: str, settings: EngineSettings, log_path: Path) -> None:
        super().__init__(name, "vllm_relay.demo.engine_main", settings, log_path)

    def generate(self, prompts: list[list[int]], output_tokens: int) -> RoundResult:
        """Continue every prompt greedily by exactly `output_tokens`.

        Raises:
            EngineError: the engine failed; the message ends with its log.
        """
        self.order(prompts, output_tokens)
        return self.wait()
