# SPDX-License-Identifier: Apache-2.0
"""A model that is started once, or several times by Ray, for test_vllm.py.

Usage: python -m tests.tables.engines.ray_actors.vllm_main MODEL OUTPUT.json REPLICAS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from vllm_relay.tables import llm_map, open_engine

NUM_ROWS = 24
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "num_gpu_blocks_override": 200,
    "max_num_seqs": 4,
}
TEXTS = [f"a text of group {row // 6} that is long " * 3 + str(row) for row in range(NUM_ROWS)]
ROWS = pa.table({"text": TEXTS})


def answers(engine: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"engine": engine, "show_progress": False}
    found = llm_map(ROWS, "What of {text}?", max_tokens=8, **options)
    chosen = llm_map(ROWS, "Is {text} good?", choices=["yes", "no"], **options)
    return {
        "texts": found.values.to_pylist(),
        "chosen": chosen.values.to_pylist(),
        "num_prompts": found.report.num_prompts,
        "prompt_tokens": found.report.prompt_tokens,
        "cached_tokens": found.report.cached_tokens,
    }


def main(model: str, output: str, replicas: str) -> None:
    engine: Any = open_engine(model, replicas=int(replicas), **ARGUMENTS)
    found = {"identity": engine.identity, **answers(engine)}
    engine.close()
    ray = sys.modules.get("ray")
    found["is_ray_left"] = ray is not None and ray.is_initialized()
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
