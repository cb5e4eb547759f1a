# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own that serves a list of requests, at once or as they arrive."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_relay.demo.engine_process import EngineProcess


@dataclass(frozen=True)
class EngineSettings:
    model_folder: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    attention_backend: str | None = None
    relay: dict[str, Any] | None = None
    """Options under ``additional_config["relay"]``; None: vLLM's own scheduler."""
    online: bool = False


@dataclass(frozen=True)
class Served:
    """What an engine did with a list of requests, in their order."""

    seconds: float
    cached_tokens: list[int]
    first_token_s: list[float]
    """From the arrival of each request to its first token."""
    token_ids: list[list[int]]
    metrics: dict[str, float] = field(default_factory=dict)
    """Increases of counters."""


class SchedulerEngine(EngineProcess):
    def __init__(self, name: str, settings: EngineSettings, log_path: Path) -> None:
        super().__init__(name, "benchmarks.scheduler.engine_main", settings, log_path)

    def serve(
        self, prompts: list[list[int]], output_tokens: int, arrivals_s: list[float] | None = None
    ) -> Served:
        """Answers all prompts with an empty prefix cache at the start; without arrival times all
        are there at once."""
        self.order(prompts, output_tokens, arrivals_s)
        return self.wait()
