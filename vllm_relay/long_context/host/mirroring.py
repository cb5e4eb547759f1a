# SPDX-License-Identifier: Apache-2.0
"""Copies what a device computes for long requests to the host, without waiting for it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from vllm_relay.long_context.host.device_copies import DeviceCopies, PendingWrites
from vllm_relay.long_context.host.host_sequence import HostLayer
from vllm_relay.long_context.host.worker import MirroredRow

GATHERED_TOKENS = 4096
"""Of blocks that others have computed, so many are gathered at once, to bound the memory."""


def mirror(
    rows: Sequence[MirroredRow],
    layers: Sequence[HostLayer],
    layer_name: str,
    tokens: torch.Tensor,
    step: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    copies: DeviceCopies,
    writes: PendingWrites,
) -> None:
    """Begins to copy the step's keys and values to the host, and those before that are not there
    yet: of blocks that other requests have computed, and of a request that was short so far.

    No earlier write of the layer may be pending.

    Args:
        layers: of each row; what is copied to.
        tokens: int64 on the device: of all rows, one after the other.
        step: query, key and value of the step, [tokens, heads, size].
        kv_cache: [blocks, kv_heads, block_size, 2 * size], a token's key and then its value.
    """

    def add(states: torch.Tensor, write: functools.partial[None]) -> None:
        writes.add(layer_name, states.nbytes, copies.to_host(states), write)

    query, key, value = step
    for row, layer in zip(rows, layers, strict=True):
        for position, states in _states_of_blocks(row, layer.end, kv_cache):
            add(states, functools.partial(_write, layer, position, is_copied=True))
    states = torch.cat([each.index_select(0, tokens) for each in (key, value)], -1)
    add(states, functools.partial(_write_rows, list(zip(rows, layers, strict=True))))
    training = [
        (row, layer) for row, layer in zip(rows, layers, strict=True) if row.request.trains_indexes
    ]
    if training:
        queries = torch.cat([query[row.first_query : row.last_query] for row, _ in training])
        add(queries, functools.partial(_observe, training, key.shape[1]))


def _states_of_blocks(
    row: MirroredRow, end: int, kv_cache: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor]]:
    """The tokens from `end` on that were computed before the step: their position, and keys and
    values [tokens, kv_heads, 2 * size], gathered."""
    size = kv_cache.shape[2]
    while end < row.num_computed_tokens:
        first = end // size
        last = min(-(-row.num_computed_tokens // size), first + max(1, GATHERED_TOKENS // size))
        blocks = kv_cache.index_select(0, row.blocks[first:last].long())
        states = blocks.transpose(1, 2).flatten(0, 1)[end - first * size :]
        states = states[: row.num_computed_tokens - end].contiguous()
        yield end, states
        end += len(states)


def _write(
    layer: HostLayer, position: int, states: torch.Tensor, *, is_copied: bool = False
) -> None:
    layer.write(position, *states.chunk(2, -1), is_copied=is_copied)


def _write_rows(rows: list[tuple[MirroredRow, HostLayer]], states: torch.Tensor) -> None:
    counts = [row.num_queries for row, _ in rows]
    for (row, layer), part in zip(rows, states.split(counts), strict=True):
        _write(layer, row.num_computed_tokens, part)


def _observe(
    rows: list[tuple[MirroredRow, HostLayer]],
    num_kv_heads: int,
    queries: torch.Tensor,
) -> None:
    grouped = queries.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    parts = grouped.split([row.num_queries for row, _ in rows], 2)
    for (row, layer), part in zip(rows, parts, strict=True):
        layer.train_queries.add(part, first_position=row.num_computed_tokens)
