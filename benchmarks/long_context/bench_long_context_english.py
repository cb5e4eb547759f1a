# SPDX-License-Identifier: Apache-2.0
"""English and learned heads: how far RELAY_SPARSE is from dense attention.

SmolLM2-135M-Instruct in float32 continues passages of this project's documentation greedily with
RELAY, which is dense. RELAY_SPARSE is given the same passages, and the same tokens behind them
whatever it would choose, and its log-probabilities are compared at each of the 20 tokens that were
the likeliest for RELAY. A sequence parts where RELAY_SPARSE would have chosen another token first:
until there it would have generated the same ones. "read" are the tokens that a search gave at least
one query head of a kv head, of those that it could have given. `alpha` 0 reads everything, so that
it shows what rounding does. One engine after the other, each in a process of its own. No times.
"""

import os
import tempfile
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from benchmarks.long_context.english_engine import Answer, EnglishEngine, EnglishSettings
from benchmarks.support import machine
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Result
from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.smollm2.download import smollm2_folder

ROOT = Path(__file__).resolve().parents[2]
PASSAGES_TOKENS = (4200, 4600, 5000, 5500, 6000)
LEFT_OUT = ("benchmarks.md",)  # mostly numbers
NUM_COMPARED = 20
SETTINGS: dict[str, dict[str, float]] = {
    "defaults": {},
    "alpha 0.001": {"alpha": 0.001},
    "alpha 0.01": {"alpha": 0.01},
    "defaults, nothing estimated": {"estimate_unread": False},
    "alpha 0.01, nothing estimated": {"alpha": 0.01, "estimate_unread": False},
    "alpha 0": {"alpha": 0.0},
}


def passages(model: Path, lengths: list[int]) -> list[list[int]]:
    """One behind the other, from the documentation's pages in the order of their names."""
    pages = [p for p in sorted(ROOT.glob("docs/*.md")) if p.name not in LEFT_OUT]
    text = "\n\n".join(page.read_text() for page in pages)
    tokens = AutoTokenizer.from_pretrained(model).encode(text, verbose=False)
    if len(tokens) < sum(lengths):
        raise ValueError(
            f"--passages: {sum(lengths):,} tokens in all, expected at most the {len(tokens):,} of "
            "the documentation"
        )
    ends = np.cumsum(lengths)
    return [tokens[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def differences(dense: Answer, sparse: Answer) -> list[float]:
    """|log-probability - dense| of the tokens that were the likeliest for the dense engine."""
    found = []
    for expected, given in zip(dense.logprobs, sparse.logprobs, strict=True):
        likeliest = sorted(expected, key=expected.__getitem__, reverse=True)[:NUM_COMPARED]
        least = min(given.values())  # what is not told is at most as likely
        found += [abs(given.get(token, least) - expected[token]) for token in likeliest]
    return found


def parts_at(dense: Answer, sparse: Answer) -> int | None:
    """How many tokens are the same; None if all are."""
    pairs = zip(dense.token_ids, sparse.best, strict=True)
    return next((i for i, (expected, best) in enumerate(pairs) if expected != best), None)


def compared(name: str, dense: list[Answer], sparse: list[Answer]) -> Row:
    found = np.array(
        [each for d, s in zip(dense, sparse, strict=True) for each in differences(d, s)]
    )
    parted = [parts_at(d, s) for d, s in zip(dense, sparse, strict=True)]
    after = sorted(tokens for tokens in parted if tokens is not None)
    searched = sum(each.num_searched_tokens for each in sparse)
    read = sum(each.num_retrieved_tokens for each in sparse) / searched if searched else 1.0
    return {
        "RELAY_SPARSE with": name,
        "read": read,
        "mean difference of log-probabilities": float(found.mean()),
        "p99": float(np.quantile(found, 0.99)),
        "largest": float(found.max()),
        "sequences as dense": f"{parted.count(None)} of {len(parted)}",
        "the others part after": ", ".join(map(str, after)) + " tokens" if after else "",
    }


def main() -> None:
    parser = argument_parser(__doc__, rounds=1)
    parser.add_argument("--passages", type=int, nargs="+", default=PASSAGES_TOKENS,
                        metavar="TOKENS", help="lengths (%(default)s)")  # fmt: skip
    parser.add_argument("--window-tokens", type=int, default=256, help="(%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=48, help="(%(default)s)")
    options = parser.parse_args()
    result = Result.begin(__file__, __doc__, options)
    window, settings_of = {"window_tokens": options.window_tokens}, SETTINGS
    if options.smoke:
        options.passages, options.output_tokens = [400], 4
        settings_of = {"defaults": SETTINGS["defaults"]}
        window = {"window_tokens": 64, "sink_tokens": 32, "min_context_tokens": 200}
    cores = machine.available_cores()[: options.threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))

    model = smollm2_folder()
    prompts = passages(model, options.passages)
    longest_tokens = max(options.passages) + options.output_tokens
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:

        def engine(name: str, backend: str, relay: dict[str, float]) -> EnglishEngine:
            settings = EngineSettings(
                str(model), backend, "float32", longest_tokens + 1, max_num_seqs=1
            )
            log_path = Path(folder, f"{name}.log")
            return EnglishEngine(name, EnglishSettings(settings, relay), log_path)

        with engine("RELAY", "relay", {}) as dense_engine:
            dense_engine.wait()
            print("# RELAY continues the passages", flush=True)
            dense = [dense_engine.continued(p, options.output_tokens) for p in prompts]
        rows: list[Row] = []
        for name, given in settings_of.items():
            with engine(name, "relay_sparse", {**given, **window}) as sparse_engine:
                sparse_engine.wait()
                print(f"# RELAY_SPARSE with {name} is given the same tokens", flush=True)
                sparse = [
                    sparse_engine.forced(prompt, answer.token_ids)
                    for prompt, answer in zip(prompts, dense, strict=True)
                ]
            rows.append(compared(name, dense, sparse))
    result.add_table(
        f"{len(prompts)} passages of {min(options.passages):,} to {max(options.passages):,} tokens "
        f"of English, {options.output_tokens} tokens behind each, a window of "
        f"{window['window_tokens']} tokens",
        rows,
    )
    result.end(options)


if __name__ == "__main__":
    main()
