# SPDX-License-Identifier: Apache-2.0
"""From a stored context on disk to its first attention, against copying its KV cache.

A context whose kv heads all hold the same keys and values of a `rope` head and the same graph, each
with bytes of its own in the file; one query token. "open" finds the context in its folder, and "a
layer" attends once with every query head of a layer, for the first time, so that what it touches is
verified. "copy" is one copy of the keys and values that lie in memory, into memory that was touched
before. The file is read from the page cache.
"""

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common import Goal, Result, argument_parser, interleaved, ratio
from benchmarks.sparse.head_corpus import make_head
from vllm_relay.sparse import Dipr, GraphIndex
from vllm_relay.sparse.attention import attend
from vllm_relay.sparse.context_fingerprint import ContextFingerprint
from vllm_relay.sparse.context_store import HeadStates
from vllm_relay.sparse.disk_context_store import DiskContextStore
from vllm_relay.sparse.elements import Elements, as_elements

NUM_KV_HEADS, GROUP, HEAD_SIZE = 8, 4, 128
QUERY = Dipr(alpha=0.01)


def attend_layer(store: DiskContextStore, layer: int, queries: np.ndarray) -> np.ndarray:
    """float32 [kv_heads, group, HEAD_SIZE]; queries [group, HEAD_SIZE] are those of every head."""
    (context,) = store.contexts()
    outputs = []
    for head in range(NUM_KV_HEADS):
        found = context.index(layer, head).search(queries, QUERY).ids
        keys, values, places = context.gather(layer, head, found)
        outputs.append(attend(queries, keys, values, places, HEAD_SIZE**-0.5)[0])
    return np.stack(outputs)


def main() -> None:
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument("--tokens", type=int, default=131_072, help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="(%(default)s)")
    options = parser.parse_args()
    result = Result.begin(__file__, __doc__, options)
    if options.smoke:
        options.tokens, options.layers, options.rounds = 2048, 2, 1
    head = make_head(
        "rope", keys=options.tokens, train=options.tokens * 2 // 5, tests=1, heads=GROUP
    )
    keys, values = (_as_bfloat16(each) for each in (head.keys, head.values))
    index = GraphIndex().build(keys, head.train_queries)
    states = HeadStates(keys, values, index, None)
    fingerprint = ContextFingerprint(
        "random", "", options.layers, NUM_KV_HEADS, HEAD_SIZE, "bfloat16"
    )
    queries = head.queries[0]
    in_memory = [np.stack([keys.data, values.data] * NUM_KV_HEADS) for _ in range(options.layers)]
    target = [each.copy() for each in in_memory]

    def copy(num_layers: int) -> None:
        for to, each in zip(target[:num_layers], in_memory, strict=False):
            np.copyto(to, each)

    with tempfile.TemporaryDirectory(prefix="relay-open-") as folder:
        path = Path(folder)
        DiskContextStore(path, fingerprint).add(
            np.arange(options.tokens), [[states] * NUM_KV_HEADS] * options.layers
        )
        warm = DiskContextStore(path, fingerprint)
        expected = attend_layer(warm, 0, queries)

        def first(num_layers: int) -> None:
            store = DiskContextStore(path, fingerprint)
            for layer in range(num_layers):
                assert np.array_equal(attend_layer(store, layer, queries), expected)

        one, every = "open and attend a layer", "open and attend every layer"
        times = interleaved(
            {
                "open": lambda: DiskContextStore(path, fingerprint),
                one: lambda: first(1),
                every: lambda: first(options.layers),
                "attend a layer again": lambda: attend_layer(warm, 0, queries),
                "copy a layer": lambda: copy(1),
                "copy every layer": lambda: copy(options.layers),
            },
            options.rounds,
        )
    result.add_table(
        f"{options.tokens:,} tokens, {options.layers} layers of {NUM_KV_HEADS} kv heads, "
        f"{sum(each.nbytes for each in in_memory) / 2**20:.0f} MiB of KV cache",
        [
            {"what": name, "ms": timing.median_ms, "spread": timing.spread}
            for name, timing in times.items()
        ],
    )
    for name, copied in ((one, "copy every layer"), (every, "copy every layer")):
        value = ratio(times[copied], times[name])
        result.add_goal(Goal(f"{options.tokens:,} tokens: {name} over {copied}", value, 50, 200))
    again = ratio(times["copy a layer"], times["attend a layer again"])
    result.add_goal(
        Goal(f"{options.tokens:,} tokens: attend a layer again over copy", again, 5, 20)
    )
    result.end(options)


def _as_bfloat16(array: np.ndarray) -> Elements:
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return as_elements("array", Elements((bits >> 16).astype(np.uint16), "bfloat16"))


if __name__ == "__main__":
    main()
