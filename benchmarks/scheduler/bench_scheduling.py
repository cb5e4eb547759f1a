# SPDX-License-Identifier: Apache-2.0
"""What a scheduling step costs while 100,000 requests wait: RelayScheduler's beside vLLM's.

vLLM's engine core runs with a stub for the model, so the requests pass through the real scheduler
and the real KV cache manager. Timed are `Scheduler.schedule` and, apart, `add_request`. Requests
"with 4 segments each" import one of 250 modules in each of four places; "modules ms" is what a step
takes to see which modules are there, and to have others computed.

Requests that find their prefix in the cache are computed faster, so more of them begin and run in a
step, and each takes vLLM's code some time. "stock, relay's order" is vLLM's scheduler given the
requests in the order in which RelayScheduler began them: it finds as much in the cache, and what
RelayScheduler takes beyond that is its own.
"""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from benchmarks.modules.bench_modules import Numbers
from benchmarks.scheduler.bench_scheduler import MODEL, make_prompts
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.modules.markup.schema import Module, Schema, Union
from vllm_relay.modules.prompt.plan import EXTRA_ARG
from vllm_relay.modules.prompt.schema_store import SchemaStore
from vllm_relay.prefix_cache.predict.engine import PredictorSettings, create_config
from vllm_relay.prefix_cache.predict.executor import StubExecutor

WAITING = 100_000
PREFIXES = 1024
STEPS = 200
OUTPUT_TOKENS = 8
KV_CACHE_BYTES = 1 << 28
BLOCK_SIZE = 32
PLACES, MODULES_PER_PLACE, MODULE_TOKENS = 4, 250, 96

Prompt = tuple[list[int], dict[str, str] | None]
"""Token ids, and extra arguments."""


def make_modular_prompts(requests: int, seed: int) -> list[Prompt]:
    """Each with a module in every place and text of its own."""
    rng = np.random.default_rng(seed)

    def numbers(count: int) -> str:
        return " ".join(map(str, rng.integers(3, MODEL.vocab_size, count).tolist()))

    unions = [
        Union(
            *(
                Module(f"p{place}m{number}", numbers(MODULE_TOKENS) + " ")
                for number in range(MODULES_PER_PLACE)
            )
        )
        for place in range(PLACES)
    ]
    store = SchemaStore(Numbers(), block_size=BLOCK_SIZE)
    store.add(Schema("s", *unions))
    prompts: list[Prompt] = []
    for chosen in rng.integers(MODULES_PER_PLACE, size=(requests, PLACES)).tolist():
        imports = "".join(f"<p{place}m{number}/>" for place, number in enumerate(chosen))
        rendered = store.render(f"{imports} {numbers(16)}", schema="s")
        assert rendered.plan is not None
        prompts.append((rendered.token_ids, {EXTRA_ARG: rendered.plan.to_argument()}))
    return prompts


def measure(
    settings: PredictorSettings, prompts: list[Prompt], steps: int
) -> tuple[Row, list[str]]:
    """Returns the ids of the requests that ran, too, in the order in which they began; those of
    `prompts` are their places in it."""
    core = EngineCore(
        create_config(settings), partial(StubExecutor, available_bytes=KV_CACHE_BYTES), False
    )
    try:
        sampling = partial(
            SamplingParams,
            temperature=0,
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
            detokenize=False,
        )
        hasher = core.request_block_hasher
        requests = [
            Request(str(index), tokens, sampling(extra_args=extra), None, block_hasher=hasher)
            for index, (tokens, extra) in enumerate(prompts)
        ]
        scheduler = core.scheduler
        core.model_executor.sampler = lambda request_id: (
            [] if scheduler.requests[request_id].is_prefill_chunk else [3]
        )
        began_s = time.perf_counter()
        for request in requests:
            core.add_request(request)
        adding_s = time.perf_counter() - began_s
        original, times_s = scheduler.schedule, []
        running: list[int] = []

        def schedule(*args, **kwargs):
            began_s = time.perf_counter()
            output = original(*args, **kwargs)
            times_s.append(time.perf_counter() - began_s)
            running.append(len(scheduler.running))
            return output

        scheduler.schedule = schedule
        modules_s: list[float] = []
        if hasattr(scheduler, "modules"):
            time_calls(scheduler.modules, "prepare", modules_s)
        for _ in range(steps):
            core.step()
        waiting = len(scheduler.waiting)
        begun = list(core.model_executor.begun)
    finally:
        core.shutdown()
    row: Row = {
        "still waiting": waiting,
        "running": statistics.mean(running),
        "admitted a step": (len(prompts) - waiting) / steps,
        "schedule p50 ms": 1e3 * statistics.median(times_s),
        "schedule p99 ms": 1e3 * percentile_99(times_s),
        "modules p50 ms": 1e3 * statistics.median(modules_s or [0.0]),
        "modules p99 ms": 1e3 * percentile_99(modules_s or [0.0, 0.0]),
        "add_request us": 1e6 * adding_s / len(requests),
    }
    return row, begun


def begun_first(prompts: list[Prompt], begun: list[str]) -> list[Prompt]:
    places = dict.fromkeys([*map(int, begun), *range(len(prompts))])
    return [prompts[place] for place in places]


def time_calls(owner: Any, name: str, taken_s: list[float]) -> None:
    original = getattr(owner, name)

    def timed() -> None:
        began_s = time.perf_counter()
        original()
        taken_s.append(time.perf_counter() - began_s)

    setattr(owner, name, timed)


def percentile_99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def main() -> None:
    options = argument_parser(__doc__, rounds=1).parse_args()
    result = Result.begin(__file__, __doc__, options)
    waiting, prefixes, steps = (500, 8, 20) if options.smoke else (WAITING, PREFIXES, STEPS)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        model = MODEL.save(Path(folder))
        kinds: dict[str, list[Prompt]] = {
            f"plain, {shared} prefixes": [
                (tokens, None) for tokens in make_prompts(shared, waiting, seed=0)
            ]
            for shared in (prefixes, 0)
        }
        kinds[f"with {PLACES} segments each"] = make_modular_prompts(waiting, seed=0)
        for kind, prompts in kinds.items():
            relay = PredictorSettings(model, "queue", block_size=BLOCK_SIZE, max_model_len=1024)
            row, begun = measure(relay, prompts, steps)
            if prompts[0][1] is None:  # with modules stock would take the padding for text
                for name, given in (
                    ("stock", prompts),
                    ("stock, relay's order", begun_first(prompts, begun)),
                ):
                    stock_row, _ = measure(relay.of_scheduler("stock"), given, steps)
                    rows.append({"requests": kind, "scheduler": name, **stock_row})
            rows.append({"requests": kind, "scheduler": "relay", **row})
    result.add_table(f"Steps while {waiting:,} requests wait", rows)
    worst = max(row["schedule p50 ms"] for row in rows if row["scheduler"] == "relay")
    what = "a scheduling step with 100,000 waiting, ms"
    result.add_goal(Goal(what, worst, 5.0, 1.0, lower_is_better=True, unit="ms"))
    plain = max(row["schedule p99 ms"] for row in rows[:-1] if row["scheduler"] == "relay")
    for what, value, goal, aim in (
        ("a step without modules, p99", plain, 3.0, 1.0),
        ("what modules take of a step, p99", float(rows[-1]["modules p99 ms"]), 1.0, 0.2),
        ("a step with modules, p99", float(rows[-1]["schedule p99 ms"]), 3.0, 1.0),
    ):
        result.add_goal(Goal(what, value, goal, aim, lower_is_better=True, unit="ms"))
    result.end(options)


if __name__ == "__main__":
    main()
