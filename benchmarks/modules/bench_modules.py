# SPDX-License-Identifier: Apache-2.0
"""Prompt modules: time to the first token, KV blocks, and decode steps.

A model of Qwen2.5-0.5B's size with random weights. A prompt imports all modules of its schema,
which are in the cache, and has new text behind them. "no cache": stock vLLM computes a prompt of as
many tokens that it has never seen, "no modules" only the new ones: what is left to compute, and the
limit. "prefix cache": stock vLLM gets the same modules in an order
that varies from prompt to prompt, as plain text. Decode: requests that import the same modules
against requests that begin with one plain prefix as long, in turn, in one engine with relay
attention. "modules' KV blocks" are those that the requests hold of their modules, each counted
once, over those of one copy.
"""

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.modules.engine_main import Prompt
from benchmarks.support import machine
from benchmarks.support.formatting import Row
from benchmarks.support.model import Model
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from benchmarks.support.step_engine import EngineSettings
from benchmarks.support.timing import Timing, ratio
from vllm_relay.demo.engine_process import EngineProcess, wait_until_workers_sleep
from vllm_relay.modules.markup.schema import Module, Schema
from vllm_relay.modules.prompt.plan import EXTRA_ARG
from vllm_relay.modules.prompt.schema_store import SchemaStore

MODEL = Model(hidden_size=896, intermediate_size=4864, num_heads=14, num_kv_heads=2, num_layers=24)
FIRST_TOKEN_GOALS = {"no cache": (20, 60), "prefix cache": (5, 10)}


class Numbers:
    """A tokenizer of texts of token ids."""

    unk_token_id, pad_token_id, eos_token_id = 3, 3, 2

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [1] * add_special_tokens + [int(each) for each in text.split()]


