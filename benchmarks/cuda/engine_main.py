# SPDX-License-Identifier: Apache-2.0
"""The process of one `engines.GpuEngine`."""

from __future__ import annotations

import collections
import gzip
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.cuda.engines import Answers, EngineSettings
from vllm_relay.demo.engine_process import serve

if TYPE_CHECKING:
    from vllm import LLM

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""What a trace calls things that run on the GPU."""


def start(settings: EngineSettings) -> LLM:
    os.environ.update(settings.environment)
    from vllm import LLM

    profiler = {
        "profiler": "torch",
        "torch_profiler_dir": str(Path(settings.model).absolute() / f"traces-{os.getpid()}"),
        **({"torch_profiler_activities": ["CUDA"]} if torch.cuda.is_available() else {}),
        "torch_profiler_with_stack": False,
    }
    return LLM(
        settings.model,
        enable_prefix_caching=True,
        seed=0,
        profiler_config=profiler,
        **settings.arguments,
    )


def answer(llm: LLM, what: str, *order: Any) -> Any:
    return {"generate": generate, "profile": profile}[what](llm, *order)


def generate(
    llm: LLM, prompts: list[list[int]], output_tokens: int, logprobs: bool = False
) -> Answers:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0,
        max_tokens=output_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=0 if logprobs else None,
    )
    before = counters(llm)
    began_s = time.perf_counter()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
    )
    took_s = time.perf_counter() - began_s
    answers = [output.outputs[0] for output in outputs]
    return Answers(
        token_ids=[list(each.token_ids) for each in answers],
        logprobs=[
            [step[token].logprob for step, token in zip(each.logprobs, each.token_ids, strict=True)]
            for each in answers
            if each.logprobs is not None
        ],
        took_s=took_s,
        counters={name: value - before[name] for name, value in counters(llm).items()},
    )


def counters(llm: LLM) -> collections.Counter[str]:
    """Relay's, which an engine keeps that has statistics."""
    if not llm.llm_engine.log_stats:
        return collections.Counter()
    relay = [each for each in llm.get_metrics() if each.name.startswith("relay:kv_tokens")]
    return collections.Counter({each.name: int(each.value) for each in relay})


def profile(llm: LLM, prompts: list[list[int]], output_tokens: int) -> dict[str, float]:
    folder = Path(llm.llm_engine.vllm_config.profiler_config.torch_profiler_dir)
    for old in folder.glob("*.gz"):
        old.unlink()
    llm.start_profile()
    generate(llm, prompts, output_tokens)
    llm.stop_profile()
    events: list[dict[str, Any]] = []
    for path in folder.glob("*.gz"):
        with gzip.open(path, "rt") as file:
            found = json.load(file).get("traceEvents", [])
        events += [event for event in found if event.get("cat") in ON_GPU]
    if not events:
        return {}
    # prompts are done in the first half
    end_us = max(event["ts"] + event["dur"] for event in events)
    begin_us = (min(event["ts"] for event in events) + end_us) / 2
    shares: collections.Counter[str] = collections.Counter()
    for event in events:
        if event["ts"] >= begin_us:
            shares[event["name"]] += event["dur"] / (end_us - begin_us)
    return dict(shares)


if __name__ == "__main__":
    serve(int(sys.argv[1]), start, answer)
