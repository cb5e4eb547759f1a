# SPDX-License-Identifier: Apache-2.0
"""vLLM's kernels over the nodes of a forest, beside their ordinary call for the tails.

A step takes one launch, which writes the block tables of both calls, and one copy where groups have
changed. A layer takes three more than it would: a copy of queries, the call for the nodes, and the
merge. Buffers stay where they are, so that CUDA graphs can be captured; in a graph, nodes
and tails are branches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import triton

from vllm_relay.attention_backends.cuda.copies import upload_into
from vllm_relay.attention_backends.cuda.flash.branch import Branch
from vllm_relay.attention_backends.cuda.flash.kernels import (
    gather_rows_kernel,
    merge_nodes_kernel,
    tables_kernel,
)
from vllm_relay.attention_backends.cuda.flash.nodes import (
    ENTRY_FIELDS,
    NODE_SPLITS,
    TOKENS,
    NodeBatch,
    NodeLimits,
    NodeSetup,
)

FlashAttention = Callable[..., Any]
"""vLLM's `flash_attn_varlen_func`."""

MERGE_HEADS = 8
TABLE_LANES = GATHER_LANES = 1024
GATHER_PROGRAMS = 512
ALIGNED = 4
"""int32 numbers: Triton compiles a variant of its own for arrays that begin elsewhere."""


@dataclass(frozen=True)
class NodeShapes:
    """What one step's call for nodes takes; all of it stays in a captured graph."""

    num_entries: int
    num_rows: int
    max_rows: int
    """Query tokens of one entry."""
    max_tokens: int
    """Of one entry."""

    @staticmethod
    def of(batch: NodeBatch) -> NodeShapes:
        """Those of a step that no graph has captured."""
        return NodeShapes(
            num_entries=len(batch.entries),
            num_rows=len(batch.rows),
            max_rows=int(np.diff(batch.row_starts).max(initial=0)),
            max_tokens=int(batch.entries[:, TOKENS].max(initial=0)),
        )

    @staticmethod
    def captured(limits: NodeLimits, num_tokens: int, max_tokens: int) -> NodeShapes:
        """Those of a graph, which any step of `num_tokens` query tokens replays.

        Args:
            max_tokens: of a request.
        """
        return NodeShapes(
            num_entries=limits.max_entries,
            num_rows=num_tokens * limits.max_states,
            max_rows=num_tokens,
            max_tokens=max_tokens,
        )


