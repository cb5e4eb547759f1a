# SPDX-License-Identifier: Apache-2.0
"""Attention of requests that go on behind a stored context, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_relay.long_context.host import host_attention
from vllm_relay.long_context.host.host_attention import (
    HostPart,
    Retrieval,
    attend_everything,
    attend_retrieved,
)
from vllm_relay.long_context.host.host_sequence import HostLayer, SequencePlace
from vllm_relay.long_context.window import Residency
from vllm_relay.sparse import CoarseIndex, FlatIndex, GraphIndex
from vllm_relay.sparse.contexts.context_fingerprint import ContextFingerprint
from vllm_relay.sparse.contexts.context_store import HeadStates, MemoryContextStore, StoredContext
from vllm_relay.sparse.contexts.disk.context_file import CONTEXT_SUFFIX
from vllm_relay.sparse.contexts.disk.disk_context_store import DiskContextStore
from vllm_relay.sparse.contexts.retrieval import SessionStats
from vllm_relay.sparse.files.damage import IndexDamagedError
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import from_float32
from vllm_relay.sparse.index.query_types import Dipr
from vllm_relay.sparse.plan.head_plan import HeadPlan
from vllm_relay.sparse.plan.options import DBOptions

HEAD_SIZE, NUM_KV_HEADS, GROUP = 64, 2, 3
NUM_HEADS = NUM_KV_HEADS * GROUP
SCALE = HEAD_SIZE**-0.5
SINK_END, CONTEXT_TOKENS = 32, 700
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
EVERYTHING = 1e-37


def states(num_tokens: int, seed: int) -> torch.Tensor:
    """Keys and values [2, kv_heads, tokens, size]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, NUM_KV_HEADS, num_tokens, HEAD_SIZE, generator=generator)


CONTEXT = states(CONTEXT_TOKENS, 0)


def heads(
    dtype: torch.dtype, index: type[CompiledIndex], plan: HeadPlan | None
) -> list[HeadStates]:
    name = str(dtype).removeprefix("torch.")
    made = []
    for keys, values in zip(*CONTEXT.numpy(), strict=True):
        elements = from_float32(keys, name)
        built = index().build(elements, keys[::2], threads=1)
        made.append(HeadStates(elements, from_float32(values, name), built, None, plan))
    return made


def stored(
    dtype: torch.dtype = torch.float32,
    index: type[CompiledIndex] = FlatIndex,
    plan: HeadPlan | None = None,
    first_token: int = 0,
) -> StoredContext:
    tokens = np.arange(first_token, first_token + CONTEXT_TOKENS)
    return MemoryContextStore().add(tokens, [heads(dtype, index, plan)])


def part_of(
    context: StoredContext,
    num_reused: int,
    num_own: int,
    window_begin: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> HostPart:
    """The request has `num_own` tokens of its own; NaN behind them."""
    place = SequencePlace(num_reused, num_own + 10, SINK_END, 0, num_reused)
    own = HostLayer(place, NUM_KV_HEADS, HEAD_SIZE, dtype)
    own.keys.fill_(torch.nan)
    own.values.fill_(torch.nan)
    own.write(num_reused, *states(num_own, seed).transpose(1, 2).to(dtype))
    return HostPart(
        own=own,
        context=context,
        layer=0,
        residency=Residency(0, window_begin),
        num_tokens=num_reused + num_own,
    )


def queries(
    num_requests: int, dtype: torch.dtype = torch.float32, size: float = 3.0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return (size * torch.randn(num_requests, NUM_HEADS, HEAD_SIZE, generator=generator)).to(dtype)


def retrieval(alpha: float, plans: bool = False) -> Retrieval:
    options = DBOptions() if plans else DBOptions(query=Dipr(alpha=alpha))
    return Retrieval(Dipr(alpha=alpha, scale=SCALE), options, SCALE)


def attend(
    parts: Sequence[HostPart], query: torch.Tensor, asked: Retrieval
) -> tuple[torch.Tensor, torch.Tensor, SessionStats]:
    """What the host has, alone."""
    output, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:2], -torch.inf)
    stats = SessionStats()
    attend_retrieved(parts, range(len(parts)), query, output, lse, asked, stats)
    return output, lse, stats


