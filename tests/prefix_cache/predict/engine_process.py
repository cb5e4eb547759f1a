# SPDX-License-Identifier: Apache-2.0
"""Runs lists of requests on real engines and tells how many tokens of each were cached.

Usage: python -m tests.prefix_cache.predict.engine_process INPUT.json OUTPUT.json

INPUT holds a list of engines, each the arguments of `vllm.LLM`, and a list of workloads, each a
list of prompt token ids, output tokens and cache salts or null. OUTPUT holds, for every engine and
workload, a list of cached tokens.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams


def cached_tokens(llm: LLM, workload: list[tuple[list[int], int, str | None]]) -> list[int]:
    assert llm.reset_prefix_cache()
    params = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        for _, count, _ in workload
    ]
    prompts: Any = [
        {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
        for prompt, _, salt in workload
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.num_cached_tokens or 0 for output in outputs]


def main() -> None:
    input_path, output_path = map(Path, sys.argv[1:])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # read before it was set
    given = json.loads(input_path.read_text())
    results = []
    for engine_args in given["engines"]:
        llm = LLM(**engine_args)
        results.append([cached_tokens(llm, workload) for workload in given["workloads"]])
        llm.llm_engine.engine_core.shutdown()
    output_path.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
