# SPDX-License-Identifier: Apache-2.0
"""Decode steps of vLLM with relay and with CPU_ATTN: what a long shared prefix costs end to end.

A model of Llama-2-7B's geometry, cut to 4 layers, with random weights; requests share a prefix and
differ in what follows. Each backend has an engine in a process of its own; both live at the same
time and work in turn on the same cores. A step is timed from one result to the next while all
requests decode. KV blocks have 64 tokens, so that a prefix of 64 tokens is one of them.
"""

import os
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.attention.contenders import refuse_wrong_results
from benchmarks.support.formatting import Row
from benchmarks.support.model import Model
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from benchmarks.support.step_engine import EngineSettings, StepEngine
from benchmarks.support.timing import Timing, ratio
from vllm_relay.demo.engine_process import wait_until_workers_sleep

BACKENDS = ("CPU_ATTN", "RELAY")
BLOCK_SIZE_TOKENS = 64
BASE_PREFIX_TOKENS = 64
PREFIXES_TOKENS = (2048, 8192)
GOALS = {2048: (1.08, 1.04), 8192: (1.3, 1.15)}
WITHIN = 1.02


def make_prompts(requests: int, prefix_tokens: int, own_tokens: int) -> list[list[int]]:
    """Prompts that share their first `prefix_tokens`. All prefixes begin alike."""

    def token(seed: int, position: int) -> int:
        return 3 + (seed * 7919 + position * position * 31 + position * 17) % 997

    prefix = [token(0, position) for position in range(prefix_tokens)]
    # the first own token tells requests apart
    return [
        prefix + [1000 + request] + [token(request, position) for position in range(own_tokens - 1)]
        for request in range(requests)
    ]


def measure_rounds(
    engines: dict[str, StepEngine], prompts: list[list[int]], rounds: int, steps: int
) -> dict[str, Timing]:
    """The median decode step of every round, engines in turn."""
    samples: dict[str, list[float]] = {name: [] for name in engines}
    for index in range(rounds):
        for name in list(engines)[:: -1 if index % 2 else 1]:
            wait_until_workers_sleep()
            engines[name].start_decoding(prompts, steps)
            samples[name].append(statistics.median(engines[name].wait()))
    return {name: Timing(values) for name, values in samples.items()}


def main() -> None:
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--requests", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="per round (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="(%(default)s)")
    parser.add_argument(
        "--unshared", type=int, default=192, help="tokens of prompts without a prefix (%(default)s)"
    )
    options = parser.parse_args()
    refuse_wrong_results()
    result = Result.begin(__file__, __doc__, options)
    model, prefixes = Model(num_layers=options.layers), PREFIXES_TOKENS
    requests, rounds, unshared = options.requests, options.rounds, options.unshared
    if options.smoke:
        model = Model(256, 512, 4, 4, 2, 2048)
        prefixes, requests, rounds, unshared = (256,), 4, 1, 64
    prompts = {
        f"prefix {tokens}": make_prompts(requests, tokens, 1)
        for tokens in (BASE_PREFIX_TOKENS, *prefixes)
    }
    prompts["nothing shared"] = make_prompts(requests, 0, unshared + 1)

    cores = sorted(os.sched_getaffinity(0))
    halves = [cores[: options.threads], cores[options.threads : 2 * options.threads]]
    settings = EngineSettings(
        model_folder="",
        attention_backend="",
        cores=halves[0],
        max_model_len=max(prefixes) + 512,
        max_num_seqs=requests,
        block_size=BLOCK_SIZE_TOKENS,
        kv_cache_gib=2,
    )
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="relay-bench-"))
        settings = replace(settings, model_folder=model.save(Path(folder)))
        engines = {
            backend: stack.enter_context(
                StepEngine(
                    replace(settings, attention_backend=backend, cores=half or halves[0]),
                    Path(folder) / f"{backend}.log",
                )
            )
            for backend, half in zip(BACKENDS, halves, strict=True)
        }
        for engine in engines.values():
            engine.wait()
        # both fill their prefix caches at the same time, each on its own cores
        for batch in reversed(prompts.values()):
            for engine in engines.values():
                engine.start_decoding(batch, 1)
            for engine in engines.values():
                engine.wait()
        for engine in engines.values():
            engine.move_to(halves[0])
        times = {
            name: measure_rounds(engines, batch, rounds, options.steps)
            for name, batch in prompts.items()
        }

    base = times[f"prefix {BASE_PREFIX_TOKENS}"]
    rows: list[Row] = [
        {
            "prompts": name,
            "CPU_ATTN step ms": time["CPU_ATTN"].median_ms,
            "relay step ms": time["RELAY"].median_ms,
            "spread": max(time["CPU_ATTN"].spread, time["RELAY"].spread),
            "speed-up": ratio(time["CPU_ATTN"], time["RELAY"]),
            f"CPU_ATTN over prefix {BASE_PREFIX_TOKENS}": ratio(time["CPU_ATTN"], base["CPU_ATTN"]),
            f"relay over prefix {BASE_PREFIX_TOKENS}": ratio(time["RELAY"], base["RELAY"]),
        }
        for name, time in times.items()
    ]
    result.add_table(
        f"Decode steps of {requests} requests, {model.num_layers} layers of Llama-2-7B", rows
    )
    for tokens in prefixes:
        bar, aim = GOALS.get(tokens, (None, None))
        value = ratio(times[f"prefix {tokens}"]["RELAY"], base["RELAY"])
        what = f"step with a prefix of {tokens} over step with {BASE_PREFIX_TOKENS}"
        result.add_goal(Goal(what, value, bar, aim, lower_is_better=True))
    nothing = times["nothing shared"]
    value = ratio(nothing["RELAY"], nothing["CPU_ATTN"])
    what = "nothing shared, end to end, time over CPU_ATTN's"
    result.add_goal(Goal(what, value, WITHIN, lower_is_better=True))
    result.end(options)


if __name__ == "__main__":
    main()
