# SPDX-License-Identifier: Apache-2.0
"""Attention over what the indexes of a layer find, and its merging, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.sparse.key_sets import key_set
from tests.support import reference
from vllm_relay.sparse import BlockIndex, CoarseIndex, Dipr, FlatIndex, GraphIndex, TopK
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import DTYPES, Elements, from_float32
from vllm_relay.sparse.index.query_types import QueryType
from vllm_relay.sparse.index.sparse_layer import AttentionState, SparseLayer, attend, merge_states

KV_HEADS, GROUP = 3, 4
NAN_BITS = 0x7FFF  # of float16 and of bfloat16
FLOAT_ULP = 2.0**-24
QUERIES: tuple[QueryType, ...] = (
    TopK(1),
    TopK(50, width=200),
    Dipr(alpha=0.05),
    Dipr(beta=2.0),
    TopK(5, max_dropped_mass=0.2),
    Dipr(beta=3.0, max_dropped_mass=1.0),
)

each_index = pytest.mark.parametrize(
    "index_class",
    [FlatIndex, BlockIndex, CoarseIndex, GraphIndex],
    ids=lambda index_class: index_class.kind,
)


def make_layer(
    index_class: type[CompiledIndex],
    num_keys: int,
    head_size: int,
    value_size: int,
    dtype: str = "float32",
) -> tuple[SparseLayer, np.ndarray]:
    """A layer of different heads, and queries [kv_heads, group, head_size]."""
    rng = np.random.default_rng([num_keys, head_size, value_size])
    sets = [key_set(kind, num_keys, head_size) for kind in ("random", "flat", "hubs")]
    indexes = [
        index_class().build(from_float32(each.keys, dtype), each.train, threads=1) for each in sets
    ]
    values = [
        from_float32(rng.standard_normal((num_keys, value_size)), dtype) for _ in range(KV_HEADS)
    ]
    return SparseLayer(indexes, values), np.stack([each.queries[:GROUP] for each in sets])


def with_nan_elsewhere(values: Elements, ids: list[np.ndarray]) -> Elements:
    """The same values in the rows `ids`; nobody may read the others."""
    data = np.full_like(values.data, np.nan if values.dtype == "float32" else NAN_BITS)
    seen = np.unique(np.concatenate(ids))
    data[seen] = values.data[seen]
    return Elements(data, values.dtype)


def assert_close(state: AttentionState, output: np.ndarray, lse: np.ndarray) -> None:
    assert state.output.dtype == state.lse.dtype == np.float32
    # a weight is off by as much as its exponent was rounded, which is about as large as the lse
    largest = np.abs(lse, where=np.isfinite(lse), out=np.zeros_like(lse)).max(initial=0)
    np.testing.assert_allclose(state.output, output, rtol=0, atol=16 * FLOAT_ULP * (1 + largest))
    np.testing.assert_allclose(state.lse, lse, rtol=16 * FLOAT_ULP, atol=16 * FLOAT_ULP)


@each_index
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 16, 1), (63, 33, 63), (1000, 64, 100)], ids=str)
def test_a_layer_attends_what_its_indexes_find(
    index_class: type[CompiledIndex], dtype: str, sizes: tuple[int, int, int]
) -> None:
    layer, queries = make_layer(index_class, *sizes, dtype)
    whole_values = layer.values
    n = layer.num_keys
    window = (queries.max(axis=2) * 3).astype(np.float32)
    cases: list[dict[str, Any]] = [
        {},
        {"begin": n // 7, "prefix_len": n - n // 5},
        {"begin": 4, "window_max": window},
        {"prefix_len": n // 2, "scale": 0.3},
        {"prefix_len": 0},
        {"begin": n},
    ]
    for query in QUERIES:
        for case in cases:
            scale = case.get("scale")
            # what is dropped is bounded by the scale of the softmax, whatever the query says
            asked = query if query.max_dropped_mass is None else replace(query, scale=scale)
            limits = {key: value for key, value in case.items() if key in ("begin", "prefix_len")}
            results = [
                index.search(
                    queries[h], asked, **limits,
                    window_max=case["window_max"][h] if "window_max" in case else None,
                )
                for h, index in enumerate(layer.indexes)
            ]  # fmt: skip
            layer.values = [
                with_nan_elsewhere(values, result.ids)
                for values, result in zip(whole_values, results, strict=True)
            ]
            state, stats = layer.attend(queries, query, **case, threads=1 + len(case))
            for h, result in enumerate(results):
                keys, values = layer.indexes[h].keys.to_float32(), whole_values[h].to_float32()
                wanted = reference.attend(queries[h], keys, values, result.ids, scale=scale)
                assert_close(AttentionState(state.output[h], state.lse[h]), *wanted)
            costs = [result.stats for result in results]
            found = sum(len(ids) for result in results for ids in result.ids)
            assert stats.distances == sum(cost.distances for cost in costs)
            assert stats.hops == sum(cost.hops for cost in costs)
            row_bytes = whole_values[0].data[0].nbytes
            assert stats.bytes == sum(cost.bytes for cost in costs) + found * row_bytes
            if query.max_dropped_mass is None:
                assert stats.dropped_mass is None
            else:
                told = np.stack([cost.dropped_mass for cost in costs])
                np.testing.assert_array_equal(stats.dropped_mass, told)


@each_index
def test_a_layer_does_not_depend_on_threads(index_class: type[CompiledIndex]) -> None:
    layer, queries = make_layer(index_class, 500, 32, 32)
    expected, costs = layer.attend(queries, TopK(20), threads=1)
    for threads in (2, 3, 8):
        state, stats = layer.attend(queries, TopK(20), threads=threads)
        np.testing.assert_array_equal(state.output, expected.output)
        np.testing.assert_array_equal(state.lse, expected.lse)
        assert stats == costs


@pytest.mark.parametrize("dtype", DTYPES)
def test_chosen_keys_are_attended_where_they_lie(dtype: str) -> None:
    rng = np.random.default_rng(0)
    keys = from_float32(rng.standard_normal((100, 63)), dtype)
    values = from_float32(rng.standard_normal((100, 33)), dtype)
    queries = rng.standard_normal((4, 63)).astype(np.float32)
    ids = [np.array(each, np.int32) for each in ([], [99], [3, 50, 1], [*range(0, 100, 2)])]
    for scale in (None, 0.5):
        state = attend(
            queries, with_nan_elsewhere(keys, ids), with_nan_elsewhere(values, ids), ids, scale
        )
        wanted = reference.attend(queries, keys.to_float32(), values.to_float32(), ids, scale=scale)
        assert_close(state, *wanted)
    assert not state.output[0].any() and state.lse[0] == -np.inf


def test_merged_parts_are_the_attention_of_the_whole() -> None:
    """The window's part, what an index found between, and a part without keys for some."""
    rng = np.random.default_rng(1)
    keys, values = (
        Elements(rng.standard_normal((100, size)).astype(np.float32), "float32")
        for size in (64, 33)
    )
    queries = (3 * rng.standard_normal((4, 64))).astype(np.float32)
    window = np.r_[:4, 92:100].astype(np.int32)
    between = np.arange(4, 92, dtype=np.int32)
    found = [between[:0], between[:1], rng.permutation(between)[:30], between]
    none = [between[:0]] * 4
    states = [attend(queries, keys, values, ids) for ids in (none, [window] * 4, found)]
    together = [np.concatenate([window, ids]) for ids in found]
    wanted = reference.attend(queries, keys.data, values.data, together)
    for order in (states, states[::-1], [states[1], merge_states([states[2], states[0]])]):
        assert_close(merge_states(order), *wanted)
    assert_close(merge_states([states[2]]), states[2].output, states[2].lse)


