# SPDX-License-Identifier: Apache-2.0
"""Attention of a step's queries over tokens in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_relay.long_context.host_sequence import HostLayer
from vllm_relay.long_context.window import Residency
from vllm_relay.sparse.partial_attention import attention_state, merge
from vllm_relay.sparse.query_types import Dipr, QueryType

State = tuple[torch.Tensor, torch.Tensor]
"""Output float32 [kv_heads, rows, size] and log-sum-exp float32 [kv_heads, rows]."""


@dataclass(frozen=True)
class Retrieval:
    """What a decoded token reads of the tokens in host memory.

    Attributes:
        alpha: those with at least this share of the largest attention weight; 0: all.
        max_dropped_mass: the most attention weight that may be left out; None: as alpha says.
    """

    alpha: float
    max_dropped_mass: float | None = None

    def query_type(self, scale: float) -> QueryType | None:
        """None to read everything."""
        if self.alpha == 0:
            return None
        return Dipr(alpha=self.alpha, scale=scale, max_dropped_mass=self.max_dropped_mass)


def attend_host(
    layer: HostLayer,
    residency: Residency,
    query: torch.Tensor,
    num_tokens: int,
    scale: float,
    retrieval: Retrieval,
) -> State:
    """Attention over the tokens that have left the device.

    Several query tokens read all of them; one reads what `retrieval` says.

    Args:
        query: [tokens, heads, head_size], of one request.
        num_tokens: of the request, those of the step included; all are in `layer`.

    Returns:
        output float32 [tokens, heads, head_size] and log-sum-exp float32 [tokens, heads].
    """
    num_queries, num_heads, _ = query.shape
    num_kv_heads = layer.keys.shape[0]
    # [kv_heads, group * tokens, size]
    grouped = query.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    rows = grouped.flatten(1, 2)
    query_type = retrieval.query_type(scale) if num_queries == 1 else None
    begin, end = residency
    if query_type is None:
        state = attention_state(rows, *layer.rows(begin, end), scale)
    else:
        state = _retrieve(layer, residency, rows, num_tokens, scale, query_type)
    output, lse = (part.unflatten(1, (-1, num_queries)) for part in state)
    return output.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2)


def _retrieve(
    layer: HostLayer,
    residency: Residency,
    rows: torch.Tensor,
    num_tokens: int,
    scale: float,
    query_type: QueryType,
) -> State:
    begin, end = residency
    indexed = layer.index_up_to(begin, end)
    state = attention_state(rows, *layer.rows(indexed, end), scale)
    window_max = _largest_products(layer, rows, [(0, begin), (indexed, num_tokens)])
    queries, tops = rows.float().numpy(), window_max.numpy()
    for _, _, segment in layer.segments:
        found, _ = segment.attend(queries, query_type, scale=scale, window_max=tops)
        state = merge(state, (torch.from_numpy(found.output), torch.from_numpy(found.lse)))
    return state


def _largest_products(
    layer: HostLayer, rows: torch.Tensor, ranges: list[tuple[int, int]]
) -> torch.Tensor:
    """[kv_heads, rows]; of the keys that are read anyway."""
    largest = torch.full(rows.shape[:2], -torch.inf)
    for begin, end in ranges:
        if begin < end:
            keys, _ = layer.rows(begin, end)
            products = rows @ keys.transpose(1, 2)
            largest = torch.maximum(largest, products.amax(-1).float())
    return largest
