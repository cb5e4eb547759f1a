# SPDX-License-Identifier: Apache-2.0
"""RelayScheduler against vLLM's: requests that share many prefixes, a cache for few of them.

64 prefixes of 256 tokens, 16 requests under each with 256 tokens of their own, in random order, and
a KV cache for 8 requests. Both engines have the same settings, live in processes of their own at
the same time and work in turn; every round begins with an empty prefix cache. "Ceiling" is the hit
rate of a cache without limit: every prefix is computed once.
"""

import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.scheduler.engine import EngineSettings, SchedulerEngine, Served
from benchmarks.support.formatting import Row
from benchmarks.support.model import Model
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from benchmarks.support.timing import Timing, ratio

PREFIXES, PREFIX_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 64, 256, 256, 16
REQUESTS = 1024
LONG_PREFIX_TOKENS, SHORT_OWN_TOKENS, THRESHOLD_TOKENS = 2048, 32, 256
BLOCK_SIZE_TOKENS = 32
CACHED_REQUESTS = 8
MODEL = Model(256, 768, 4, 4, 4, 4096)
RELAY = {"scheduler": True}
PATIENT = {**RELAY, "max_hold_s": 20, "max_overtakes": 10_000}


def make_prompts(
    prefixes: int,
    requests: int,
    seed: int,
    prefix_tokens: int = PREFIX_TOKENS,
    own_tokens: int = OWN_TOKENS,
) -> list[list[int]]:
    """Requests under equally many prefixes, shuffled; with no prefixes nothing is shared."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return rng.integers(3, MODEL.vocab_size, count).tolist()

    shared = [tokens(prefix_tokens) for _ in range(prefixes)]
    prompts = [
        (shared[index % prefixes] if prefixes else tokens(prefix_tokens)) + tokens(own_tokens)
        for index in range(requests)
    ]
    return [prompts[index] for index in rng.permutation(requests)]


def poisson_arrivals_s(count: int, per_s: float, seed: int) -> list[float]:
    return np.random.default_rng(seed).exponential(1 / per_s, count).cumsum().tolist()


def hit_rate(served: Served, prompts: list[list[int]]) -> float:
    return sum(served.cached_tokens) / sum(map(len, prompts))


def compare(
    engines: dict[str, SchedulerEngine],
    prompts: list[list[int]],
    rounds: int,
    arrivals_s: list[float] | None = None,
) -> dict[str, list[Served]]:
    results: dict[str, list[Served]] = {name: [] for name in engines}
    for index in range(rounds):
        for name in list(engines)[:: -1 if index % 2 else 1]:
            results[name].append(engines[name].serve(prompts, OUTPUT_TOKENS, arrivals_s))
    return results


def start(
    stack: ExitStack, folder: Path, settings: dict[str, EngineSettings]
) -> dict[str, SchedulerEngine]:
    engines = {
        name: stack.enter_context(SchedulerEngine(name, each, folder / f"{name}.log"))
        for name, each in settings.items()
    }
    for engine in engines.values():
        engine.wait()
    return engines


def measure_offline(
    result: Result, engines: dict[str, SchedulerEngine], prefixes: int, requests: int, rounds: int
) -> float:
    """Returns stock's requests per second."""
    prompts = make_prompts(prefixes, requests, seed=0)
    ceiling = (requests - prefixes) * PREFIX_TOKENS / sum(map(len, prompts))
    served = compare(engines, prompts, rounds)
    times = {name: Timing([each.seconds for each in runs]) for name, runs in served.items()}
    result.add_table(
        f"Offline, {requests} requests under {prefixes} prefixes, ceiling {ceiling:.1%}",
        [
            {
                "scheduler": name,
                "hit rate": hit_rate(runs[0], prompts),
                "points below ceiling": 100 * (ceiling - hit_rate(runs[0], prompts)),
                "requests per s": requests / times[name].median_s,
                "spread": times[name].spread,
                "same tokens as stock": sum(
                    a == b
                    for a, b in zip(runs[0].token_ids, served["stock"][0].token_ids, strict=True)
                ),
            }
            for name, runs in served.items()
        ],
    )
    below = 100 * (ceiling - hit_rate(served["relay"][0], prompts))
    what = "offline, hit rate, points below the ceiling"
    result.add_goal(Goal(what, below, 1.0, 0.2, lower_is_better=True, unit="points"))
    speed = ratio(times["stock"], times["relay"])
    result.add_goal(Goal("offline, requests per second over stock", speed, 1.35, 1.6))
    return requests / times["stock"].median_s


def measure_online(
    result: Result,
    engines: dict[str, SchedulerEngine],
    prefixes: int,
    requests: int,
    capacity_per_s: float,
    rounds: int,
) -> None:
    prompts = make_prompts(prefixes, requests, seed=1)
    ceiling = (requests - prefixes) * PREFIX_TOKENS / sum(map(len, prompts))
    rows: dict[float, list[Row]] = {}
    for load in (0.8, 1.1):
        arrivals_s = poisson_arrivals_s(requests, load * capacity_per_s, seed=2)
        served = compare(engines, prompts, rounds, arrivals_s)
        rows[load] = [
            {
                "load": load,
                "requests per s": load * capacity_per_s,
                "scheduler": name,
                "hit rate": statistics.mean(hit_rate(each, prompts) for each in runs),
                "first token p50 ms": first_token_ms(runs, 50),
                "first token p99 ms": first_token_ms(runs, 99),
            }
            for name, runs in served.items()
        ]
    result.add_table(
        f"Online; load is in parts of what stock served offline, ceiling {ceiling:.1%}",
        [row for each in rows.values() for row in each],
    )
    stock, relay, _ = rows[0.8]
    below = 100 * (ceiling - relay["hit rate"])
    what = "online, hit rate, points below the ceiling"
    result.add_goal(Goal(what, below, 5.0, 2.0, lower_is_better=True, unit="points"))
    gain = stock["first token p99 ms"] / relay["first token p99 ms"]
    result.add_goal(Goal("online, p99 time to first token, stock's over relay's", gain, 1.0, 2.0))


