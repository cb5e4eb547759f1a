# SPDX-License-Identifier: Apache-2.0
"""A request that has ended, as a context: read by what was encoded while it ran, until indexes over
all of its tokens are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_relay.long_context.host.host_sequence import HostLayer, HostSequence
from vllm_relay.sparse.contexts.context_store import (
    ContextShape,
    Parent,
    StoredContext,
    context_id_of,
)
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import Elements, copied_elements, elements_of
from vllm_relay.sparse.index.key_codes import row_bytes
from vllm_relay.sparse.index.sparse_layer import MEAN_TOKENS, SparseLayer, sparse_layer


class SequenceContext(StoredContext):
    """The first `len(tokens)` tokens of a request.

    Args:
        tokens: int64 [n].
        sequence: has all of them that are not the parent's.
        layer_names: of the model, in order.
        parent: what the request began behind.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        sequence: HostSequence,
        layer_names: Sequence[str],
        parent: Parent | None = None,
    ) -> None:
        self.id = context_id_of(tokens)
        self.tokens = tokens
        self.parent = parent
        self._layers: list[HostLayer] = [sequence.layers[name] for name in layer_names]
        keys = self._layers[0].keys
        self.shape = ContextShape(
            num_layers=len(self._layers),
            num_kv_heads=keys.shape[0],
            head_size=keys.shape[2],
            value_size=keys.shape[2],
            dtype=str(keys.dtype).removeprefix("torch."),
        )
        self._whole: dict[int, SparseLayer] = {}

    @property
    def num_bytes(self) -> int:
        """With the codes of its keys, which are there as soon as it is read or indexed."""
        shape, size = self.shape, self._layers[0].keys.element_size()
        states = (shape.head_size + shape.value_size) * size + row_bytes(shape.head_size)
        means = -(-shape.value_size * size // MEAN_TOKENS)
        return shape.num_layers * self._num_own_tokens * shape.num_kv_heads * (states + means)

    @property
    def _num_own_tokens(self) -> int:
        return self.num_tokens - self.own_begin

    def own_rows(self, layer: int, head: int, begin: int, end: int) -> tuple[Elements, Elements]:
        first = self.own_begin
        keys, values = self._layers[layer].rows(first + begin, first + end)
        return elements_of(keys[head]), elements_of(values[head])

    def pieces(self, layer: int) -> list[tuple[int, SparseLayer]]:
        if layer in self._whole:
            return [(0, self._whole[layer])]
        pieces, first = [], self.own_begin
        at = first
        segments = list(self._layers[layer].segments.values())
        # granules may still be there beside the segment that they have become
        for each in sorted(segments, key=lambda each: (each.begin, -each.end)):
            if each.layer is not None and at <= each.begin and each.end <= self.num_tokens:
                pieces.append((each.begin - first, each.layer))
                at = each.end
        return pieces

    def native_rows(self, layer: int) -> Any:
        return self._layers[layer].native

    def take_flat(self, layer: int, indexes: Sequence[CompiledIndex]) -> None:
        """Indexes of a layer, which take the place of what was encoded before."""
        heads = range(self.shape.num_kv_heads)
        values = [self.own_rows(layer, head, 0, self._num_own_tokens)[1] for head in heads]
        whole = sparse_layer(indexes, values)
        assert whole is not None
        self._whole[layer] = whole
        self._layers[layer].segments = {}

    def train_queries(self, layer: int, head: int) -> Elements | None:
        sample = self._layers[layer].train_queries.sample()
        if sample is None:
            return None
        return copied_elements("queries", sample[head], self.shape.dtype)

    def last_queries(self, layer: int, head: int) -> np.ndarray | None:
        """float32 [tokens, group, head_size], of the last tokens."""
        last = self._layers[layer].train_queries.last()
        return None if last is None else last[head].float().numpy()

    def group_size(self, layer: int) -> int:
        """Query heads that share a kv head."""
        return self._layers[layer].train_queries.group
