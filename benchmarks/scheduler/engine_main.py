# SPDX-License-Identifier: Apache-2.0
"""The process of `scheduler_engine.SchedulerEngine`."""

import os
import sys
import time

from vllm import EngineArgs, LLMEngine
from vllm.usage.usage_lib import UsageContext

from benchmarks.scheduler.engine import EngineSettings, Served
from benchmarks.support.decoding import exactly
from vllm_relay.demo.engine_process import serve

COUNTERS = ("relay:kv_tokens_read", "relay:kv_tokens_logical", "vllm:num_preemptions")


class Engine:
    """LLMEngine under the name by which `serve` stops an LLM."""

    def __init__(self, llm_engine: LLMEngine) -> None:
        self.llm_engine = llm_engine
        self.requests = 0


def start(settings: EngineSettings) -> Engine:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # all requests are there before any step
    arguments = EngineArgs(
        settings.model_folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        attention_backend=settings.attention_backend,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        block_size=settings.block_size,
        num_gpu_blocks_override=settings.num_blocks,
        enable_prefix_caching=True,
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
        additional_config={} if settings.relay is None else {"relay": settings.relay},
    )
    context = UsageContext.ENGINE_CONTEXT if settings.online else UsageContext.LLM_CLASS
    return Engine(LLMEngine.from_engine_args(arguments, usage_context=context))


def answer(
    engine: Engine,
    prompts: list[list[int]],
    output_tokens: int,
    arrivals_s: list[float] | None,
) -> Served:
    llm_engine = engine.llm_engine
    if not llm_engine.reset_prefix_cache():
        raise RuntimeError("KV blocks are in use although no request is left")
    sampling = exactly(output_tokens)
    first_id = engine.requests
    engine.requests += len(prompts)
    first_token_s, cached = [0.0] * len(prompts), [0] * len(prompts)
    token_ids: list[list[int]] = [[] for _ in prompts]
    before = counters(llm_engine)
    began_s = time.perf_counter()
    added = 0
    while added < len(prompts) or llm_engine.has_unfinished_requests():
        now_s = time.perf_counter() - began_s
        while added < len(prompts) and (arrivals_s is None or arrivals_s[added] <= now_s):
            llm_engine.add_request(
                str(first_id + added), {"prompt_token_ids": prompts[added]}, sampling
            )
            added += 1
        if not llm_engine.has_unfinished_requests():
            time.sleep(1e-3)
            continue
        outputs = llm_engine.step()
        now_s = time.perf_counter() - began_s
        for output in outputs:
            index = int(output.request_id) - first_id
            if not first_token_s[index]:
                arrival_s = 0.0 if arrivals_s is None else arrivals_s[index]
                first_token_s[index] = now_s - arrival_s
                cached[index] = output.num_cached_tokens or 0
            token_ids[index] = list(output.outputs[0].token_ids)
    seconds = time.perf_counter() - began_s
    after = counters(llm_engine)
    return Served(
        seconds,
        cached,
        first_token_s,
        token_ids,
        {name: after[name] - before.get(name, 0.0) for name in after},
    )


def counters(llm_engine: LLMEngine) -> dict[str, float]:
    values: dict[str, float] = {}
    for metric in llm_engine.get_metrics():
        if metric.name in COUNTERS:
            values[metric.name] = values.get(metric.name, 0.0) + metric.value
    return values


if __name__ == "__main__":
    serve(int(sys.argv[1]), start, answer)
