# SPDX-License-Identifier: Apache-2.0
"""What a scheduling step costs while 100,000 requests wait: RelayScheduler's beside vLLM's.

vLLM's engine core runs with a stub for the model, so the requests pass through the real scheduler
and the real KV cache manager. Timed are `Scheduler.schedule` and, apart, `add_request`.
"""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from vllm import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from benchmarks.scheduler.bench_scheduler import MODEL, make_prompts
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.prefix_cache.predict.engine import PredictorSettings, create_config
from vllm_relay.prefix_cache.predict.executor import StubExecutor

WAITING = 100_000
PREFIXES = 1024
STEPS = 200
OUTPUT_TOKENS = 8
KV_CACHE_BYTES = 1 << 28


def measure(settings: PredictorSettings, prompts: list[list[int]], steps: int) -> Row:
    core = EngineCore(
        create_config(settings), partial(StubExecutor, available_bytes=KV_CACHE_BYTES), False
    )
    try:
        sampling = SamplingParams(
            temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
        )
        requests = [
            Request(str(index), prompt, sampling, None, block_hasher=core.request_block_hasher)
            for index, prompt in enumerate(prompts)
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
        for _ in range(steps):
            core.step()
        waiting = len(scheduler.waiting)
    finally:
        core.shutdown()
    return {
        "still waiting": waiting,
        "running": statistics.mean(running),
        "admitted a step": (len(prompts) - waiting) / steps,
        "schedule p50 ms": 1e3 * statistics.median(times_s),
        "schedule p99 ms": 1e3 * statistics.quantiles(times_s, n=100, method="inclusive")[98],
        "add_request us": 1e6 * adding_s / len(requests),
    }


def main() -> None:
    options = argument_parser(__doc__, rounds=1).parse_args()
    result = Result.begin(__file__, __doc__, options)
    waiting, prefixes, steps = (500, 8, 20) if options.smoke else (WAITING, PREFIXES, STEPS)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        model = MODEL.save(Path(folder))
        for shared in (prefixes, 0):
            prompts = make_prompts(shared, waiting, seed=0)
            for name, eviction in (("stock", None), ("relay", "queue")):
                settings = PredictorSettings(model, eviction, block_size=32, max_model_len=1024)
                row = measure(settings, prompts, steps)
                rows.append({"prefixes": shared, "scheduler": name, **row})
    result.add_table(f"Steps while {waiting:,} requests wait", rows)
    worst = max(row["schedule p50 ms"] for row in rows if row["scheduler"] == "relay")
    what = "a scheduling step with 100,000 waiting, ms"
    result.add_goal(Goal(what, worst, 5.0, 1.0, lower_is_better=True, unit="ms"))
    result.end(options)


if __name__ == "__main__":
    main()
