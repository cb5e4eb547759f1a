# SPDX-License-Identifier: Apache-2.0
"""Better indexes for a request that is still running: after how many generated tokens they pay.

"By costs" is what decides while a request runs, with the costs that ship. "Measured" are CPU times
of one thread, of a made head (`benchmarks/sparse/heads/corpus.py`) with one kv head: to plan and to
build as for a running request, and searches with what was planned against a scan. Where the plan
keeps the scan, nothing is saved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import partial

from benchmarks.sparse.heads.corpus import make_head
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Result
from benchmarks.support.timing import Timing
from vllm_relay.long_context.host_sequence import TRAIN_QUERIES_PER_KEY
from vllm_relay.long_context.index_payoff import BETTER_KINDS, IndexPayoff
from vllm_relay.sparse import Dipr, FlatIndex
from vllm_relay.sparse.attention import SparseLayer
from vllm_relay.sparse.elements import from_float32
from vllm_relay.sparse.face import CompiledIndex
from vllm_relay.sparse.index_choice import build_index
from vllm_relay.sparse.options import DBOptions
from vllm_relay.sparse.prefix_planner import PROFILE_TOKENS
from vllm_relay.sparse.search_cost import SHIPPED

GROUP, HEAD_SIZE, DTYPE = 4, 128, "bfloat16"
SIZES = (8192, 32_768, 65_536, 131_072, 1_048_576)


def new_payoff() -> IndexPayoff:
    key_bytes = HEAD_SIZE * 2
    return IndexPayoff(SHIPPED, group=GROUP, head_size=HEAD_SIZE, key_bytes=key_bytes)


def finite_or_never(num_tokens: float) -> float | str:
    return num_tokens if math.isfinite(num_tokens) else "never"


def modelled_rows(sizes: Iterable[int]) -> list[Row]:
    payoff = new_payoff()
    return [
        {
            "keys": num_keys,
            "kind": kind,
            "plan and build, s": payoff.cost_s(kind, num_keys),
            "saved by token, us": 1e6 * payoff.saved_s(kind, num_keys),
            "pays after, tokens": finite_or_never(payoff.break_even_tokens(kind, num_keys)),
        }
        for num_keys in sizes
        for kind in BETTER_KINDS
    ]


def cpu_s(call: Callable[[], object]) -> float:
    began_s = time.process_time()
    call()
    return time.process_time() - began_s


def measured_rows(head_kind: str, num_keys: int, rounds: int) -> list[Row]:
    head = make_head(
        head_kind,
        keys=num_keys,
        train=round(TRAIN_QUERIES_PER_KEY * num_keys),
        tests=2 * PROFILE_TOKENS,
        heads=GROUP,
    )
    keys, values, train = (
        from_float32(part, DTYPE) for part in (head.keys, head.values, head.train_queries)
    )
    last, tested = head.queries[:PROFILE_TOKENS], head.queries[PROFILE_TOKENS:]
    options = DBOptions(query=Dipr(alpha=0.01), threads=1)
    layers = {"flat": (SparseLayer([FlatIndex().build(keys, threads=1)], [values]), None)}
    build_s, kept = {}, {}
    for kind in BETTER_KINDS:
        began_s = time.process_time()
        index, plan = build_index(
            0, keys, values, train, GROUP, options, SHIPPED, last_queries=last,
            kinds=("full", "flat", kind),
        )  # fmt: skip
        build_s[kind] = time.process_time() - began_s
        assert isinstance(index, CompiledIndex)
        planned = None if plan is None else plan.query_for(num_keys)
        kept[kind] = index.kind
        layers[kind] = SparseLayer([index], [values]), getattr(planned, "width", None)

    def search(name: str) -> None:
        layer, width = layers[name]
        for token in tested:
            layer.attend(token[None], Dipr(alpha=0.01, width=width), threads=1)

    samples: dict[str, list[float]] = {name: [] for name in layers}
    for number in range(rounds + 1):
        for name, taken in samples.items():
            each_s = cpu_s(partial(search, name)) / len(tested)
            if number:  # the first touches what was never read
                taken.append(each_s)
    search_s = {name: Timing(taken).median_s for name, taken in samples.items()}
    rows: list[Row] = []
    for kind in BETTER_KINDS:
        saved_s = search_s["flat"] - search_s[kind] if kept[kind] == kind else 0.0
        rows.append(
            {
                "head": head_kind,
                "keys": num_keys,
                "kind": kind,
                "planned": kept[kind],
                "plan and build, s": build_s[kind],
                "scan, us": 1e6 * search_s["flat"],
                "search, us": 1e6 * search_s[kind],
                "pays after, tokens": build_s[kind] / saved_s if saved_s > 0 else "never",
            }
        )
    return rows


def main() -> None:
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument(
        "--keys", type=int, nargs="+", default=[32_768, 131_072], help="of measured heads"
    )
    parser.add_argument("--heads", nargs="+", default=["rope"], metavar="KIND")
    options = parser.parse_args()
    result = Result.begin(__file__, __doc__, options)
    if options.smoke:
        options.keys, options.rounds = [2048], 1
    result.add_table("By costs", modelled_rows(SIZES))
    measured = [
        row
        for kind in options.heads
        for num_keys in options.keys
        for row in measured_rows(kind, num_keys, options.rounds)
    ]
    result.add_table("Measured", measured)
    result.end(options)


if __name__ == "__main__":
    main()