def first_token_ms(runs: list[Served], percent: int) -> float:
    waits_s = [wait_s for each in runs for wait_s in each.first_token_s]
    return 1e3 * statistics.quantiles(waits_s, n=100, method="inclusive")[percent - 1]


def measure_without_sharing(
    result: Result, engines: dict[str, SchedulerEngine], requests: int, rounds: int
) -> None:
    prompts = make_prompts(0, requests, seed=3)
    served = compare(engines, prompts, rounds)
    times = {name: Timing([each.seconds for each in runs]) for name, runs in served.items()}
    result.add_table(
        f"Nothing shared, {requests} requests; a second engine like stock's shows the noise",
        [
            {
                "scheduler": name,
                "requests per s": requests / time.median_s,
                "spread": time.spread,
                "time over stock's": ratio(time, times["stock"]),
            }
            for name, time in times.items()
        ],
    )
    slower = ratio(times["relay"], times["stock"])
    what = "nothing shared, time over stock's"
    result.add_goal(Goal(what, slower, 1.02, lower_is_better=True))


def measure_warm_up(result: Result, engines: dict[str, SchedulerEngine], rounds: int) -> None:
    prompts = make_prompts(8, 64, 5, LONG_PREFIX_TOKENS, SHORT_OWN_TOKENS)
    served = compare(engines, prompts, rounds)
    result.add_table(
        f"Warm-up: 8 prefixes of {LONG_PREFIX_TOKENS} tokens, at most {THRESHOLD_TOKENS} tokens of "
        "a prompt in a step",
        [
            {
                "siblings": name,
                "hit rate": hit_rate(runs[0], prompts),
                "requests per s": len(prompts) / statistics.median(run.seconds for run in runs),
                "first token p50 ms": first_token_ms(runs[:1], 50),
            }
            for name, runs in served.items()
        ],
    )


def measure_reads(
    result: Result, engines: dict[str, SchedulerEngine], prefixes: int, requests: int
) -> None:
    prompts = make_prompts(prefixes, requests, seed=4)
    served = compare(engines, prompts, 1)
    generated = requests * OUTPUT_TOKENS
    read = {
        name: runs[0].metrics.get("relay:kv_tokens_read", 0.0) / generated
        for name, runs in served.items()
    }
    result.add_table(
        "KV tokens that relay attention reads per generated token",
        [
            {
                "scheduler": name,
                "KV tokens read": read[name],
                "KV tokens attended to": runs[0].metrics.get("relay:kv_tokens_logical", 0.0)
                / generated,
            }
            for name, runs in served.items()
        ],
    )
    fewer = 1 - read["relay"] / read["stock"]
    result.add_goal(Goal("KV tokens read per generated token, fewer than stock", fewer, 0.3, 0.5))


def main() -> None:
    parser = argument_parser(__doc__, rounds=3)
    options = parser.parse_args()
    result = Result.begin(__file__, __doc__, options)
    prefixes, requests, rounds = PREFIXES, REQUESTS, options.rounds
    if options.smoke:
        prefixes, requests, rounds = 4, 24, 1
    blocks_per_request = -(-(PREFIX_TOKENS + OWN_TOKENS) // BLOCK_SIZE_TOKENS)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relay-bench-")))
        base = EngineSettings(
            model_folder=MODEL.save(folder),
            block_size=BLOCK_SIZE_TOKENS,
            num_blocks=CACHED_REQUESTS * blocks_per_request + 1,
            max_num_seqs=32,
            max_model_len=PREFIX_TOKENS + OWN_TOKENS + OUTPUT_TOKENS,
        )
        pairs = {
            "offline": {"stock": base, "relay": replace(base, relay=RELAY)},
            "online": {
                "stock": replace(base, online=True),
                "relay": replace(base, relay=RELAY, online=True),
                "relay, max_hold_s 20": replace(base, relay=PATIENT, online=True),
            },
            "warm-up": {
                name: replace(
                    base,
                    relay={**RELAY, "warm_up": warm_up},
                    num_blocks=2048,
                    max_num_seqs=64,
                    max_model_len=LONG_PREFIX_TOKENS + SHORT_OWN_TOKENS + OUTPUT_TOKENS,
                    long_prefill_token_threshold=THRESHOLD_TOKENS,
                )
                for name, warm_up in (("held", True), ("not held", False))
            },
            "attention": {
                "stock": replace(base, attention_backend="relay"),
                "relay": replace(base, attention_backend="relay", relay=RELAY),
            },
        }
        with ExitStack() as engines_stack:
            engines = start(engines_stack, folder, pairs["offline"])
            per_s = measure_offline(result, engines, prefixes, requests, rounds)
            engines |= start(engines_stack, folder, {"stock again": base})
            measure_without_sharing(result, engines, requests // 8, 1 if options.smoke else 11)
        with ExitStack() as engines_stack:
            engines = start(engines_stack, folder, pairs["online"])
            measure_online(result, engines, prefixes, requests, per_s, rounds)
        with ExitStack() as engines_stack:
            measure_warm_up(result, start(engines_stack, folder, pairs["warm-up"]), rounds)
        with ExitStack() as engines_stack:
            engines = start(engines_stack, folder, pairs["attention"])
            measure_reads(result, engines, prefixes, requests // 2)
    result.end(options)


if __name__ == "__main__":
    main()
