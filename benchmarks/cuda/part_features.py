# SPDX-License-Identifier: Apache-2.0
"""Whole engines with a model whose answers are known, one for each way of running: do all answer
right? All are alive at the same time, so that nothing is timed."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cuda.engines import RELAY, STOCK, Answers, EngineSettings, GpuEngine
from benchmarks.cuda.result import without_folders
from benchmarks.cuda.run import Run
from benchmarks.cuda.variants import Variant
from benchmarks.support.formatting import Row
from benchmarks.support.result import Goal
from vllm_relay.demo.engine_process import EngineError

if TYPE_CHECKING:
    from vllm_relay.demo.requests import Request

NEEDED_S, PATIENCE_S = 100.0, 60.0
SYSTEM_PROMPTS, SYSTEM_PROMPT_TOKENS, OUTPUT_TOKENS = 4, 1500, 24
REQUESTS = SYSTEM_PROMPTS * 8
ALONE = 6
"""Requests that are asked alone too."""
DRAFT_TOKENS = 3
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [REQUESTS]}
DRAFT_GRAPHS = {**GRAPHS, "cudagraph_capture_sizes": [REQUESTS * (1 + DRAFT_TOKENS)]}
TRITON = {"additional_config": {"relay": {"cuda_kernels": "triton"}}}
FP8 = {"kv_cache_dtype": "fp8"}
NGRAM = {
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": DRAFT_TOKENS, "prompt_lookup_max": 3
    },
    "compilation_config": DRAFT_GRAPHS,
}  # fmt: skip


@dataclass(frozen=True)
class Feature:
    name: str
    backend: str = RELAY
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def features(model: str) -> list[Feature]:
    drafts = {
        "speculative_config": {
            "method": "draft_model", "model": model, "num_speculative_tokens": DRAFT_TOKENS
        },
        "compilation_config": DRAFT_GRAPHS,
    }  # fmt: skip
    v1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    return [
        Feature("stock", STOCK),
        Feature("stock, fp8 cache", STOCK, FP8),
        Feature("flash"),
        Feature("flash, eager", arguments={"compilation_config": {}, "enforce_eager": True}),
        Feature("flash, fp8 cache", arguments=FP8),
        Feature("flash, drafts of n-grams", arguments=NGRAM),
        Feature("flash, drafts of a model", arguments=drafts),
        Feature("flash, model runner V1", environment=v1),
        Feature(
            "flash, RelayScheduler",
            arguments={"scheduler_cls": "vllm_relay.scheduler.RelayScheduler"},
        ),
        Feature("triton", arguments=TRITON),
        Feature("triton, fp8 cache", arguments={**TRITON, **FP8}),
        Feature("triton, drafts of n-grams", arguments={**TRITON, **NGRAM}),
        Feature("triton, drafts of a model", arguments={**TRITON, **drafts}),
        Feature("triton, model runner V1", arguments=TRITON, environment=v1),
        Feature("VLLM_BATCH_INVARIANT=1", environment={"VLLM_BATCH_INVARIANT": "1"}),
        Feature("flash, vLLM's own compilation", arguments={"compilation_config": {}}),
    ]


def variants(run: Run) -> list[Variant]:
    return []


def settings(feature: Feature, model: str) -> EngineSettings:
    # one process and one thread each: there are as many as cores
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    return EngineSettings(
        model,
        {
            "attention_backend": feature.backend,
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "max_num_seqs": REQUESTS,
            "gpu_memory_utilization": 0.03,
            "kv_cache_memory_bytes": 1 << 30,
            "disable_log_stats": False,
            "compilation_config": GRAPHS,
            **feature.arguments,
        },
        {**environment, **feature.environment},
    )


def measure(run: Run) -> None:
    if not run.starts_engines("features", NEEDED_S):
        return
    from vllm_relay.demo.recall_model import build_recall_model
    from vllm_relay.demo.requests import WorkloadSizes, recall_requests

    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relay-bench-")))
        model = str(build_recall_model(folder / "model", max_position_embeddings=2048))
        sizes = WorkloadSizes(
            SYSTEM_PROMPTS, SYSTEM_PROMPT_TOKENS, REQUESTS // SYSTEM_PROMPTS, OUTPUT_TOKENS
        )
        requests = recall_requests(model, sizes, seed=0)
        run.result.doing("starting all engines")
        engines = []
        for feature in features(model):
            engine = GpuEngine(
                feature.name, settings(feature, model), folder, patience_s=PATIENCE_S
            )
            engines.append((feature, stack.enter_context(engine)))
        for feature, engine in engines:
            run.result.doing(feature.name)
            rows.append(_row(run, feature, engine, requests))
            print(f"    {rows[-1]}", flush=True)
        for _, engine in engines:
            engine.ask_to_stop()
    run.result.add_table(
        "Right answers",
        rows,
        f"The recall model, {REQUESTS} questions under {SYSTEM_PROMPTS} system prompts of about "
        f"{SYSTEM_PROMPT_TOKENS:,} tokens, {OUTPUT_TOKENS} tokens each, at once; "
        f"{ALONE} of them are asked alone too: in how many the logarithms of all probabilities "
        "are the same bits.",
    )
    wrong = sum(row["right"] != REQUESTS for row in rows)
    run.result.add_goal(
        Goal(f"engines of {len(rows)} that failed or answered wrong", wrong, 0, 0,
             lower_is_better=True, unit="engines")
    )  # fmt: skip
    apart = [ALONE - (row["alone, same bits"] or 0) for row in rows if "INVARIANT" in row["engine"]]
    run.result.add_goal(
        Goal("answers of VLLM_BATCH_INVARIANT=1 whose bits depend on company", sum(apart), 0, 0,
             lower_is_better=True, unit="answers")
    )  # fmt: skip


def _row(run: Run, feature: Feature, engine: GpuEngine, requests: list[Request]) -> Row:
    prompts = [request.prompt_token_ids for request in requests]
    try:
        engine.wait()
        engine.generate(prompts[:SYSTEM_PROMPTS], 2)  # fills the prefix cache
        together = engine.generate(prompts, OUTPUT_TOKENS, logprobs=True)
        alone = [
            engine.generate([prompt], OUTPUT_TOKENS, logprobs=True) for prompt in prompts[:ALONE]
        ]
    except EngineError as error:
        print(error, flush=True)
        run.result.add_finding(f"WRONG: {feature.name}: {without_folders(str(error))[-600:]}")
        return {"engine": feature.name, "right": None, "alone, same bits": None, "read": None}
    return {
        "engine": feature.name,
        "right": sum(
            tokens == request.expected_token_ids
            for tokens, request in zip(together.token_ids, requests, strict=True)
        ),
        "alone, same bits": sum(
            (one.token_ids[0], one.logprobs[0]) == (tokens, logprobs)
            for one, tokens, logprobs in zip(
                alone, together.token_ids[:ALONE], together.logprobs[:ALONE], strict=True
            )
        ),
        "read": _read(together),
    }


def _read(answers: Answers) -> float | None:
    """Of the KV tokens that queries attend to, the share that was read."""
    logical = answers.counters.get("relay:kv_tokens_logical")
    return answers.counters["relay:kv_tokens_read"] / logical if logical else None
