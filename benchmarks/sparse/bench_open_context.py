# SPDX-License-Identifier: Apache-2.0
"""From a stored context on disk to its first attention, against copying its KV cache.

A context whose kv heads all hold the same keys and values of a `rope` head and the same graph, each
with bytes of its own in the file; one query token. "open" finds the context in its folder. "attend
a layer first" does so with every query head of a layer right after opening, so that what it touches
is mapped and verified. "copy a layer" is one copy of keys and values that lie in memory, into
memory that was touched before.

A model of Llama 3 8B's shape has 32 layers. Their files do not fit on every machine, so "open, 32
layers" opens a context of 2,048 tokens with as many layers, and the goals put the parts together:
opening and attending one layer against 32 copies, and opening and attending 32 layers against 32
copies. Before each sample the file is read once, so that it lies in the page cache.
"""

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.sparse.heads.corpus import make_head
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from benchmarks.support.timing import interleaved, ratio
from vllm_relay.sparse import Dipr, GraphIndex
from vllm_relay.sparse.contexts.context_fingerprint import ContextFingerprint
from vllm_relay.sparse.contexts.context_store import HeadStates
from vllm_relay.sparse.contexts.disk.disk_context_store import DiskContextStore
from vllm_relay.sparse.index.elements import Elements, as_elements

NUM_LAYERS, NUM_KV_HEADS, GROUP, HEAD_SIZE = 32, 8, 4, 128
SHORT_TOKENS = 2048
QUERY = Dipr(alpha=0.01)


def attend_layer(store: DiskContextStore, layer: int, queries: np.ndarray) -> np.ndarray:
    """float32 [kv_heads, group, HEAD_SIZE]; queries [kv_heads, group, HEAD_SIZE]."""
    (context,) = store.contexts()
    sparse_layer = context.layer(layer)
    assert sparse_layer is not None
    return sparse_layer.attend(queries, QUERY)[0].output


def store_context(path: Path, num_layers: int, states: HeadStates) -> ContextFingerprint:
    fingerprint = ContextFingerprint("random", "", num_layers, NUM_KV_HEADS, HEAD_SIZE, "bfloat16")
    layers = [[states] * NUM_KV_HEADS] * num_layers
    DiskContextStore(path, fingerprint).add(np.arange(states.keys.shape[0]), layers)
    return fingerprint


def make_states(num_tokens: int) -> tuple[HeadStates, np.ndarray]:
    """And queries [kv_heads, group, HEAD_SIZE]."""
    head = make_head("rope", keys=num_tokens, train=num_tokens * 2 // 5, tests=1, heads=GROUP)
    keys, values = (_as_bfloat16(each) for each in (head.keys, head.values))
    index = GraphIndex().build(keys, head.train_queries)
    return HeadStates(keys, values, index, None), np.stack([head.queries[0]] * NUM_KV_HEADS)


def read_through(folder: Path) -> None:
    buffer = bytearray(1 << 20)
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def main() -> None:
    parser = argument_parser(__doc__, rounds=9, threads=2)
    parser.add_argument("--tokens", type=int, default=131_072, help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the long one (%(default)s)")
    options = parser.parse_args()
    result = Result.begin(__file__, __doc__, options)
    if options.smoke:
        options.tokens, options.layers, options.rounds = 2048, 2, 1
    states, queries = make_states(options.tokens)
    short_states, _ = make_states(SHORT_TOKENS)
    in_memory = np.stack([states.keys.data, states.values.data] * NUM_KV_HEADS)
    target = in_memory.copy()
    with (
        tempfile.TemporaryDirectory(prefix="relay-open-") as folder,
        tempfile.TemporaryDirectory(prefix="relay-short-") as short_folder,
    ):
        path, short_path = Path(folder), Path(short_folder)
        fingerprint = store_context(path, options.layers, states)
        short_fingerprint = store_context(short_path, NUM_LAYERS, short_states)
        warm = DiskContextStore(path, fingerprint)
        expected = attend_layer(warm, 0, queries)

        def first() -> None:
            store = DiskContextStore(path, fingerprint)
            assert np.array_equal(attend_layer(store, 0, queries), expected)

        def prepare() -> None:
            for each in (path, short_path):
                read_through(each)

        times = interleaved(
            {
                "open": lambda: DiskContextStore(path, fingerprint),
                "open, 32 layers": lambda: DiskContextStore(short_path, short_fingerprint),
                "open and attend a layer first": first,
                "attend a layer again": lambda: attend_layer(warm, 0, queries),
                "copy a layer": lambda: np.copyto(target, in_memory),
            },
            options.rounds,
            prepare=prepare,
        )
    result.add_table(
        f"{options.tokens:,} tokens, {NUM_KV_HEADS} kv heads, "
        f"{in_memory.nbytes / 2**20:.0f} MiB of KV cache in a layer",
        [
            {"what": name, "ms": timing.median_ms, "spread": timing.spread}
            for name, timing in times.items()
        ],
    )
    ms = {name: timing.median_ms for name, timing in times.items()}
    layer_ms = ms["open and attend a layer first"] - ms["open"]
    copy_ms = NUM_LAYERS * ms["copy a layer"]
    name = f"{options.tokens:,} tokens, {NUM_LAYERS} layers"
    for what, own_ms in (
        ("open and attend one layer", ms["open, 32 layers"] + layer_ms),
        ("open and attend every layer", ms["open, 32 layers"] + NUM_LAYERS * layer_ms),
    ):
        result.add_goal(Goal(f"{name}: {what}, over copying all", copy_ms / own_ms, 50, 200))
    again = ratio(times["copy a layer"], times["attend a layer again"])
    result.add_goal(
        Goal(f"{options.tokens:,} tokens: attend a layer again, over copying it", again, 5, 20)
    )
    result.end(options)


def _as_bfloat16(array: np.ndarray) -> Elements:
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return as_elements("array", Elements((bits >> 16).astype(np.uint16), "bfloat16"))


if __name__ == "__main__":
    main()
