# SPDX-License-Identifier: Apache-2.0
"""The process of `step_engine.StepEngine`: starts vLLM and times decode steps."""

import os
import sys
from typing import Any

from vllm import LLM

from benchmarks.support.decoding import add_request, decode_steps_s, exactly
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


def answer(llm: LLM, prompts: list[list[int]], steps: int) -> list[float]:
    sampling = exactly(steps + len(prompts) + 8)
    names = [add_request(llm.llm_engine, prompt, sampling) for prompt in prompts]
    return decode_steps_s(llm.llm_engine, names, steps)


if __name__ == "__main__":
    serve(int(sys.argv[1]), start_llm, answer)