class Prompts:
    """
    Args:
        module_tokens: of all modules together.
    """

    def __init__(self, num_modules: int, module_tokens: int, new_tokens: int, block_size: int):
        self._rng = np.random.default_rng(0)
        self._new_tokens = new_tokens
        self.num_module_blocks = 0
        self.modules = [self._numbers(module_tokens // num_modules) for _ in range(num_modules)]
        texts = [" ".join(map(str, tokens)) for tokens in self.modules]
        modules = [Module(f"m{n}", f"{text} ") for n, text in enumerate(texts)]
        self._store = SchemaStore(Numbers(), block_size=block_size)
        self._store.add(Schema("s", *modules))
        self._imports = "".join(f"<m{n}/>" for n in range(num_modules))
        self._plain_prefix = self._numbers(module_tokens)

    def modular(self) -> Prompt:
        """All modules and new text."""
        new = " ".join(map(str, self._numbers(self._new_tokens)))
        rendered = self._store.render(f'<prompt schema="s">{self._imports} {new}</prompt>')
        assert rendered.plan is not None
        self.num_module_blocks = rendered.plan.num_stored_slots // rendered.plan.block_size
        return rendered.token_ids, {EXTRA_ARG: rendered.plan.to_argument()}

    def unknown(self) -> Prompt:
        """As many tokens that were never seen."""
        count = sum(map(len, self.modules)) + self._new_tokens
        return self._numbers(count), None

    def new(self) -> Prompt:
        """New text alone."""
        return self._numbers(self._new_tokens), None

    def reordered(self) -> Prompt:
        """The modules as plain text in some order, and new text."""
        order = self._rng.permutation(len(self.modules))
        tokens = [token for number in order for token in self.modules[number]]
        return tokens + self._numbers(self._new_tokens), None

    def prefixed(self) -> Prompt:
        """One prefix as long as all modules, and new text."""
        return self._plain_prefix + self._numbers(self._new_tokens), None

    def _numbers(self, count: int) -> list[int]:
        return self._rng.integers(10, MODEL.vocab_size, count).tolist()


def timed(engine: EngineProcess, *order: Any) -> Any:
    """What an engine answers while the other one sleeps."""
    engine.order(*order)
    answer = engine.wait()
    wait_until_workers_sleep()
    return answer


def first_tokens(relay: Any, stock: Any, prompts: Prompts, rounds: int) -> dict[str, Timing]:
    contenders = {
        "modules": (relay, prompts.modular),
        "no cache": (stock, prompts.unknown),
        "no modules": (stock, prompts.new),
        "prefix cache": (stock, prompts.reordered),
    }
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, (engine, make) in contenders.items():
            [taken_s] = timed(engine, "first token", [make()])
            if number:  # the first computes the modules
                samples[name].append(taken_s)
    return {name: Timing(values) for name, values in samples.items()}


def decode_steps(
    relay: Any, prompts: Prompts, requests: int, steps: int, rounds: int
) -> tuple[dict[str, Timing], Row]:
    """Steps of both kinds, and the blocks of requests with modules."""
    samples: dict[str, list[float]] = {"modules": [], "plain prefix": []}
    row: Row = {}
    for number in range(rounds + 1):
        for name, make in (("modules", prompts.modular), ("plain prefix", prompts.prefixed)):
            asked = [make() for _ in range(requests)]
            steps_s, blocks = timed(relay, "decode", asked, steps)
            if number:
                samples[name].append(float(np.median(steps_s)))
            if name == "modules":
                num_shared = prompts.num_module_blocks
                held = {block for each in blocks for block in each[:num_shared]}
                row = {
                    "requests": requests,
                    "modules' KV blocks": len(held),
                    "of one copy": num_shared,
                    "KV blocks in all": len({block for each in blocks for block in each}),
                }
    return {name: Timing(values) for name, values in samples.items()}, row


def main() -> None:
    parser = argument_parser(__doc__, rounds=5, threads=2)
    parser.add_argument("--modules", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--module-tokens", type=int, default=5000, help="all (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--requests", type=int, default=10, help="that decode (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="of a round (%(default)s)")
    parser.add_argument("--block-size", type=int, default=32, help="(%(default)s)")
    options = parser.parse_args()
    result = Result.begin(__file__, __doc__, options)
    model = MODEL
    if options.smoke:
        options.module_tokens, options.rounds, options.steps, options.requests = 256, 1, 3, 2
        model = Model(hidden_size=128, intermediate_size=256, num_heads=4, num_kv_heads=2,
                      num_layers=2)  # fmt: skip
    prompts = Prompts(
        options.modules, options.module_tokens, options.new_tokens, options.block_size
    )
    with (
        tempfile.TemporaryDirectory(prefix="relay-bench-") as folder,
        _engine("relay", model, Path(folder), options) as relay,
        _engine("stock", model, Path(folder), options) as stock,
    ):
        relay.wait()
        stock.wait()
        first = first_tokens(relay, stock, prompts, options.rounds)
        steps, blocks = decode_steps(
            relay, prompts, options.requests, options.steps, options.rounds
        )
    add_first_tokens(result, first, options)
    add_decode(result, steps, blocks)
    result.end(options)


def _engine(backend: str, model: Model, folder: Path, options: Namespace) -> EngineProcess:
    settings = EngineSettings(
        model_folder=model.save(folder),
        attention_backend=backend,
        cores=machine.available_cores()[: options.threads],
        max_model_len=2 * options.module_tokens + 1024,
        max_num_seqs=options.requests,
        block_size=options.block_size,
        kv_cache_gib=1,
    )
    log = folder / f"{backend}.log"
    return EngineProcess(backend, "benchmarks.modules.engine_main", settings, log)


def add_first_tokens(result: Result, first: dict[str, Timing], options: Namespace) -> None:
    rows: list[Row] = [
        {
            "prompt": name,
            "first token ms": timing.median_ms,
            "spread": timing.spread,
            "modules times as fast": ratio(timing, first["modules"]),
        }
        for name, timing in first.items()
    ]
    tokens = (
        f"{options.module_tokens} tokens of {options.modules} modules, {options.new_tokens} new"
    )
    result.add_table(f"Time to the first token: {tokens}", rows)
    for name, (bar, aim) in FIRST_TOKEN_GOALS.items():
        value = ratio(first[name], first["modules"])
        result.add_goal(Goal(f"first token: {name} over modules", value, bar, aim))


def add_decode(result: Result, steps: dict[str, Timing], blocks: Row) -> None:
    slower = ratio(steps["modules"], steps["plain prefix"])
    row = {
        "requests": blocks["requests"],
        "with modules ms": steps["modules"].median_ms,
        "with a plain prefix ms": steps["plain prefix"].median_ms,
        "spread": steps["modules"].spread,
        "modules over prefix": slower,
    }
    result.add_table("Decode steps", [row])
    result.add_table("KV blocks of requests that decode", [blocks])
    copies = blocks["modules' KV blocks"] / blocks["of one copy"]
    result.add_goal(Goal("modules' KV blocks over one copy", copies, 1.1, 1.02, True))
    result.add_goal(Goal("decode step: modules over plain prefix", slower, 1.1, 1.0, True))


if __name__ == "__main__":
    main()
