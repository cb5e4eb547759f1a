# SPDX-License-Identifier: Apache-2.0
"""Attention over keys and values that lie token after token, by the kernels for KV caches.

Each segment is packed in a core's cache as a KV cache has it, once for all queries that read it,
and results are those of a KV cache with the same tokens, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_relay import _C
from vllm_relay.attention_backends.cpu.kernels import DTYPE_CODES, kernel_for
from vllm_relay.attention_backends.cpu.unpacked_plan import plan_unpacked


@dataclass(frozen=True)
class TokenRun:
    """Tokens `begin` to `end` of a sequence.

    Attributes:
        keys, values: of each kv head, [tokens, head_size], contiguous, from token `begin` on; the
            dtype of the queries.
    """

    begin: int
    end: int
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]

    @property
    def addresses(self) -> list[tuple[int, int]]:
        pairs = zip(self.keys, self.values, strict=True)
        return [(keys.data_ptr(), values.data_ptr()) for keys, values in pairs]


@dataclass(frozen=True)
class UnpackedRequest:
    """Query tokens of one sequence.

    Attributes:
        first_query, num_queries: rows of the query tensor.
        begin, end: the tokens that are read.
        runs: in token order, without gaps from `begin` to `end`.
        is_causal: the last query token sees all of them, each one before it a token less; else
            each sees all.
    """

    first_query: int
    num_queries: int
    begin: int
    end: int
    runs: Sequence[TokenRun]
    is_causal: bool


def unpacked_attention(
    query: torch.Tensor,
    requests: Sequence[UnpackedRequest],
    output: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scale: float,
    num_kv_heads: int,
    kernel: str = "auto",
) -> None:
    """Writes the rows of the requests' query tokens.

    Tokens that requests read from the same memory are read once for those that one thread serves.
    The result of a request depends neither on the others nor on the number of threads.

    Args:
        query: [tokens, heads, head_size].
        output: like `query`; also float32.
        lse: float32 [tokens, heads], contiguous: the natural logarithm of the softmax denominator.
            Where nothing is read, output is 0 and lse -inf.
        kernel: one of `_C.supported_kernels()`; "auto" for the fastest.
    """
    requests = [request for request in requests if request.num_queries]
    if not requests:
        return
    num_tokens, num_heads, head_size = query.shape
    num_threads = torch.get_num_threads()
    plan = plan_unpacked(
        [request.num_queries for request in requests],
        [request.begin for request in requests],
        [request.end for request in requests],
        group_size=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        num_threads=num_threads,
    )
    table: list[tuple[int, ...]] = []
    runs: list[TokenRun] = []
    for each in requests:
        first_run = len(runs)
        runs += each.runs
        table.append(
            (each.first_query, each.num_queries, each.begin, max(each.begin, each.end),
             each.is_causal, first_run, len(runs))
        )  # fmt: skip
    _C.unpacked_attention(
        kernel_for(query.dtype, kernel),
        np.array(table, np.int32),
        np.array([(run.begin, run.end) for run in runs], np.int32).reshape(-1, 2),
        np.array([run.addresses for run in runs], np.uint64).reshape(-1, num_kv_heads, 2),
        plan.blocks, plan.items, plan.max_item_rows, plan.num_segments, plan.splits_segments,
        num_threads, DTYPE_CODES[query.dtype], num_heads, num_kv_heads, head_size,
        query.data_ptr(), query.stride(0), query.stride(1),
        output.data_ptr(), output.stride(0), output.stride(1), output.dtype == torch.float32,
        0 if lse is None else lse.data_ptr(), scale,
    )  # fmt: skip
