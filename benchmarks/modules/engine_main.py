# SPDX-License-Identifier: Apache-2.0
"""The process of `bench_modules`' engines: times first tokens and decode steps."""

import os
import sys
import time
from typing import Any

from vllm import LLM

from benchmarks.support.decoding import add_request, decode_steps_s, exactly
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
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    blocks: list[list[int]] = []

    def note_blocks() -> None:
        manager = scheduler.kv_cache_manager
        blocks.extend(manager.get_block_ids(r.request_id)[0] for r in scheduler.running)

    names = [_add(llm, prompt, steps + len(prompts) + 8) for prompt in prompts]
    return decode_steps_s(llm.llm_engine, names, steps, note_blocks), blocks


def _add(llm: LLM, prompt: Prompt, num_tokens: int) -> str:
    token_ids, extra_args = prompt
    return add_request(llm.llm_engine, token_ids, exactly(num_tokens, extra_args=extra_args))


if __name__ == "__main__":
    serve(int(sys.argv[1]), start, answer)