class NodeBuffers:
    """The batches of a step, where kernels read them.

    Args:
        max_blocks: of a request.
        lse_is_base_2: whether logarithms of sums are to base 2; else they are natural.
        has_branch: whether nodes and tails may run beside each other, as kernels that keep
            something in a workspace of their own may not.
    """

    def __init__(
        self,
        limits: NodeLimits,
        setup: NodeSetup,
        *,
        max_blocks: int,
        device: torch.device | str,
        lse_is_base_2: bool = False,
        has_branch: bool = True,
    ) -> None:
        self.limits, self.setup = limits, setup
        self.lse_unit = math.log(2) if lse_is_base_2 else 1.0
        self.branch = Branch(device if has_branch else "cpu")
        entries = limits.max_entries
        sizes = [entries * ENTRY_FIELDS, entries + 1, entries + 1, limits.max_rows]
        sizes = [-(-size // ALIGNED) * ALIGNED for size in (*sizes, limits.max_requests)]
        sizes.append(limits.max_tokens * limits.max_states)
        *self._begins, size = accumulate(sizes, initial=0)

        def int32(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._uploaded = int32(size)
        parts = list(self._uploaded.split(sizes))
        self.entries, self.row_starts, self.block_starts, self.rows, *parts = parts
        self.shared_tokens, states = parts
        self.states = states.fill_(-1).view(limits.max_tokens, limits.max_states)
        self.entry_lens = int32(entries)
        self.entry_table = int32(entries, max_blocks)
        # a semaphore, and four numbers of each entry, in fours
        self.schedule = int32(1 + 4 * -(-entries // 4) * 4)
        self.tail_lens = int32(limits.max_requests)
        self.tail_table = int32(limits.max_requests, max_blocks)

    def upload(self, batch: NodeBatch, num_tokens: int) -> None:
        """Take over a batch. Nothing waits for the copy.

        Args:
            num_tokens: of the step, with those behind the batch's that pad it.
        """
        _, row_starts, block_starts, rows, _, states = self._begins
        host = np.zeros(states + num_tokens * self.limits.max_states, np.int32)
        host[row_starts:block_starts] = batch.row_starts[-1]
        host[block_starts:rows] = batch.block_starts[-1]
        host[states:] = -1
        for begin, array in zip(self._begins, batch, strict=True):
            host[begin : begin + array.size] = array.ravel()
        upload_into(self._uploaded, host)

    def write_tables(
        self, block_table: torch.Tensor, seq_lens: torch.Tensor, num_entries: int
    ) -> None:
        """Write the block tables and lengths of the tails, and of so many entries.

        Args:
            block_table: int32 [requests, blocks].
            seq_lens: int32 [requests].
        """
        num_requests = len(seq_lens)
        tables_kernel[(num_requests + num_entries,)](
            block_table, seq_lens, self.entries, self.shared_tokens,
            self.tail_table, self.tail_lens, self.entry_table, self.entry_lens,
            num_requests, block_table.stride(0), self.tail_table.stride(0),
            BLOCK_SIZE=self.setup.block_size,
            LANES=TABLE_LANES,
        )  # fmt: skip

    def attend(
        self,
        flash_attention: FlashAttention,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        out: torch.Tensor,
        shapes: NodeShapes,
        *,
        query_start_loc: torch.Tensor,
        tails: Mapping[str, Any],
        nodes: Mapping[str, Any] = MappingProxyType({}),
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        """The attention of a step by FlashAttention: over the nodes, and over the tails.

        Args:
            query: [query tokens, heads, head_size].
            key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size].
            out: [query tokens, heads, head_size]: written.
            query_start_loc: int32 [requests + 1].
            tails, nodes: more arguments of the call for the tails, and of that for the nodes.
            sinks: [heads].
            options: of both calls.
        """
        num_entries, num_requests = shapes.num_entries, len(query_start_loc) - 1
        options = {"k": key_cache, "v": value_cache, "return_softmax_lse": True, **options}

        def attend_nodes(queries: torch.Tensor, entry_out: torch.Tensor) -> torch.Tensor:
            _, lse = flash_attention(
                q=queries,
                out=entry_out,
                cu_seqlens_q=self.row_starts[: num_entries + 1],
                max_seqlen_q=shapes.max_rows,
                seqused_k=self.entry_lens[:num_entries],
                max_seqlen_k=shapes.max_tokens,
                block_table=self.entry_table[:num_entries],
                causal=False,
                num_splits=NODE_SPLITS,
                **options,
                **nodes,
            )
            return lse

        def attend_tails() -> torch.Tensor:
            _, lse = flash_attention(
                q=query,
                out=out,
                cu_seqlens_q=query_start_loc,
                seqused_k=self.tail_lens[:num_requests],
                block_table=self.tail_table[:num_requests],
                causal=True,
                **options,
                **tails,
            )
            return lse

        self.attend_by(attend_nodes, attend_tails, query, out, shapes, sinks)

    def attend_by(
        self,
        attend_nodes: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        attend_tails: Callable[[], torch.Tensor],
        query: torch.Tensor,
        out: torch.Tensor,
        shapes: NodeShapes,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """The attention of a step by any kernels.

        Args:
            attend_nodes: of queries [rows, heads, head_size] writes the attention over their
                entries, as large, and returns float32 [heads, rows], logarithms of sums.
            attend_tails: writes `out`, and returns the same of query tokens.
            query, out: [query tokens, heads, head_size].
            sinks: [heads], which neither of them adds.
        """
        if not shapes.num_entries and sinks is None:
            attend_tails()
            return

        def asked_nodes() -> tuple[torch.Tensor, torch.Tensor]:
            # of its own, FlashAttention 4 would make it of the dtype of queries, which may be fp8
            entry_out = out.new_empty((shapes.num_rows, *out.shape[1:]))
            return entry_out, attend_nodes(self._queries(query, shapes.num_rows), entry_out)

        (entry_out, entry_lse), lse = self.branch.both(asked_nodes, attend_tails)
        self._merge(entry_out, entry_lse, out, lse, sinks)

    def _merge(
        self,
        entry_out: torch.Tensor,
        entry_lse: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        num_tokens, num_heads, head_size = out.shape
        heads = min(MERGE_HEADS, triton.next_power_of_2(num_heads))
        merge_nodes_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
            self.states, entry_out, entry_lse, out, lse, out if sinks is None else sinks,
            entry_lse.stride(0), lse.stride(0), out.stride(0), out.stride(1),
            NUM_HEADS=num_heads,
            HEAD_SIZE=head_size,
            HEADS=heads,
            PADDED_HEAD=triton.next_power_of_2(head_size),
            MAX_STATES=self.limits.max_states,
            HAS_SINKS=sinks is not None,
            LSE_UNIT=self.lse_unit,
        )  # fmt: skip

    def warm_up(
        self,
        num_heads: int,
        head_size: int,
        *,
        dtype: torch.dtype,
        query_dtype: torch.dtype,
        sinks_dtype: torch.dtype | None,
    ) -> None:
        """Compile all kernels for layers of this kind: calls of nothing, which launch nothing."""
        out = torch.empty((0, num_heads, head_size), dtype=dtype, device=self.rows.device)
        lse = out.new_empty((num_heads, 0), dtype=torch.float32)
        sinks = None if sinks_dtype is None else out.new_zeros(num_heads, dtype=sinks_dtype)
        self.write_tables(self.tail_table[:0], self.tail_lens[:0], 0)
        self._queries(out.to(query_dtype), 0)
        self._merge(out, lse, out, lse, sinks)

    def _queries(self, query: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Those of all entries: [rows, heads, head_size]."""
        # not every GPU can load fp8
        flat = (query.view(torch.uint8) if query.dtype.itemsize == 1 else query).flatten(1)
        queries = flat.new_empty((num_rows, flat.shape[1]))
        gather_rows_kernel[(min(num_rows, GATHER_PROGRAMS),)](
            self.rows, self.row_starts[-1:], flat, queries, flat.stride(0),
            NUMBERS=flat.shape[1],
            LANES=min(GATHER_LANES, triton.next_power_of_2(flat.shape[1])),
        )  # fmt: skip
        return queries.view(query.dtype).view(-1, *query.shape[1:])
