# SPDX-License-Identifier: Apache-2.0
"""Keys and values that somebody else computed, checked and copied."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from vllm_relay.sparse.contexts.train_queries import TrainQueries
from vllm_relay.sparse.index.elements import DTYPES, Elements, check_finite, copied_elements

# [layer][kv head]: keys and values, [tokens, size]
LayerElements = list[list[tuple[Elements, Elements]]]


def read_kv_cache(kv_cache: Any, num_tokens: int) -> LayerElements:
    """Copies a cache.

    Args:
        kv_cache: a transformers `DynamicCache`, or for each layer (keys, values), tensors
            [1, kv_heads, tokens, size].
        num_tokens: how many tokens it must hold.

    Raises:
        ValueError: something does not fit; names the layer.
    """
    layers = [
        _read_layer(f"kv_cache, layer {i}", keys, values, num_tokens)
        for i, (keys, values) in enumerate(_layers_of(kv_cache))
    ]
    if not layers:
        raise ValueError("kv_cache: holds no layers, expected the cache of a whole prefill")
    shapes = [
        (len(heads), *(part.shape[1] for part in heads[0]), heads[0][0].dtype) for heads in layers
    ]
    for i, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"kv_cache: layer {i} has (kv heads, head size, value size, dtype) {shape}, "
                f"layer 0 has {shapes[0]}; expected the same in all layers"
            )
    return layers


def _read_layer(
    name: str, keys: torch.Tensor, values: torch.Tensor, num_tokens: int
) -> list[tuple[Elements, Elements]]:
    """(keys, values) of every kv head of one layer."""
    for part, states in (("keys", keys), ("values", values)):
        if not isinstance(states, torch.Tensor) or states.dim() != 4 or states.shape[0] != 1:
            given = list(states.shape) if isinstance(states, torch.Tensor) else type(states)
            raise ValueError(f"{name}: {part} are {given}, expected [1, kv_heads, tokens, size]")
        if 0 in (states.shape[1], states.shape[3]):
            raise ValueError(
                f"{name}: {part} are {list(states.shape)}, expected at least one kv head and "
                "a size of at least 1"
            )
        if str(states.dtype).removeprefix("torch.") not in DTYPES:
            raise ValueError(f"{name}: {part} are {states.dtype}, expected {', '.join(DTYPES)}")
        if states.shape[2] != num_tokens:
            raise ValueError(
                f"{name}: {part} of {states.shape[2]} tokens for {num_tokens} token ids: give the "
                "ids of exactly the tokens that were computed (the last generated one is not), "
                "and a cache that keeps all of them (sliding-window layers drop the oldest)"
            )
    if keys.shape[1] != values.shape[1] or keys.dtype != values.dtype:
        raise ValueError(
            f"{name}: keys of {keys.shape[1]} kv heads in {keys.dtype}, values of "
            f"{values.shape[1]} in {values.dtype}; expected the same"
        )
    return [
        (copied_elements(name, keys[0, head]), copied_elements(name, values[0, head]))
        for head in range(keys.shape[1])
    ]


def check_layer(layer: int, heads: list[tuple[Elements, Elements]]) -> None:
    """Raises ValueError: a key or value is not finite; names its place."""
    for head, (keys, values) in enumerate(heads):
        check_finite(f"layer {layer}, kv head {head}: keys", keys)
        check_finite(f"layer {layer}, kv head {head}: values", values)


def read_queries(
    queries: Sequence[Any] | None, layers: LayerElements, limit: int
) -> list[list[Elements | None]]:
    """Samples at most `limit` training queries for each layer and kv head, evenly over tokens and
    over the query heads of the group. They are kept in the dtype of the keys.

    Args:
        queries: for each layer a tensor [heads, tokens, head_size], or None.

    Raises:
        ValueError: a wrong number of layers, a shape that does not fit the keys, no floating
            numbers, or some that are not finite in the dtype of the keys.
    """
    if queries is None:
        return [[None] * len(heads) for heads in layers]
    if not hasattr(queries, "__len__"):
        raise ValueError(
            f"queries: given {type(queries).__name__}, expected a tensor for each layer, or None"
        )
    if len(queries) != len(layers):
        raise ValueError(f"queries: of {len(queries)} layers, expected {len(layers)}")
    return [
        _sample(f"queries, layer {i}", layer, heads, limit)
        for i, (layer, heads) in enumerate(zip(queries, layers, strict=True))
    ]


def _sample(
    name: str, queries: torch.Tensor, heads: list[tuple[Elements, Elements]], limit: int
) -> list[Elements | None]:
    head_size = heads[0][0].shape[1]
    num_kv_heads = len(heads)
    if (
        not isinstance(queries, torch.Tensor)
        or queries.dim() != 3
        or queries.shape[2] != head_size
        or queries.shape[0] % num_kv_heads
    ):
        given = list(queries.shape) if isinstance(queries, torch.Tensor) else type(queries)
        raise ValueError(
            f"{name}: {given}, expected [heads, tokens, {head_size}] with a multiple of "
            f"{num_kv_heads} heads"
        )
    num_tokens = queries.shape[1]
    if limit == 0 or num_tokens == 0:
        return [None] * num_kv_heads
    grouped = queries.unflatten(0, (num_kv_heads, -1))
    chosen = TrainQueries(min(Fraction(limit, num_tokens), grouped.shape[1]))
    chosen.add(grouped, first_position=0)
    rows = chosen.sample()
    assert rows is not None
    sample = [copied_elements(name, each, heads[0][0].dtype) for each in rows]
    for head, elements in enumerate(sample):
        check_finite(f"{name}, kv head {head}", elements)
    return list(sample)


def _layers_of(kv_cache: Any) -> list[tuple[Any, Any]]:
    if hasattr(kv_cache, "layers"):
        pairs = [(layer.keys, layer.values) for layer in kv_cache.layers]
    else:
        try:
            pairs = [(layer[0], layer[1]) for layer in kv_cache]
        except (TypeError, IndexError):
            raise ValueError(
                f"kv_cache: given {type(kv_cache).__name__}, expected a DynamicCache or (keys, "
                "values) for each layer"
            ) from None
    return pairs
