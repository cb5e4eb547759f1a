# SPDX-License-Identifier: Apache-2.0
"""Whole engines with a Llama-3-8B's geometry and random weights, stock and relay in turn: a hook
that does something only where vLLM and vllm-relay are installed, and enough time is left."""

import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cuda.engines import RELAY, STOCK, EngineSettings, GpuEngine
from benchmarks.cuda.run import Run
from benchmarks.cuda.variants import Variant
from benchmarks.support.formatting import Row
from benchmarks.support.result import Goal
from vllm_relay.demo.engine_process import in_turn, running_engines

NEEDED_S, PATIENCE_S = 120.0, 150.0
WORKLOAD_S = 25.0
KV_CACHE_BYTES = 16 << 30
"""Of each engine: two of them and their weights take 70 GiB."""
FEW_TOKENS = 8
"""Two lengths of outputs tell what a step of decodes takes."""
PROFILED_TOKENS = 64
KERNELS = 12
"""Of the largest, in the table."""

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Workload:
    name: str
    prefixes: int
    prefix_tokens: int
    requests: int
    own_tokens: int
    output_tokens: int
    bar: float
    """Least speed-up of relay over stock."""
    rounds: int = 1

    def prompts(self) -> list[list[int]]:
        """They share a prefix of this workload alone, and differ in their first own token."""
        prompts = []
        for request in range(self.requests):
            seed = request * self.prefixes // self.requests + sum(map(ord, self.name))
            prefix = [3 + (seed * 7919 + i * i * 31) % 997 for i in range(self.prefix_tokens)]
            own = [3 + (request * 7919 + i * 17) % 997 for i in range(1, self.own_tokens)]
            prompts.append([*prefix, 1000 + request, *own])
        return prompts


WORKLOADS = [
    Workload("128 requests, prefix 8192", 1, 8192, 128, 64, 136, 3.0, rounds=2),
    Workload("64 requests, prefix 32768", 1, 32768, 64, 64, 136, 3.0),
    Workload("16 prompts of 4096 tokens, 16 samples each", 16, 4096, 256, 1, 136, 2.0),
    Workload("128 requests, nothing shared, 768 tokens", 1, 0, 128, 768, 136, 0.98),
]


def variants(run: Run) -> list[Variant]:
    return []


def settings(backend: str, folder: Path) -> EngineSettings:
    return EngineSettings(
        str(folder),
        {
            "attention_backend": backend,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": 36864,
            "max_num_seqs": 256,
            "gpu_memory_utilization": 0.3,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            # decodes are replayed in full by both; compiling layers would take a minute an engine
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sorted({each.requests for each in WORKLOADS}),
            },
        },
    )


def measure(run: Run) -> None:
    if not run.starts_engines("engine", NEEDED_S):
        return
    rows: list[Row] = []
    kernels: list[Row] = []
    try:
        with tempfile.TemporaryDirectory(prefix="relay-bench-") as name:
            folder = Path(name)
            (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
            engines = (
                GpuEngine(backend, settings(backend, folder), folder, patience_s=PATIENCE_S)
                for backend in (STOCK, RELAY)
            )
            run.result.doing("starting both engines")
            with running_engines(engines) as running:
                for workload in WORKLOADS:
                    if run.clock.total_left_s < WORKLOAD_S:
                        run.result.leave_out(f"{workload.name}: out of time")
                        continue
                    run.result.doing(workload.name)
                    rows.append(_compare(run, workload, running))
                    print(f"    {rows[-1]}", flush=True)
                run.result.doing("kernels of a step")
                with run.tolerating("torch's profiler"):
                    kernels = _kernels(rows[0], WORKLOADS[0], running)
    finally:
        run.result.add_table(
            "Llama-3-8B, random weights",
            rows,
            "Output tokens per second of requests whose prompts are in the prefix cache, the time "
            "from their arrival to their last token; and what a step of decodes takes, from the "
            "difference of two lengths of outputs. Both engines are alive and take turns; decodes "
            "are CUDA graphs, layers are not compiled.",
        )
        run.result.add_table(
            f"Kernels of a step of decodes, {WORKLOADS[0].name}",
            kernels,
            "By torch's profiler, of the time of a step above; kernels that run at the same time "
            "count in full.",
        )


def _compare(run: Run, workload: Workload, engines: list[GpuEngine]) -> Row:
    prompts = workload.prompts()
    took_s: dict[tuple[str, int], list[float]] = {}
    for engine in engines:
        # fills the prefix cache, so that what is timed is decoding
        engine.generate(prompts[:1], 1)
        engine.generate(prompts, 2)
    for number in range(workload.rounds):
        for output_tokens in (FEW_TOKENS, workload.output_tokens):
            for engine in in_turn(engines, number):
                answers = engine.generate(prompts, output_tokens)
                took_s.setdefault((engine.name, output_tokens), []).append(answers.took_s)
    mean_s = {key: statistics.mean(samples) for key, samples in took_s.items()}
    rate, step_ms = {}, {}
    for backend in (STOCK, RELAY):
        long_s, short_s = mean_s[backend, workload.output_tokens], mean_s[backend, FEW_TOKENS]
        rate[backend] = workload.requests * workload.output_tokens / long_s
        step_ms[backend] = (long_s - short_s) / (workload.output_tokens - FEW_TOKENS) * 1e3
    speedup, of_steps = rate[RELAY] / rate[STOCK], step_ms[STOCK] / step_ms[RELAY]
    run.result.add_goal(Goal(f"engine, {workload.name}, tokens/s", speedup, workload.bar))
    run.result.add_goal(Goal(f"engine, {workload.name}, decodes", of_steps, workload.bar))
    return {
        "workload": workload.name,
        f"{STOCK} tokens/s": rate[STOCK],
        f"{RELAY} tokens/s": rate[RELAY],
        "speed-up": speedup,
        f"{STOCK} step ms": step_ms[STOCK],
        f"{RELAY} step ms": step_ms[RELAY],
        "speed-up of steps": of_steps,
    }


def _kernels(step: Row, workload: Workload, engines: list[GpuEngine]) -> list[Row]:
    """Args: `step`: what `_compare` found."""
    prompts = workload.prompts()
    us: dict[str, dict[str, float]] = {}
    for engine in engines:
        for name, share in engine.kernel_shares(prompts, PROFILED_TOKENS).items():
            of_kernel = us.setdefault(_short(name), dict.fromkeys((STOCK, RELAY), 0.0))
            of_kernel[engine.name] += share * step[f"{engine.name} step ms"] * 1e3
    ordered = sorted(us.items(), key=lambda item: -max(item[1].values()))
    groups = [(name, [each]) for name, each in ordered[:KERNELS]]
    groups += [("all others", [each for _, each in ordered[KERNELS:]]), ("all", list(us.values()))]
    return [
        {
            "kernel": name,
            **{f"{backend} us": sum(each[backend] for each in group) for backend in (STOCK, RELAY)},
        }
        for name, group in groups
    ]


def _short(name: str) -> str:
    """Of a kernel, without its template's arguments."""
    return name.removeprefix("void ").split("<")[0].split("(")[0][:60]
