# SPDX-License-Identifier: Apache-2.0
"""Prompts attended from packed tokens, in a cache that requests use one after the other."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from vllm_relay.attention_backends.sparse import cpu as sparse
from vllm_relay.long_context.host.host_attention import HostPart
from vllm_relay.long_context.host.host_sequence import HostLayer, SequencePlace
from vllm_relay.long_context.host.worker import LongContextWorker
from vllm_relay.long_context.window import Residency

KV_HEADS, GROUP, SIZE, QUERIES = 2, 2, 64, 70


def part_of(num_tokens: int, seed: int, dtype: torch.dtype) -> HostPart:
    layer = HostLayer(SequencePlace(0, 400, 32, 70, 0), KV_HEADS, SIZE, dtype)
    generator = torch.Generator().manual_seed(seed)
    layer.write(0, *torch.randn(2, num_tokens, KV_HEADS, SIZE, generator=generator).to(dtype))
    return HostPart(layer, None, 0, Residency(32, 200), num_tokens)


def attend(worker: LongContextWorker, part: HostPart) -> torch.Tensor:
    impl = SimpleNamespace(
        num_heads=KV_HEADS * GROUP, num_kv_heads=KV_HEADS, scale=0.125, kernel_choice="auto"
    )
    row = SimpleNamespace(
        worker=worker, num_tokens=part.num_tokens, num_queries=QUERIES, packed_plan=None
    )
    query = torch.randn(QUERIES, impl.num_heads, SIZE, generator=torch.Generator().manual_seed(9))
    query = query.to(part.own.keys.dtype)
    output = torch.full_like(query, math.nan)
    sparse.RelaySparseImpl._attend_packed(impl, row, part, query, output)
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_request_does_not_see_what_the_one_before_it_left(
    number: float, dtype: torch.dtype
) -> None:
    healthy, broken = part_of(290, 1, dtype), part_of(384, 2, dtype)
    worker = LongContextWorker()
    expected = attend(worker, healthy)
    assert expected.isfinite().all()
    broken.own.keys[:] = number
    broken.own.values[:] = number
    assert not attend(worker, broken).isfinite().any()
    assert torch.equal(attend(worker, healthy), expected)
