# SPDX-License-Identifier: Apache-2.0
"""What indexes find on heads of real forward passes: the demo's recall model, and any other.

Keys, values and queries are those that attention saw; the tokens after the keys ask, with all query
heads of a kv head in one search, `Dipr(alpha=0.01)` at the default width, and then what the plan of
the head says. "set" is the share of the true range set that was found, "mass" the share of all
attention weight, "error" the relative L2 error of the attention output against float64, "tokens",
"distances" and "KiB" those of one search, "reachable" the share of a graph's keys that a search can
get to. Counts, not times.
"""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.sparse.heads import recorded
from benchmarks.sparse.heads.recorded import LayerTensors
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.sparse import BlockIndex, CoarseIndex, Dipr, FlatIndex, GraphIndex
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import as_elements
from vllm_relay.sparse.index.query_types import QueryType
from vllm_relay.sparse.index.sparse_layer import SparseLayer
from vllm_relay.sparse.plan.index_choice import build_index
from vllm_relay.sparse.plan.options import DBOptions

QUERY = Dipr(alpha=0.01)
TRAIN_SHARE = 0.4
KV_HEAD = 0


class ModelHead:
    """A kv head: keys, values, training queries in token order, and tokens that ask."""

    def __init__(self, layer: LayerTensors, num_tests: int) -> None:
        num_tests = min(num_tests, max(1, len(layer.keys) // 8))
        n, group = len(layer.keys) - num_tests, layer.group_size
        queries = layer.queries[:, KV_HEAD * group : (KV_HEAD + 1) * group]
        self.scale = layer.scale
        self.keys = np.ascontiguousarray(layer.keys[:n, KV_HEAD])
        self.values = np.ascontiguousarray(layer.values[:n, KV_HEAD])
        taught = np.linspace(0, n - 1, max(1, round(TRAIN_SHARE * n / group))).astype(int)
        self.train_queries = np.ascontiguousarray(queries[taught].reshape(-1, queries.shape[2]))
        self.queries = np.ascontiguousarray(queries[n:])
        self.group = group
        scores = np.einsum("tgd,nd->tgn", self.queries.astype(np.float64), self.keys)
        weights = np.exp((scores - scores.max(axis=2, keepdims=True)) * self.scale)
        self.weights = weights / weights.sum(axis=2, keepdims=True)
        self.output = self.weights @ self.values.astype(np.float64)
        self.in_range = self.weights >= QUERY.alpha * self.weights.max(axis=2, keepdims=True)


def quality(head: ModelHead, index: CompiledIndex, query: QueryType | None) -> Row:
    """Means over all tokens that ask; None reads everything."""
    layer = SparseLayer([index], [head.values])
    sets, masses, errors = [], [], []
    tokens, distances, num_bytes = 0, 0, 0
    for token, rows in enumerate(head.queries):
        state, stats = layer.attend(rows[None], [query], scale=head.scale)
        ids = [np.arange(len(head.keys))] * head.group
        if query is not None:
            ids = index.search(rows, query).ids
        for i, found in enumerate(ids):
            weights, wanted = head.weights[token, i], head.in_range[token, i]
            sets.append(wanted[found].sum() / wanted.sum())
            masses.append(weights[found].sum())
        right = head.output[token]
        errors += list(
            np.linalg.norm(state.output[0] - right, axis=1) / np.linalg.norm(right, axis=1)
        )
        tokens += stats.retrieved_tokens
        distances += stats.distances
        num_bytes += stats.bytes
    count = len(head.queries)
    return {
        "set": float(np.mean(sets)),
        "mass": float(np.mean(masses)),
        "error, p50": float(np.quantile(errors, 0.5)),
        "error, p99": float(np.quantile(errors, 0.99)),
        "tokens": tokens / count,
        "distances": distances / count,
        "KiB": num_bytes / count / 1024,
    }


def head_rows(head: ModelHead, max_error: float) -> list[Row]:
    keys, values = as_elements("keys", head.keys), as_elements("values", head.values)
    query = Dipr(alpha=QUERY.alpha, scale=head.scale)
    rows = []
    for index in (FlatIndex(), BlockIndex(), CoarseIndex(), GraphIndex()):
        index.build(keys, head.train_queries)
        row = {"index": index.kind, **quality(head, index, query)}
        if isinstance(index, GraphIndex):
            row["reachable"] = float(index.reachable().mean())
        rows.append(row)
    train_queries = as_elements("train_queries", head.train_queries)
    planned, plan = build_index(
        0, keys, values, train_queries, head.group, DBOptions(max_error=max_error)
    )
    if plan is not None:
        asked = plan.query_for(len(head.keys))
        what = "everything" if asked is None else planned.kind
        rows.append({"index": f"planned: {what}", **quality(head, planned, asked)})
    return rows


def sources(options: Namespace) -> Iterator[tuple[str, list[LayerTensors]]]:
    for num_tokens in options.recall_tokens:
        layers = recorded.recall_model_layers(num_tokens)
        yield f"recall model, {num_tokens:,} tokens", layers
    if options.model is not None:
        text = options.text.read_text()
        layers = recorded.model_layers(options.model, text, options.model_tokens)
        yield f"{options.model.name}, {options.model_tokens:,} tokens", layers


def main() -> None:
    parser = argument_parser(__doc__, rounds=1)
    parser.add_argument("--recall-tokens", type=int, nargs="*", default=[4096, 16_384, 32_760])
    parser.add_argument("--model", type=Path, help="a folder: also the heads of this model")
    parser.add_argument("--text", type=Path, help="what that model reads")
    parser.add_argument("--model-tokens", type=int, default=4096, help="of it (%(default)s)")
    parser.add_argument("--tests", type=int, default=64, help="tokens that ask (%(default)s)")
    parser.add_argument("--max-error", type=float, default=0.01, help="of plans (%(default)s)")
    options = parser.parse_args()
    if (options.model is None) != (options.text is None):
        parser.error("--model and --text are given together")
    result = Result.begin(__file__, __doc__, options)
    if options.smoke:
        options.recall_tokens, options.tests = [600], 4
    for name, layers in sources(options):
        for number, layer in enumerate(layers):
            rows = head_rows(ModelHead(layer, options.tests), options.max_error)
            title = f"{name}, layer {number}"
            result.add_table(title, rows)
            for row in rows:
                if row["index"].startswith("planned"):
                    what = f"{title}: error of the planned search, p99"
                    goal = Goal(what, row["error, p99"], 0.01, lower_is_better=True, unit="")
                    result.add_goal(goal)
                if "reachable" in row:
                    result.add_goal(Goal(f"{title}: reachable", row["reachable"], 1.0, unit=""))
    result.end(options)


if __name__ == "__main__":
    main()