def oracle(part: HostPart, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one token over all of the host's tokens, in float64."""
    dtype, end = part.own.keys.dtype, part.residency.window_begin
    shared = CONTEXT[:, :, : min(part.own.begin, end)].to(dtype).double()
    own = [each.double() for each in part.own.rows(part.own.begin, max(part.own.begin, end))]
    keys, values = (
        torch.cat(each, 1).repeat_interleave(GROUP, 0) for each in zip(shared, own, strict=True)
    )
    scores = torch.einsum("hd,hkd->hk", query.double(), keys) * SCALE
    return torch.einsum("hk,hkd->hd", scores.softmax(-1), values), scores.logsumexp(-1)


def assert_close(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], dtype: torch.dtype
) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [FlatIndex, GraphIndex, CoarseIndex], ids=lambda c: c.kind)
def test_requests_behind_a_context_read_all_of_it(
    dtype: torch.dtype, index: type[CompiledIndex]
) -> None:
    """Requests that read as much of it, that read less, and of which more is the host's; a plan
    says that everything is read."""
    context = stored(dtype, index, HeadPlan(((CONTEXT_TOKENS, None),), "test", 0.01))
    parts = [
        part_of(context, *each, dtype, seed=seed)
        for seed, each in enumerate(
            [
                (CONTEXT_TOKENS, 5, 640),
                (CONTEXT_TOKENS, 200, 640),
                (CONTEXT_TOKENS, 1, 20),
                (300, 40, 256),
                (CONTEXT_TOKENS, 400, 992),
                (40, 400, 384),
            ]
        )
    ]
    query = queries(len(parts), dtype)
    output, lse, stats = attend(parts, query, retrieval(EVERYTHING, plans=True))
    for number, part in enumerate(parts):
        expected = oracle(part, query[number])
        torch.testing.assert_close(
            output[number].double(), expected[0], atol=TOLERANCE[dtype], rtol=0
        )
        torch.testing.assert_close(lse[number].double(), expected[1], atol=TOLERANCE[dtype], rtol=0)
    # 640 is reached by two requests, which search together
    assert stats.searches == 5 * NUM_KV_HEADS


def test_more_ends_of_a_context_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is dropped to make room is used until the call is over."""
    monkeypatch.setattr(host_attention, "_MAX_KNOWN_SEARCHES", 1)
    context, query, asked = stored(), queries(8), retrieval(EVERYTHING)
    parts = [part_of(context, 300 + 40 * i, 40, 256 + 32 * i, seed=i) for i in range(8)]
    for _ in range(3):
        output, lse, _ = attend(parts, query, asked)
        for number, part in enumerate(parts):
            expected = oracle(part, query[number])
            assert_close((output[number], lse[number]), expected, torch.float32)


@pytest.mark.parametrize("num_reused", [0, 10])
def test_sinks_behind_what_is_reused_are_read(num_reused: int) -> None:
    part = part_of(stored(), num_reused, 400, 384)
    query = queries(1)
    output, lse, _ = attend([part], query, retrieval(EVERYTHING))
    assert_close((output[0], lse[0]), oracle(part, query[0]), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_merged_into_what_the_device_has(dtype: torch.dtype) -> None:
    part = part_of(stored(dtype), CONTEXT_TOKENS, 300, 896, dtype)
    query = queries(4, dtype)
    output, lse = queries(4, dtype), queries(4)[:, :, 0].contiguous()
    host = oracle(part, query[2])
    device = output[2].double(), host[1] + torch.linspace(-2, 2, NUM_HEADS)
    lse[2] = device[1]
    before = output.clone(), lse.clone()
    attend_retrieved([part], [2], query, output, lse, retrieval(EVERYTHING), SessionStats())
    expected_lse = torch.logaddexp(host[1], device[1])
    shares = [(each - expected_lse).exp()[:, None] for each in (host[1], device[1])]
    expected = host[0] * shares[0] + device[0] * shares[1]
    assert_close((output[2], lse[2]), (expected, expected_lse), dtype)
    for row in (0, 1, 3):
        assert torch.equal(output[row], before[0][row]) and torch.equal(lse[row], before[1][row])


@pytest.mark.parametrize("position", [3, 690, CONTEXT_TOKENS + 10, CONTEXT_TOKENS + 299])
def test_the_best_key_narrows_the_range_wherever_it_is(position: int) -> None:
    """Among those of the context that every query reads, the host's, and the device's."""
    part = part_of(stored(), CONTEXT_TOKENS, 300, 896)
    if position < CONTEXT_TOKENS:
        best = 3 * CONTEXT[0, :, position]
    else:
        best = 10 * queries(1)[0, ::GROUP]
        part.own.keys[:, position - CONTEXT_TOKENS] = best
    query = best.repeat_interleave(GROUP, 0)[None]
    _, _, stats = attend([part], query, retrieval(0.01))
    assert stats.retrieved_tokens == 0
    searched = 3 * CONTEXT[0, :, 400].repeat_interleave(GROUP, 0)[None]
    part = part_of(stored(), CONTEXT_TOKENS, 300, 896)
    _, _, stats = attend([part], searched, retrieval(0.01))
    assert stats.retrieved_tokens == NUM_KV_HEADS


def test_a_query_that_is_not_finite_harms_no_other() -> None:
    context = stored()
    parts = [part_of(context, CONTEXT_TOKENS, 100, 640, seed=seed) for seed in range(3)]
    query = queries(3)
    expected = [
        attend([part], query[number : number + 1], retrieval(EVERYTHING))[0][0]
        for number, part in enumerate(parts)
    ]
    query[1, 0, 5], query[1, 4, 0] = torch.inf, torch.nan
    output, lse, _ = attend(parts, query, retrieval(EVERYTHING))
    assert output[1, [0, 4]].isnan().all() and lse[1, [0, 4]].isnan().all()
    assert output[1, [1, 2, 3, 5]].isfinite().all()
    for number in (0, 2):
        torch.testing.assert_close(output[number], expected[number], atol=1e-6, rtol=0)


def whole(part: HostPart, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last tokens of a request, `query` [tokens, heads, size], over all of its
    tokens up to their own, in float64."""
    first = part.num_tokens - len(query)
    rows = [
        oracle(replace(part, residency=Residency(0, first + 1 + i)), query[i])
        for i in range(len(query))
    ]
    outputs, lses = zip(*rows, strict=True)
    return torch.stack(outputs), torch.stack(lses)


