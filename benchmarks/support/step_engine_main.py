# SPDX-License-Identifier: Apache-2.0
"""The process of `step_engine.StepEngine`: starts vLLM and times decode steps."""

import os
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams

from benchmarks.support.step_engine import EngineSettings
from vllm_relay.demo.engine_process import serve


def start_llm(settings: EngineSettings, **engine_args: Any) -> LLM:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
    backend = settings.attention_backend
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, settings.cores))
    return LLM(
        settings.model_folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        attention_backend=None if backend == "stock" else backend,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        block_size=settings.block_size,
        enable_prefix_caching=True,
        enforce_eager=True,
        seed=0,
        **engine_args,
    )


def decode_steps_s(llm: LLM, prompts: list[list[int]], steps: int) -> list[float]:
    """Seconds between the arrivals of the results of steps that decoded all prompts."""
    engine = llm.llm_engine
    # requests start one after the other: the first ones are further when the last one joins
    sampling = SamplingParams(
        temperature=0, max_tokens=steps + 8, ignore_eos=True, detokenize=False
    )
    names = [f"{time.monotonic_ns()}-{index}" for index in range(len(prompts))]
    for request, prompt in zip(names, prompts, strict=True):
        engine.add_request(request, {"prompt_token_ids": prompt}, sampling)
    arrivals_s: list[float] = []
    while engine.has_unfinished_requests() and len(arrivals_s) <= steps:
        outputs = engine.step()
        if len(outputs) == len(prompts):
            arrivals_s.append(time.perf_counter())
        elif arrivals_s:
            break
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return [after - before for before, after in zip(arrivals_s, arrivals_s[1:], strict=False)]


if __name__ == "__main__":
    serve(int(sys.argv[1]), start_llm, decode_steps_s)