def test_merged_parts_without_keys_have_none() -> None:
    nothing = AttentionState(np.zeros((2, 3, 5), np.float32), np.full((2, 3), -np.inf, np.float32))
    merged = merge_states([nothing, nothing])
    assert merged.output.shape == (2, 3, 5) and not merged.output.any()
    assert (merged.lse == -np.inf).all()


def test_merging_bears_any_size_of_scores() -> None:
    outputs = np.array([[1.0], [5.0]], np.float32)
    low, high = (AttentionState(outputs[i : i + 1], np.array([lse], np.float32))
                 for i, lse in enumerate((-1e4, 1e4)))  # fmt: skip
    merged = merge_states([low, high])
    assert (merged.output, merged.lse) == (5.0, 1e4)
    even = merge_states([AttentionState(each[None], high.lse) for each in outputs])
    assert even.output == 3.0 and even.lse == pytest.approx(1e4 + np.log(2))


def test_layers_that_do_not_fit_are_refused() -> None:
    layer, queries = make_layer(FlatIndex, 63, 16, 8)
    values = [np.zeros((63, 8), np.float32)] * KV_HEADS
    for indexes, given, message in (
        ([], [], "0 indexes and 0 arrays"),
        (layer.indexes, values[:2], "3 indexes and 2 arrays"),
        (layer.indexes, [*values[:2], values[0][:, :4]], "the same for all kv heads"),
        (layer.indexes, [each[:50] for each in values], "the same for all kv heads"),
    ):
        with pytest.raises(ValueError, match=message):
            SparseLayer(indexes, given)
    with pytest.raises(ValueError, match="of 2 kv heads, expected 3"):
        layer.attend(queries[:2], TopK(3))
    with pytest.raises(ValueError, match="window_max: shape"):
        layer.attend(queries, TopK(3), window_max=np.zeros(GROUP))
    with pytest.raises(ValueError, match="scale is 0"):
        layer.attend(queries, TopK(3), scale=0)


@each_index
def test_each_kv_head_has_a_query_of_its_own(index_class: type[CompiledIndex]) -> None:
    layer, queries = make_layer(index_class, 300, 32, 20)
    asked: list[QueryType | None] = [TopK(7), None, Dipr(beta=1.0, max_dropped_mass=0.3)]
    state, stats = layer.attend(queries, asked, begin=10, prefix_len=250)
    retrieved = 0
    for head, query in enumerate(asked):
        index = layer.indexes[head]
        if query is None:
            ids = [np.arange(10, 250, dtype=np.int32)] * GROUP
        else:
            ids = index.search(queries[head], query, begin=10, prefix_len=250).ids
        retrieved += len(np.unique(np.concatenate(ids)))
        alone = attend(queries[head], index.keys, layer.values[head], ids)
        assert np.array_equal(state.output[head], alone.output)
        assert np.array_equal(state.lse[head], alone.lse)
    assert stats.retrieved_tokens == retrieved
    assert np.isnan(stats.dropped_mass[0]).all() and (stats.dropped_mass[1] == 0).all()
    assert (stats.dropped_mass[2] <= 0.3).all()
    with pytest.raises(ValueError, match="query: 2 of them, expected one or 3"):
        layer.attend(queries, asked[:2])
