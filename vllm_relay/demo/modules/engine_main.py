# SPDX-License-Identifier: Apache-2.0
"""The process of `engine.ModulesEngine`: starts vLLM and answers one prompt at a time."""

from __future__ import annotations

import sys
import time
from typing import Any

from vllm import LLM, SamplingParams

from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_main import start_llm
from vllm_relay.demo.engine_process import serve
from vllm_relay.demo.modules.engine import BLOCK_SIZE_TOKENS, ModulesAnswer


def start(settings: EngineSettings) -> LLM:
    relay = {"relay": {"scheduler": True}} if settings.attention_backend == "relay" else {}
    return start_llm(
        settings,
        cpu_kv_cache_gib=1,
        with_metrics=False,
        additional_config=relay,
        block_size=BLOCK_SIZE_TOKENS,
    )


def answer(
    llm: LLM, prompt_token_ids: list[int], extra_args: dict[str, Any] | None, output_tokens: int
) -> ModulesAnswer:
    """One request, greedy, exactly `output_tokens`."""
    sampling = SamplingParams(
        temperature=0,
        max_tokens=output_tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args=extra_args,
    )
    engine = llm.llm_engine
    begun_s = time.perf_counter()
    prompt: Any = {"prompt_token_ids": prompt_token_ids}
    engine.add_request(f"request-{time.monotonic_ns()}", prompt, sampling)
    first_token_s = 0.0
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs = engine.step() or outputs
        if outputs and not first_token_s:
            first_token_s = time.perf_counter() - begun_s
    [output] = outputs
    return ModulesAnswer(
        token_ids=list(output.outputs[0].token_ids),
        first_token_s=first_token_s,
        prompt_tokens=len(output.prompt_token_ids or ()),
        cached_tokens=output.num_cached_tokens or 0,
    )


if __name__ == "__main__":
    serve(int(sys.argv[1]), start, answer)
