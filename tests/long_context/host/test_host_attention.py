# SPDX-License-Identifier: Apache-2.0
"""Attention over the host's tokens against float64, with NaN in all memory that is not written."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from vllm_relay.long_context.host import host_sequence
from vllm_relay.long_context.host.host_attention import (
    HostPart,
    Retrieval,
    attend_everything,
    attend_retrieved,
)
from vllm_relay.long_context.host.host_sequence import EncodingBudget, HostLayer, SequencePlace
from vllm_relay.long_context.window import Residency
from vllm_relay.sparse.contexts.retrieval import SessionStats
from vllm_relay.sparse.index.query_types import Dipr
from vllm_relay.sparse.plan.options import DBOptions

State = tuple[torch.Tensor, torch.Tensor]
"""Output and log-sum-exp."""

HEAD_SIZE = 64
SCALE = HEAD_SIZE**-0.5
SINK_END, WINDOW_TOKENS = 32, 70
UNINDEXED_TOKENS = 100
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16]
HEADS = [(1, 1), (4, 4), (8, 2), (6, 1)]


@pytest.fixture(autouse=True)
def small_indexes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_sequence, "GRANULE_TOKENS", UNINDEXED_TOKENS)
        patch.setattr(host_sequence, "SEGMENT_TOKENS", 8 * UNINDEXED_TOKENS)
        yield


def layer_of(
    num_tokens: int, num_kv_heads: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> HostLayer:
    place = SequencePlace(0, num_tokens + 1000, SINK_END, WINDOW_TOKENS, num_tokens)
    layer = HostLayer(place, num_kv_heads, HEAD_SIZE, dtype)
    layer.keys.fill_(torch.nan)
    layer.values.fill_(torch.nan)
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, num_tokens, num_kv_heads, HEAD_SIZE, generator=generator)
    layer.write(0, keys.to(dtype), values.to(dtype))
    return layer


def queries(
    num_tokens: int, num_heads: int, dtype: torch.dtype = torch.float32, size: float = 3.0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return (size * torch.randn(num_tokens, num_heads, HEAD_SIZE, generator=generator)).to(dtype)


def part_of(layer: HostLayer, begin: int, end: int) -> HostPart:
    return HostPart(
        own=layer,
        context=None,
        layer=0,
        residency=Residency(begin, end),
        num_tokens=layer.end,
    )


def scores_of(layer: HostLayer, query: torch.Tensor) -> np.ndarray:
    """float64 [tokens, heads, keys] of all that is written."""
    keys = layer.keys[:, : layer.end].double().numpy()
    keys = keys.repeat(query.shape[1] // len(keys), axis=0)
    return np.einsum("thd,hkd->thk", query.double().numpy(), keys) * SCALE


def oracle(layer: HostLayer, query: torch.Tensor, begin: int, end: int) -> State:
    """Attention in float64 over the positions `begin` to `end`."""
    scores = torch.from_numpy(scores_of(layer, query)[:, :, begin:end])
    values = layer.values[:, begin:end].double()
    values = values.repeat_interleave(query.shape[1] // len(values), 0)
    return torch.einsum("thk,hkd->thd", scores.softmax(-1), values), scores.logsumexp(-1)


def assert_close(found: State, expected: State, dtype: torch.dtype) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, atol=TOLERANCE[dtype], rtol=1e-5)


def retrieval_of(**kwargs: float) -> Retrieval:
    return Retrieval(Dipr(scale=SCALE, **kwargs), DBOptions(), SCALE)


def attend_all(
    parts: list[HostPart],
    query: torch.Tensor,
    retrieval: Retrieval,
    stats: SessionStats | None = None,
) -> State:
    """What is retrieved, alone: the device has nothing. float32, whatever the dtype of the keys."""
    query = query.float()
    output, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:2], -torch.inf)
    tokens = list(range(len(parts)))
    attend_retrieved(parts, tokens, query, output, lse, retrieval, stats or SessionStats())
    return output, lse


def attend_one(part: HostPart, query: torch.Tensor, retrieval: Retrieval) -> State:
    return attend_all([part], query, retrieval)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("num_queries", [1, 3, 63])
def test_everything_is_read(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, num_queries: int
) -> None:
    layer = layer_of(900, num_kv_heads, dtype)
    query = queries(num_queries, num_heads, dtype)
    for begin, end in ((SINK_END, 800), (SINK_END, 64), (0, 832), (0, 1)):
        output, lse = torch.full(query.shape, torch.nan), torch.full(query.shape[:2], torch.nan)
        everything = slice(0, num_queries)
        attend_everything([part_of(layer, begin, end)], [everything], query, output, lse, SCALE)
        assert_close((output, lse), oracle(layer, query, begin, end), dtype)


@pytest.mark.parametrize("alpha", [1e-37, 0.9])
def test_what_is_not_encoded_yet_is_read_exactly(alpha: float) -> None:
    """While every step encodes more, until all is."""
    budget = EncodingBudget(2 * UNINDEXED_TOKENS)
    place = SequencePlace(0, 2600, SINK_END, WINDOW_TOKENS, 2500)
    layer = HostLayer(place, 2, HEAD_SIZE, torch.float32, 0, budget)
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, 2600, 2, HEAD_SIZE, generator=generator)
    layer.write(0, keys[:2500], values[:2500], is_copied=True)
    query, searched = queries(1, 4), []
    for end in range(2501, 2505):
        budget.renew()
        layer.write(end - 1, keys[end - 1 : end], values[end - 1 : end])
        stats = SessionStats()
        window_begin = end - WINDOW_TOKENS
        part = HostPart(layer, None, 0, Residency(SINK_END, window_begin), end)
        found = attend_all([part], query, retrieval_of(alpha=alpha), stats)
        searched.append(stats.searched_tokens)
        if alpha < 0.5:
            assert_close(found, oracle(layer, query, SINK_END, window_begin), torch.float32)
        else:
            assert stats.retrieved_tokens < stats.searched_tokens / 4
    segment = 2 * host_sequence.SEGMENT_TOKENS  # of two kv heads
    assert searched == sorted(searched)
    assert (searched[0], searched[-1]) == (segment, 3 * segment)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("first_resident_token", [0, 96])
def test_a_range_that_holds_all_keys_reads_all_of_them(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, first_resident_token: int
) -> None:
    """With indexes and without, while the window goes on."""
    layer = layer_of(150, num_kv_heads, dtype)
    query = queries(1, num_heads, dtype)
    begin = 0 if first_resident_token else SINK_END
    for number in range(30):
        end = max(first_resident_token, (layer.end - WINDOW_TOKENS) // 32 * 32)
        found = attend_one(part_of(layer, begin, end), query, retrieval_of(alpha=1e-37))
        assert_close(found, oracle(layer, query, begin, end), dtype)
        new = layer_of(31, num_kv_heads, dtype, seed=number + 1)
        layer.write(layer.end, *(part.transpose(0, 1) for part in new.rows(0, 31)))
        if number == 20:  # tokens are computed again, and the sinks are the host's from now on
            layer.write(400, *(part.transpose(0, 1) for part in new.rows(0, 31)))
            begin, first_resident_token = 0, 384
    assert layer.segments


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("steps", [[1500], [300, 450, 700, 1000, 1180, 1400, 1500]], ids=len)
def test_every_key_above_the_range_is_attended(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, steps: list[int]
) -> None:
    """Values show which keys were read: each of those in range has a feature of its own."""
    layer = layer_of(1500, num_kv_heads, dtype)
    query = queries(1, num_heads, dtype, size=8.0)
    alpha, margin = 0.01, {torch.float32: 1e-3, torch.bfloat16: 0.1}[dtype]
    for step in steps:
        begin, end = SINK_END, (step - WINDOW_TOKENS) // 32 * 32
        group = num_heads // num_kv_heads
        scores = scores_of(layer, query)[0, :, :step].reshape(num_kv_heads, group, step)
        in_range = scores >= scores.max(-1, keepdims=True) + np.log(alpha) + margin
        in_range[:, :, :begin] = in_range[:, :, end:] = False
        marked = [np.flatnonzero(in_range[head].any(0))[:HEAD_SIZE] for head in range(num_kv_heads)]
        values = torch.zeros(num_kv_heads, step, HEAD_SIZE, dtype=dtype)
        for head, positions in enumerate(marked):
            values[head, positions, np.arange(len(positions))] = 1
        layer.values[:, :step] = values  # the indexes have them where they lie
        part = part_of(layer, begin, end)
        part.num_tokens = step
        output, lse = attend_one(part, query, retrieval_of(alpha=alpha))
        weights = output * lse.exp()[..., None]
        weights = weights.unflatten(1, (num_kv_heads, group))[0].double().numpy()
        num_checked = 0
        for head, positions in enumerate(marked):
            for row in range(group):
                mine = in_range[head, row, positions]
                found = weights[head, row, : len(positions)][mine]
                expected = np.exp(scores[head, row, positions][mine])
                np.testing.assert_allclose(found, expected, rtol=0.1 if margin > 0.01 else 1e-3)
                num_checked += mine.sum()
        assert num_checked >= num_heads


def test_keys_far_below_the_range_are_not_read() -> None:
    layer = layer_of(2000, 2)
    query = queries(1, 4, size=8.0)
    part = part_of(layer, SINK_END, 1920)
    stats = SessionStats()
    attend_all([part], query, retrieval_of(alpha=0.01), stats)
    segments = layer.segments_up_to(1920)
    indexed = sum(segment.end - segment.begin for segment in segments)
    assert stats.searches == 2 * len(segments) and indexed > 1700
    assert stats.searched_tokens == 2 * indexed
    assert 0 < stats.retrieved_tokens < stats.searched_tokens / 10


def test_the_window_narrows_the_range() -> None:
    """A best key that the device has makes all of the host's irrelevant."""
    layer = layer_of(2000, 1)
    query = queries(1, 1)
    for position in (5, 1990):
        key = layer.keys[0, position].clone()
        layer.keys[0, position] = 10 * query[0, 0]
        layer.segments.clear()
        stats = SessionStats()
        part = part_of(layer, SINK_END, 1920)
        attend_all([part], query, retrieval_of(alpha=0.01), stats)
        assert stats.retrieved_tokens == 0
        layer.keys[0, position] = key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_read_counts_by_means(dtype: torch.dtype) -> None:
    """Many keys of little weight: what is in range has a small part of the weight."""
    layer = layer_of(3000, 2, dtype)
    drift = torch.linspace(0, 20, 3000).sin()[None, :, None].expand(2, -1, HEAD_SIZE)
    layer.values[:, :3000] += drift.to(dtype)
    layer.segments.clear()
    query = queries(1, 4, dtype, size=1.0)
    part = part_of(layer, SINK_END, 2880)
    wanted = oracle(layer, query, SINK_END, 2880)
    asked = {
        estimate: Retrieval(Dipr(alpha=0.2, scale=SCALE, estimate=estimate), DBOptions(), SCALE)
        for estimate in (False, True)
    }
    missed = [
        float((attend_one(part, query, asked[each])[0] - wanted[0]).norm() / wanted[0].norm())
        for each in (False, True)
    ]
    assert missed[1] < 0.5 * missed[0]
    found = attend_one(part, query, asked[True])[1]
    torch.testing.assert_close(found.double(), wanted[1], atol=0.02, rtol=0)