READERS = [
    (CONTEXT_TOKENS, 5, 640),
    (CONTEXT_TOKENS, 200, 640),
    (CONTEXT_TOKENS, 1, 20),
    (CONTEXT_TOKENS, 400, 992),
    (300, 40, 256),
    (40, 400, 384),
    (0, 300, 64),
]
"""Tokens of the context that a request reads, of its own, and where its window begins."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_device", [False, True])
def test_questions_behind_a_context_read_all_of_it(dtype: torch.dtype, with_device: bool) -> None:
    """All in one call: one token each, or many."""
    context = stored(dtype)
    parts = [part_of(context, *each, dtype, seed=seed) for seed, each in enumerate(READERS)]
    num_queries = [5, 63, 1, 200, 40, 1, 7]
    ends = np.cumsum(num_queries)
    at = [slice(end - number, end) for end, number in zip(ends, num_queries, strict=True)]
    query = queries(int(ends[-1]), dtype)
    output, lse = torch.full(query.shape, torch.nan), torch.full(query.shape[:2], torch.nan)
    attend_everything(parts, at, query, output, lse, SCALE, with_device=with_device)
    for part, rows in zip(parts, at, strict=True):
        found = output[rows], lse[rows]
        if with_device:
            assert_close(found, whole(part, query[rows]), dtype)
            continue
        expected = [oracle(part, each) for each in query[rows]]
        assert_close(found, [torch.stack(each) for each in zip(*expected, strict=True)], dtype)
    alone = torch.empty_like(output)
    for part, rows in zip(parts, at, strict=True):
        attend_everything([part], [rows], query, alone, None, SCALE, with_device=with_device)
    assert torch.equal(alone, output)


def test_nothing_is_written_if_the_context_is_damaged(tmp_path: Path) -> None:
    fingerprint = ContextFingerprint(
        model="tiny",
        model_hash="0123",
        num_layers=1,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        dtype="float32",
        rope={"theta": 10000.0},
    )
    tokens = np.arange(CONTEXT_TOKENS)
    DiskContextStore(tmp_path, fingerprint).add(tokens, [heads(torch.float32, FlatIndex, None)])
    [file] = tmp_path.glob(f"*{CONTEXT_SUFFIX}")
    content = bytearray(file.read_bytes())
    value = CONTEXT[1, 1, 333].numpy().tobytes()  # of the second head: the first is done before
    content[content.index(value)] ^= 1
    file.write_bytes(content)
    [context] = DiskContextStore(tmp_path, fingerprint).contexts()
    part = part_of(context, CONTEXT_TOKENS, 100, 640)
    query, output, lse = queries(1), queries(1), torch.zeros(1, NUM_HEADS)
    before = output.clone(), lse.clone()
    with pytest.raises(IndexDamagedError):
        attend_retrieved([part], [0], query, output, lse, retrieval(EVERYTHING), SessionStats())
    assert context.damage is not None
    [context] = DiskContextStore(tmp_path, fingerprint).contexts()
    part = part_of(context, CONTEXT_TOKENS, 100, 640)
    with pytest.raises(IndexDamagedError):
        attend_everything([part], [slice(0, 1)], query, output, lse, SCALE)
    assert torch.equal(output, before[0]) and torch.equal(lse, before[1])
    assert context.damage is not None
