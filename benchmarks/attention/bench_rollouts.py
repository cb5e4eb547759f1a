# SPDX-License-Identifier: Apache-2.0
"""Many samples of one prompt (`n` of SamplingParams), as reinforcement learning rolls them out.

SmolLM2-135M-Instruct in vLLM with CPU_ATTN and with relay, each in a process of its own, in turn on
the same cores. Timed is `LLM.generate` of one request for all its samples, the computation of the
prompt with them; each round has a prompt of its own, so that it is never cached before. "first
token" is the time of one sample of one token, nearly all of it the prompt's: what no sharing of the
samples changes.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path

from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from benchmarks.support.timing import Timing, ratio
from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_process import (
    EngineProcess,
    in_turn,
    running_engines,
    wait_until_workers_sleep,
)
from vllm_relay.demo.smollm2.download import smollm2_folder

BACKENDS = ("CPU_ATTN", "RELAY")
GOALS = {16: (0.85, 0.7), 64: (0.8, 0.65)}
"""By number of samples: relay's time over CPU_ATTN's."""
PAGES = Path(__file__).resolve().parents[2] / "docs"


class RolloutEngine(EngineProcess):
    """An engine; `wait` returns the seconds of the samples that were ordered."""

    def __init__(self, backend: str, dtype: str, max_model_len: int, folder: Path) -> None:
        settings = EngineSettings(
            str(smollm2_folder()), backend, dtype, max_model_len, max_num_seqs=max(GOALS)
        )
        module = "benchmarks.support.sampling_engine_main"
        super().__init__(backend, module, settings, folder / f"{backend}.log")


def make_prompts(count: int, num_tokens: int) -> list[list[int]]:
    """Parts of this project's documentation."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder(), local_files_only=True)
    text = "\n\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    token_ids = tokenizer.encode(text, verbose=False)
    return [token_ids[begin : begin + num_tokens] for begin in range(0, count * 97, 97)]


def measure(options: Namespace, dtype: str, folder: Path) -> list[Row]:
    prompts = iter(
        make_prompts((1 + options.rounds) * (1 + len(options.samples)), options.prompt_tokens)
    )
    max_model_len = options.prompt_tokens + options.output_tokens + 1
    cases = [(1, 1), *((samples, options.output_tokens) for samples in options.samples)]
    times: dict[tuple[int, int], dict[str, list[float]]] = {
        case: {name: [] for name in BACKENDS} for case in cases
    }
    make = partial(RolloutEngine, dtype=dtype, max_model_len=max_model_len, folder=folder)
    with running_engines(make(backend) for backend in BACKENDS) as engines:
        for number in range(-1, options.rounds):
            for case in cases:
                prompt = next(prompts)
                for engine in in_turn(engines, number):
                    wait_until_workers_sleep()
                    engine.order(prompt, *case)
                    taken_s = engine.wait()
                    if number >= 0:
                        times[case][engine.name].append(taken_s)
    rows: list[Row] = []
    for (samples, tokens), by_name in times.items():
        stock, relay = (Timing(by_name[name]) for name in BACKENDS)
        rows.append({
            "dtype": dtype,
            "samples": samples if tokens > 1 else "first token",
            "CPU_ATTN s": stock.median_s,
            "relay s": relay.median_s,
            "spread": max(stock.spread, relay.spread),
            "relay over CPU_ATTN": ratio(relay, stock),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument("--samples", type=int, nargs="+", default=list(GOALS), help="(%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="(%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], help="(%(default)s)")
    options = parser.parse_args()
    result = Result.begin(__file__, __doc__, options)
    if options.smoke:
        options.samples, options.rounds = [2], 1
        options.prompt_tokens, options.output_tokens = 64, 4
    rows: list[Row] = []
    for dtype in options.dtypes:
        with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
            rows += measure(options, dtype, Path(folder))
    result.add_table(
        f"{options.output_tokens} tokens a sample behind a prompt of {options.prompt_tokens:,}",
        rows,
    )
    for row in rows:
        bar, aim = GOALS.get(row["samples"], (None, None))
        if bar is not None:
            what = f"{row['samples']} samples of one prompt, {row['dtype']}: time over CPU_ATTN's"
            value = row["relay over CPU_ATTN"]
            result.add_goal(Goal(what, value, bar, aim, lower_is_better=True))
    result.end(options)


if __name__ == "__main__":
    main()