def left_out(part: HostPart, query: torch.Tensor, **kwargs: float) -> float:
    """The largest share of the attention weight of the host's tokens that a query leaves out."""
    _, whole = oracle(part.own, query, *part.residency)
    stats = SessionStats()
    _, lse = attend_all([part], query, retrieval_of(**kwargs), stats)
    limit = kwargs.get("max_dropped_mass")
    if limit is None:
        assert stats.dropped_mass is None
    else:
        assert stats.dropped_mass is not None and stats.dropped_mass <= limit + 1e-6
    return float((1 - (lse.double() - whole).exp()).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", [0.1, 0.01, 0.0])
def test_no_more_than_max_dropped_mass_is_left_out(dtype: torch.dtype, limit: float) -> None:
    layer = layer_of(1500, 2, dtype)
    query = queries(1, 8, dtype, size=1.0)
    for end in (400, 1000, 1408):
        part = part_of(layer, SINK_END, end)
        limited = left_out(part, query, alpha=0.05, max_dropped_mass=limit)
        assert limited <= limit + TOLERANCE[dtype]
        assert left_out(part, query, alpha=0.05) > 0.15


def test_max_dropped_mass_holds_where_the_window_has_the_best_key() -> None:
    layer = layer_of(1500, 1)
    query = queries(1, 1, size=1.0)
    layer.keys[0, 5] = query[0, 0]  # twice as high as the best of the others
    part = part_of(layer, SINK_END, 1408)
    assert left_out(part, query, alpha=0.01, max_dropped_mass=0.1) <= 0.1 + 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_requests_of_a_batch_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    layers = [layer_of(n, 2, dtype, seed=n) for n in (700, 150, 1200)]
    ranges = [(SINK_END, 608), (0, 64), (0, 1120)]
    query = queries(3, 8, dtype, size=4.0)
    parts = [part_of(layer, *each) for layer, each in zip(layers, ranges, strict=True)]
    output, lse = attend_all(parts, query, retrieval_of(alpha=0.05))
    for number, part in enumerate(parts):
        alone = attend_one(part, query[number : number + 1], retrieval_of(alpha=0.05))
        assert torch.equal(output[number], alone[0][0]) and torch.equal(lse[number], alone[1][0])


NO_NUMBERS = [math.nan, math.inf, -math.inf, 3e38]
PLACES = {"sink": 3, "segment": 300, "granule": 1050, "tail": 1160}


@pytest.mark.parametrize("number", NO_NUMBERS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_numbers_that_are_none_stay_with_their_request(
    kind: str, place: str, number: float
) -> None:
    """Its answer is that of dense attention; that of the request beside it does not change."""
    healthy, broken = layer_of(1180, 2, seed=1), layer_of(1180, 2, seed=2)
    states = [part.transpose(0, 1).contiguous() for part in broken.rows(0, 1180)]
    states[kind == "values"][PLACES[place], 1, 5] = number
    for begin in range(0, 1180, 59):
        broken.write(begin, *(part[begin : begin + 59] for part in states))
    parts = [part_of(each, 0, 1170) for each in (healthy, broken)]
    query = queries(2, 4)
    retrieval = retrieval_of(alpha=1e-12)
    expected = attend_one(parts[0], query[:1], retrieval)
    found = attend_all(parts, query, retrieval)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[:1], other)
    dense, _ = oracle(broken, query[1:], 0, 1170)
    dense = dense.float()
    is_number = dense.isfinite()
    assert torch.equal(found[0][1:].isfinite(), is_number)
    assert is_number[:, :2].all()  # of the other kv head
    torch.testing.assert_close(found[0][1:][is_number], dense[is_number], atol=0.02, rtol=0.02)


def test_a_segment_without_an_index_is_read_whole() -> None:
    layer = layer_of(1180, 1)
    keys, values = (part.transpose(0, 1).clone() for part in layer.rows(0, 1180))
    keys[50, 0, 0] = 2e38
    layer.write(0, keys, values)
    unusable = [each for each in layer.segments_up_to(1170) if each.layer is None]
    assert [(each.begin, each.end) for each in unusable] == [(32, 832)]
    stats = SessionStats()
    attend_all([part_of(layer, 0, 1170)], queries(1, 2), retrieval_of(alpha=1e-4), stats)
    assert stats.searched_tokens == 300
