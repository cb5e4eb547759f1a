# SPDX-License-Identifier: Apache-2.0
"""The process of `engine.LongEngine`: starts vLLM and answers (prompt, output tokens)."""

from __future__ import annotations

import sys
import time
from itertools import chain, pairwise

from vllm import LLM, SamplingParams

from vllm_relay.demo.engine_main import start_llm
from vllm_relay.demo.engine_process import serve
from vllm_relay.demo.long_contexts.engine import LongAnswer


def answer(llm: LLM, prompt_token_ids: list[int], output_tokens: int) -> LongAnswer:
    """One request, step by step, greedy, exactly `output_tokens`."""
    sampling = SamplingParams(
        temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
    )
    engine = llm.llm_engine
    engine.add_request(
        f"request-{time.monotonic_ns()}", {"prompt_token_ids": prompt_token_ids}, sampling
    )
    token_ids: list[int] = []
    arrivals_s = [time.perf_counter()]
    kv_blocks: list[list[int]] = [[] for _ in range(output_tokens + 1)]
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if outputs:
            arrivals_s.append(time.perf_counter())
            token_ids = list(outputs[0].outputs[0].token_ids)
        kv_blocks[len(token_ids)].append(_held_blocks(llm))
    prompt_s, *tokens_s = (after - before for before, after in pairwise(arrivals_s))
    return LongAnswer(
        token_ids,
        prompt_s,
        tokens_s,
        prompt_kv_blocks=max(chain(*kv_blocks[:2])),
        # blocks are freed when a step is scheduled, so with the second token those of the prompt
        decode_kv_blocks=max(chain(*kv_blocks[2:])),
        kv_block_bytes=_block_bytes(llm),
    )


def _held_blocks(llm: LLM) -> int:
    """Of the KV cache, those that a request holds."""
    [usage] = [m.value for m in llm.get_metrics() if m.name == "vllm:kv_cache_usage_perc"]
    num_blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    # vLLM leaves the null block out
    return round(usage * (num_blocks - 1))


def _block_bytes(llm: LLM) -> int:
    config = llm.llm_engine.vllm_config
    model = config.model_config
    elements = model.get_num_kv_heads(config.parallel_config) * model.get_head_size() * 2
    num_layers = model.get_num_layers(config.parallel_config)
    return num_layers * config.cache_config.block_size * elements * model.dtype.itemsize


if __name__ == "__main__":
    serve(int(sys.argv[1]), start_llm, answer)
