# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in a process of its own whose decode steps can be timed, one round at a time."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_relay.demo.engine_process import EngineProcess


@dataclass(frozen=True)
class Model:
    """A Llama of this geometry, with random weights."""

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_heads: int = 32
    num_kv_heads: int = 32
    num_layers: int = 4
    vocab_size: int = 32000

    def save(self, folder: Path) -> str:
        """Writes what vLLM needs to know about it and returns the folder's name."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "num_hidden_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
        }
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)


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
