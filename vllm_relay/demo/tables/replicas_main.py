# SPDX-License-Identifier: Apache-2.0
"""Process of a `TablesEngine` of several replicas."""

from __future__ import annotations

import os
import sys

from vllm_relay.demo.engine_process import serve
from vllm_relay.demo.tables.engine import (
    BLOCK_SIZE_TOKENS,
    NUM_BLOCKS,
    ReplicaSettings,
    TableAnswers,
    Way,
)
from vllm_relay.demo.tables.engine_main import ask_with_llm_map
from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.engines.opening import open_engine
from vllm_relay.tables.question import Question


def start(settings: ReplicaSettings) -> Engine:
    """As `llm_map` does with `replicas`."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return open_engine(
        settings.model,
        replicas=settings.num_replicas,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        enforce_eager=True,
        seed=0,
        block_size=BLOCK_SIZE_TOKENS,
        num_gpu_blocks_override=NUM_BLOCKS,
    )


def ask(
    engine: Engine, way: Way, columns: dict[str, list[str]], question: Question
) -> TableAnswers:
    """One question to every row. No other one begins like it, so that caches are as if empty."""
    return ask_with_llm_map(engine, columns, question)


def stop(engine: Engine) -> None:
    """Its processes end too."""
    engine.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), start, ask, stop)
