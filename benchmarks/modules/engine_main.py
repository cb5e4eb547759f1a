# SPDX-License-Identifier: Apache-2.0
"""The process of `bench_modules`' engines: times first tokens and decode steps."""

import os
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams

from benchmarks.support.step_engine import EngineSettings
from benchmarks.support.step_engine_main import start_llm
from vllm_relay.demo.engine_process import serve

Prompt = tuple[list[int], dict[str, Any] | None]
"""Token ids, and extra_args."""


def start(settings: EngineSettings) -> LLM:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the KV cache is looked at
    is_relay = settings.attention_backend == "relay"
    return start_llm(
        settings,
        additional_config={"relay": {"scheduler": True}} if is_relay else {},
        max_num_batched_tokens=settings.max_model_len,
        gpu_memory_utilization=0.3,  # the other engine is alive at the same time
    )


def answer(llm: LLM, what: str, prompts: list[Prompt], steps: int = 1) -> Any:
    return first_token_s(llm, prompts) if what == "first token" else decode(llm, prompts, steps)


def first_token_s(llm: LLM, prompts: list[Prompt]) -> list[float]:
    """Seconds from a request to its first token, one request after the other."""
    taken = []
    for prompt in prompts:
        begun_s = time.perf_counter()
        _add(llm, prompt, 1)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        taken.append(time.perf_counter() - begun_s)
    return taken


def decode(llm: LLM, prompts: list[Prompt], steps: int) -> tuple[list[float], list[list[int]]]:
    """Seconds of each step in which all requests generate, and their blocks."""
    engine = llm.llm_engine
    names = [_add(llm, prompt, steps + len(prompts) + 8) for prompt in prompts]
    arrivals_s: list[float] = []
    blocks: list[list[int]] = []
    while engine.has_unfinished_requests() and len(arrivals_s) <= steps:
        if len(engine.step()) == len(prompts):
            arrivals_s.append(time.perf_counter())
        if len(arrivals_s) == 1:
            scheduler = engine.engine_core.engine_core.scheduler
            blocks = [scheduler.kv_cache_manager.get_block_ids(r.request_id)[0]
                      for r in scheduler.running]  # fmt: skip
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    steps_s = [after - before for before, after in zip(arrivals_s, arrivals_s[1:], strict=False)]
    return steps_s, blocks


def _add(llm: LLM, prompt: Prompt, max_tokens: int) -> str:
    token_ids, extra_args = prompt
    name = str(time.monotonic_ns())
    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args=extra_args,
    )
    llm.llm_engine.add_request(name, {"prompt_token_ids": token_ids}, params)
    return name


if __name__ == "__main__":
    serve(int(sys.argv[1]), start, answer)
