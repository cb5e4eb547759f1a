# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in a process of its own whose decode steps can be timed, one round at a time."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_relay.demo.engine_process import EngineProcess


@dataclass(frozen=True)
class EngineSettings:
    model_folder: str
    attention_backend: str
    """Or "stock", whatever vLLM takes by itself."""
    cores: list[int]
    max_model_len: int
    max_num_seqs: int
    block_size: int
    kv_cache_gib: int


class StepEngine(EngineProcess):
    """A started engine; `wait` returns the seconds of each decode step."""

    def __init__(self, settings: EngineSettings, log_path: Path) -> None:
        super().__init__(
            settings.attention_backend, "benchmarks.support.step_engine_main", settings, log_path
        )

    def start_decoding(self, prompts: list[list[int]], steps: int) -> None:
        """Orders `steps` decode steps in which every prompt takes part."""
        self.order(prompts, steps)

    def move_to(self, cores: list[int]) -> None:
        """Lets all threads of the engine run on these cores only."""
        process = psutil.Process(self.pid)
        for each in [process, *process.children(recursive=True)]:
            for thread in each.threads():
                os.sched_setaffinity(thread.id, cores)
