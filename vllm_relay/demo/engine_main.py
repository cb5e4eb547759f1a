# SPDX-License-Identifier: Apache-2.0
"""The process of `engine.Engine`: starts vLLM and answers (prompts, output tokens)."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from vllm import LLM, SamplingParams

from vllm_relay.demo.engine import EngineSettings, RoundResult
from vllm_relay.demo.engine_process import serve

COUNTERS = (
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "relay:kv_tokens_logical",
    "relay:kv_tokens_read",
)


def start_llm(
    settings: EngineSettings,
    *,
    cpu_kv_cache_gib: int = 2,
    with_metrics: bool = True,
    **llm_arguments: Any,
) -> LLM:
    """The engine, with prefix caching.

    Args:
        cpu_kv_cache_gib: on CPUs, where `VLLM_CPU_KVCACHE_SPACE` does not say otherwise.
        with_metrics: those that `LLM.get_metrics` returns.
        llm_arguments: others of `LLM`.
    """
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cpu_kv_cache_gib))
    return LLM(
        settings.model,
        attention_backend=settings.attention_backend,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        enable_prefix_caching=True,
        gpu_memory_utilization=0.4,  # the other engine is alive at the same time
        disable_log_stats=not with_metrics,
        seed=0,
        **{"enforce_eager": True, **llm_arguments},
    )


def start(settings: EngineSettings) -> LLM:
    """The engine; on GPUs decodes are CUDA graphs, as they are for users, but layers are not
    compiled, which takes a minute."""
    if not torch.cuda.is_available():
        return start_llm(settings)
    graphs = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [settings.max_num_seqs],
    }
    return start_llm(settings, enforce_eager=False, compilation_config=graphs)


def generate(llm: LLM, prompts: list[list[int]], output_tokens: int) -> RoundResult:
    """One round: all prompts at once, greedy, exactly `output_tokens` each."""
    sampling = SamplingParams(
        temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
    )
    before = read_counters(llm)
    begin_s = time.perf_counter()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
    )
    generation_s = time.perf_counter() - begin_s
    after = read_counters(llm)
    return RoundResult(
        token_ids=[list(output.outputs[0].token_ids) for output in outputs],
        generation_s=generation_s,
        counters={name: after[name] - before.get(name, 0) for name in after},
    )


def read_counters(llm: LLM) -> dict[str, int]:
    """Those of `COUNTERS` that the engine has, summed over their labels."""
    values: dict[str, int] = {}
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            values[metric.name] = values.get(metric.name, 0) + int(metric.value)
    return values


if __name__ == "__main__":
    # without processes of its own, which would each import vLLM and look for work in between
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    serve(int(sys.argv[1]), start, generate)
