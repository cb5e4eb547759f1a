# SPDX-License-Identifier: Apache-2.0
"""Whether `vllm-relay predict` gives vLLM's cached tokens, request by request, and how fast.

The requests run twice: on real engines, in-process and all submitted before the first step, and in
the predictor.  Every engine has a tiny model with random weights.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.support.model import Model
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from benchmarks.support.timing import fraction
from vllm_relay.prefix_cache.predict.input import PredictedRequest

BLOCK_SIZES = [32, 64]  # vLLM's CPU kernels take multiples of 32
CACHE_TOKENS = [1280, 2560, 8192]
MAX_MODEL_LEN = 1024
SPEED_REQUESTS = 10_000
MODEL = Model(
    hidden_size=64, intermediate_size=64, num_heads=1, num_kv_heads=1, num_layers=1, vocab_size=512
)
ENGINE_FLAG = "--engine"  # this file is the process of the engines, too

Requests = list[PredictedRequest]


def tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(3, MODEL.vocab_size), k=count)


def system_prompts(rng: random.Random, count: int) -> Requests:
    """Questions under a few system prompts, some asked more often than others."""
    prompts = [tokens(rng, rng.randrange(100, 400)) for _ in range(10)]
    chosen = rng.choices(prompts, weights=[1 / rank for rank in range(1, 11)], k=count)
    return [
        PredictedRequest(line, prompt + tokens(rng, rng.randrange(1, 60)), rng.randrange(1, 24))
        for line, prompt in enumerate(chosen)
    ]


def table_rows(rng: random.Random, count: int) -> Requests:
    """One instruction and rows of a table whose columns have ever more different values."""
    instruction = tokens(rng, 50)
    columns = [[tokens(rng, rng.randrange(10, 60)) for _ in range(n)] for n in (2, 6, 20, 1000)]
    return [
        PredictedRequest(line, sum((rng.choice(values) for values in columns), instruction), 4)
        for line in range(count)
    ]


def conversations(rng: random.Random, count: int) -> Requests:
    """Turns of chats, each with all earlier ones before it; some are sent twice."""
    requests: Requests = []
    while len(requests) < count:
        prompt = tokens(rng, rng.randrange(20, 120))
        for _ in range(rng.randrange(2, 6)):
            requests += [PredictedRequest(len(requests), list(prompt), rng.randrange(1, 32))] * (
                1 + (rng.random() < 0.1)
            )
            prompt += tokens(rng, rng.randrange(20, 100))
    return requests[:count]


def shuffled(requests: Requests) -> Requests:
    return random.Random(1).sample(requests, len(requests))


WORKLOADS: dict[str, Callable[[random.Random, int], Requests]] = {
    "system prompts": system_prompts,
    "table rows": table_rows,
    "conversations": conversations,
}
ORDERS: dict[str, Callable[[Requests], Requests]] = {
    "as made": list,
    "shuffled": shuffled,
    "sorted": lambda requests: sorted(requests, key=lambda r: r.prompt_token_ids),
}


def run_engines(input_path: Path, output_path: Path) -> None:
    """Writes the cached tokens of every request of every workload on every engine."""
    from vllm import LLM

    from benchmarks.support.decoding import exactly

    given = json.loads(input_path.read_text())
    results = []
    for engine_args in given["engines"]:
        llm = LLM(**engine_args)
        results.append([])
        for workload in given["workloads"]:
            llm.reset_prefix_cache()
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt, _ in workload],
                [exactly(num_tokens) for _, num_tokens in workload],
                use_tqdm=False,
            )
            results[-1].append([output.num_cached_tokens for output in outputs])
        llm.llm_engine.engine_core.shutdown()
    output_path.write_text(json.dumps(results))


def real_cached_tokens(
    engines: list[dict], workloads: list[Requests], folder: Path
) -> list[list[list[int]]]:
    """By engine, workload and request."""
    lists = [[(r.prompt_token_ids, r.output_tokens) for r in requests] for requests in workloads]
    given, found = folder / "given.json", folder / "found.json"
    given.write_text(json.dumps({"engines": engines, "workloads": lists}))
    one_thread = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.prefix_cache.bench_predictor",
            ENGINE_FLAG,
            given,
            found,
        ],
        env={**os.environ, **one_thread, **in_process, **quiet},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the engines failed:\n{done.stderr[-4000:]}")
    return json.loads(found.read_text())


def main() -> None:
    parser = argument_parser(__doc__, rounds=1)
    parser.add_argument("--scheduler", choices=["stock", "relay"], default="stock")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_relay.prefix_cache.predict.engine import CacheSize, PredictorSettings
    from vllm_relay.prefix_cache.predict.predictor import Predictor

    result = Result.begin(__file__, __doc__, options)
    count = 20 if options.smoke else 80
    block_sizes = BLOCK_SIZES[:1] if options.smoke else BLOCK_SIZES
    cache_tokens = CACHE_TOKENS[:1] if options.smoke else CACHE_TOKENS
    lists = {
        (name, order): put_in_order(make(random.Random(0), count))
        for name, make in WORKLOADS.items()
        for order, put_in_order in ORDERS.items()
    }
    rows, tokens_off, requests_off, compared = [], 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = MODEL.save(folder)

        def settings(block_size: int) -> PredictorSettings:
            return PredictorSettings(
                model,
                eviction="queue" if options.scheduler == "relay" else None,
                block_size=block_size,
                max_num_seqs=8,
                max_num_batched_tokens=512,
                max_model_len=MAX_MODEL_LEN,
            )

        shapes = [(size, cache // size) for size in block_sizes for cache in cache_tokens]
        engines = [
            settings(size).engine_args(
                num_gpu_blocks_override=blocks,
                skip_tokenizer_init=True,
                load_format="dummy",
                enforce_eager=True,
            )
            for size, blocks in shapes
        ]
        began_s = time.perf_counter()
        real = real_cached_tokens(engines, list(lists.values()), folder)
        engines_s = time.perf_counter() - began_s
        for (size, blocks), by_workload in zip(shapes, real, strict=True):
            for (workload, order), expected in zip(lists, by_workload, strict=True):
                predictor = Predictor(settings(size), lists[workload, order])
                prediction = predictor.predict(CacheSize(blocks=blocks))
                off = [
                    abs(a - b)
                    for a, b in zip(expected, prediction.cached_tokens_by_request, strict=True)
                ]
                compared += len(off)
                tokens_off += sum(off)
                requests_off += sum(map(bool, off))
                rows.append(
                    {
                        "workload": workload,
                        "order": order,
                        "block": size,
                        "blocks": blocks,
                        "cached": sum(expected),
                        "predicted": prediction.cached_tokens,
                        "tokens off": sum(off),
                        "ceiling": prediction.ceiling_tokens,
                        "best eviction": prediction.belady_tokens,
                        "preempted": prediction.preemptions,
                        "s": prediction.elapsed_s,
                    }
                )
        result.add_table(
            f"{count} requests on each of {len(shapes)} engines, {options.scheduler} scheduler",
            rows,
            note=f"{compared} requests compared, {requests_off} of them off; the engines took "
            f"{engines_s:.0f} s, the predictor {sum(row['s'] for row in rows):.0f} s",
        )
        many = system_prompts(random.Random(0), count if options.smoke else SPEED_REQUESTS)
        prediction = Predictor(settings(block_sizes[0]), many).predict(
            CacheSize(blocks=cache_tokens[-1] // block_sizes[0])
        )
    speed = {
        "requests": len(many),
        "prompt tokens": prediction.prompt_tokens,
        "steps": prediction.steps,
        "s": prediction.elapsed_s,
        "requests/s": fraction(len(many), prediction.elapsed_s),
    }
    result.add_table("Speed", [speed])
    result.add_goal(
        Goal(
            f"cached tokens off in {compared} requests, {options.scheduler} scheduler",
            tokens_off,
            0,
            lower_is_better=True,
            unit="tokens",
        )
    )
    result.end(options)


if __name__ == "__main__":
    if sys.argv[1:2] == [ENGINE_FLAG]:
        run_engines(*map(Path, sys.argv[2:]))
    else:
        main()
