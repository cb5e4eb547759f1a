# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a running request in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_relay import _C
from vllm_relay.sparse.attention import SparseLayer
from vllm_relay.sparse.elements import DTYPES, Elements
from vllm_relay.sparse.flat import FlatIndex
from vllm_relay.sparse.query_types import QueryType
from vllm_relay.sparse.train_queries import TrainQueries

GRANULE_TOKENS = 1024
"""Fewer tokens than this at the end are attended one by one, without an index."""
GRANULES_PER_SEGMENT = 8
TRAIN_QUERIES_PER_KEY = 0.4


@dataclass(eq=False)
class Segment:
    """An index over the positions `begin` to `end` of a request."""

    begin: int
    end: int
    layer: SparseLayer
    _asked: QueryType | None = None
    _native: Any = None

    def native(self, query: QueryType | None) -> Any:
        """What the C++ side is told of a search."""
        if self._native is None or query != self._asked:
            queries = [query] * len(self.layer.indexes)
            self._native = self.layer.native_search(queries, 0, self.end - self.begin)
            self._asked = query
        return self._native


class HostLayer:
    """One layer of a request: keys and values of the tokens from `begin` on, by position.

    Attributes:
        begin: of the request; the tokens before it belong to a stored context.
        end: tokens up to here are written.
        keys, values: [kv_heads, capacity, size], of position `begin` and after. Memory is taken
            when it is first written.
        segments: adjacent, in order.
        train_queries: that its keys have met, of a request that becomes a context.
        native: keys and values, as the C++ side has them.
    """

    def __init__(
        self, begin: int, capacity: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
    ) -> None:
        self.begin = self.end = begin
        self.keys = torch.empty(num_kv_heads, capacity, head_size, dtype=dtype)
        self.values = torch.empty_like(self.keys)
        self.segments: list[Segment] = []
        self.train_queries = TrainQueries(TRAIN_QUERIES_PER_KEY)
        dtype_code = DTYPES.index(str(dtype).removeprefix("torch."))
        self.native = _C.host.HostRows(_bits(self.keys), _bits(self.values), dtype_code)

    def write(self, position: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Args: keys, values: [tokens, kv_heads, size], of `position` and after."""
        if position < self.end:
            self._truncate(position)
        first = position - self.begin
        last = first + keys.shape[0]
        self.keys[:, first:last] = keys.transpose(0, 1)
        self.values[:, first:last] = values.transpose(0, 1)
        self.end = position + keys.shape[0]

    def _truncate(self, end: int) -> None:
        """The request began again, or tokens of it were rejected."""
        self.end = end
        self.segments = [segment for segment in self.segments if segment.end <= end]

    def rows(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the positions `begin` to `end`: [kv_heads, tokens, size], views."""
        first, last = begin - self.begin, end - self.begin
        return self.keys[:, first:last], self.values[:, first:last]

    def index_up_to(self, begin: int, end: int) -> int:
        """Indexes positions from `begin` on; returns up to where, at most to `end`: `begin` if that
        is not before it.

        What is indexed depends on positions only, not on when this is called.
        """
        num_granules = max(0, end - begin) // GRANULE_TOKENS
        # the last segment is small: what is built again as tokens are generated
        num_large = num_granules // GRANULES_PER_SEGMENT * GRANULES_PER_SEGMENT
        large_end = begin + num_large * GRANULE_TOKENS
        indexed_end = begin + num_granules * GRANULE_TOKENS
        known = {(segment.begin, segment.end): segment for segment in self.segments}
        self.segments = [
            known.get((first, last)) or self._flat(first, last)
            for first, last in ((begin, large_end), (large_end, indexed_end))
            if first < last
        ]
        return indexed_end

    def _flat(self, begin: int, end: int) -> Segment:
        keys, values = self.rows(begin, end)
        # not as many as the cores this thread may use: vLLM binds it to one of them
        threads = torch.get_num_threads()
        indexes = [FlatIndex().build(as_elements_of(head), threads=threads) for head in keys]
        return Segment(begin, end, SparseLayer(indexes, [as_elements_of(head) for head in values]))


class HostSequence:
    """All layers of a request. Layers are made when they are first written."""

    def __init__(self, begin: int, capacity: int) -> None:
        self.begin, self.capacity = begin, capacity
        self.layers: dict[str, HostLayer] = {}

    def layer(self, name: str, keys: torch.Tensor) -> HostLayer:
        """Args: keys: [tokens, kv_heads, size], of the layer."""
        if name not in self.layers:
            _, num_kv_heads, head_size = keys.shape
            self.layers[name] = HostLayer(
                self.begin, self.capacity, num_kv_heads, head_size, keys.dtype
            )
        return self.layers[name]


def as_elements_of(states: torch.Tensor) -> Elements:
    """[tokens, size], where it lies."""
    return Elements(_bits(states), str(states.dtype).removeprefix("torch."))


def _bits(states: torch.Tensor) -> np.ndarray:
    """Where it lies; numpy has no bfloat16."""
    if states.dtype == torch.float32:
        return states.numpy()
    return states.view(torch.int16).numpy().view(np.uint16)
