# SPDX-License-Identifier: Apache-2.0
"""Contexts that are read before their indexes are built: by what was encoded for the requests that
they are made of, so that no step encodes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.long_context.host.test_sequence_context import (
    GROUP,
    HEAD_SIZE,
    KV_HEADS,
    LAYERS,
    NUM_TOKENS,
    TOKENS,
    computed,
)
from tests.long_context.host.test_worker_contexts import FINGERPRINT, kept, wait
from vllm_relay import _C
from vllm_relay.long_context.host import host_sequence
from vllm_relay.long_context.host.host_attention import HostPart, Retrieval, attend_retrieved
from vllm_relay.long_context.host.host_sequence import HostLayer, HostSequence, SequencePlace
from vllm_relay.long_context.host.index_builders import start_builders
from vllm_relay.long_context.host.sequence_context import SequenceContext
from vllm_relay.long_context.host.worker_contexts import WorkerContexts
from vllm_relay.long_context.window import Residency
from vllm_relay.sparse.contexts.context_store import StoredContext
from vllm_relay.sparse.contexts.retrieval import SessionStats
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.query_types import Dipr
from vllm_relay.sparse.plan.options import DBOptions

SINK_END, WINDOW_TOKENS = 16, 60
SEGMENT_TOKENS, GRANULE_TOKENS = 128, 32
SCALE = HEAD_SIZE**-0.5


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sequence, "SEGMENT_TOKENS", SEGMENT_TOKENS)
    monkeypatch.setattr(host_sequence, "GRANULE_TOKENS", GRANULE_TOKENS)
    monkeypatch.setattr(host_sequence, "LAYER_LAG_TOKENS", 16)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many tokens each index had that was built, from now on."""
    counts: list[int] = []
    build = FlatIndex.build

    def counting(self: FlatIndex, keys: Any, *args: Any, **kwargs: Any) -> FlatIndex:
        counts.append(keys.shape[0])
        return build(self, keys, *args, **kwargs)

    monkeypatch.setattr(FlatIndex, "build", counting)
    yield counts


def prefilled(begin: int, end: int = NUM_TOKENS) -> HostSequence:
    place = SequencePlace(begin, end - begin, SINK_END, WINDOW_TOKENS, end)
    return computed(begin, end, torch.float32, place)


def attention(
    context: StoredContext, num_reused: int, alpha: float, *, estimate: bool = False
) -> tuple[torch.Tensor, SessionStats]:
    """Of one token behind the first tokens of a context, in the second layer; output and lse."""
    own = HostLayer(
        SequencePlace(num_reused, 10, SINK_END, 0, 0), KV_HEADS, HEAD_SIZE, torch.float32
    )
    generator = torch.Generator().manual_seed(5)
    own.write(num_reused, *torch.randn(2, 1, KV_HEADS, HEAD_SIZE, generator=generator))
    part = HostPart(own, context, 1, Residency(0, num_reused), num_reused + 1)
    query = 2 * torch.randn(2, GROUP * KV_HEADS, HEAD_SIZE, generator=generator)
    output, lse = torch.zeros_like(query), torch.full(query.shape[:2], -torch.inf)
    asked, stats = Dipr(alpha=alpha, estimate=estimate), SessionStats()
    retrieval = Retrieval(Dipr(alpha=alpha, scale=SCALE), DBOptions(query=asked), SCALE)
    attend_retrieved([part, part], [0, 1], query, output, lse, retrieval, stats)
    return torch.cat([output, lse[..., None]], -1), stats


def exact_attention(num_reused: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    torch.randn(2, 1, KV_HEADS, HEAD_SIZE, generator=generator)
    query = 2 * torch.randn(2, GROUP * KV_HEADS, HEAD_SIZE, generator=generator).double()
    layer = computed(0, NUM_TOKENS, torch.float32).layers["second"]
    keys, values = (each.repeat_interleave(GROUP, 0).double() for each in layer.rows(0, num_reused))
    scores = torch.einsum("qhd,hkd->qhk", query, keys) * SCALE
    output = torch.einsum("qhk,hkd->qhd", scores.softmax(-1), values)
    return torch.cat([output, scores.logsumexp(-1)[..., None]], -1).float()


@pytest.mark.parametrize("begin", [0, 150])
@pytest.mark.parametrize("num_reused", [NUM_TOKENS, 300, 190])
def test_a_context_is_read_at_once_and_nothing_is_encoded_for_it(
    begin: int, num_reused: int, request: pytest.FixtureRequest
) -> None:
    parent = None
    if begin:
        first = SequenceContext(TOKENS[:203], prefilled(0, 203), LAYERS)
        parent = first.first_tokens(begin)
    context = SequenceContext(TOKENS, prefilled(begin), LAYERS, parent)
    encoded: list[int] = request.getfixturevalue("encoded")
    found, stats = attention(context, num_reused, 1e-37)
    assert encoded == []
    torch.testing.assert_close(found, exact_attention(num_reused), atol=1e-5, rtol=0)
    # all but sinks, what the device had of the request at its end, and less than a granule
    least = num_reused - begin - SINK_END - WINDOW_TOKENS - 2 * GRANULE_TOKENS
    assert stats.searched_tokens >= KV_HEADS * least


def test_tokens_that_are_in_two_indexes_count_once() -> None:
    sequence = prefilled(0)
    layer = sequence.layers["second"]
    [first, *_] = layer.segments.values()
    assert first.end - first.begin == SEGMENT_TOKENS
    for at in range(first.begin, first.end, GRANULE_TOKENS):
        layer.segments[at, at + GRANULE_TOKENS] = layer._flat(at, at + GRANULE_TOKENS)
    context = SequenceContext(TOKENS, sequence, LAYERS)
    found, _ = attention(context, NUM_TOKENS, 1e-37)
    torch.testing.assert_close(found, exact_attention(NUM_TOKENS), atol=1e-5, rtol=0)


@pytest.mark.parametrize("estimate", [False, True])
def test_its_segments_are_asked_as_its_index_would_be(estimate: bool) -> None:
    context = SequenceContext(TOKENS, prefilled(0), LAYERS)
    found, stats = attention(context, NUM_TOKENS, 0.02, estimate=estimate)
    torch.testing.assert_close(found, exact_attention(NUM_TOKENS), atol=0.2, rtol=0)
    _, fewer = attention(context, NUM_TOKENS, 0.5, estimate=estimate)
    assert 0 < fewer.retrieved_tokens < fewer.searched_tokens / 4
    assert fewer.retrieved_tokens < stats.retrieved_tokens <= stats.searched_tokens


def test_states_that_are_no_numbers_answer_as_dense_attention_does() -> None:
    sequence = prefilled(0)
    layer = sequence.layers["second"]
    layer.keys[1, 150] = torch.nan
    layer.segments = {}
    layer.segments_up_to(NUM_TOKENS)
    context = SequenceContext(TOKENS, sequence, LAYERS)
    found, _ = attention(context, NUM_TOKENS, 1e-37)
    expected = exact_attention(NUM_TOKENS)
    assert found[:, GROUP:].isnan().all()
    torch.testing.assert_close(found[:, :GROUP], expected[:, :GROUP], atol=1e-5, rtol=0)


def test_what_a_thread_has_built_takes_the_place_of_what_was_encoded(
    slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = exact_attention(NUM_TOKENS)
    options = DBOptions(threads=1, index="flat")
    contexts = WorkerContexts(None, FINGERPRINT, LAYERS, options, start_builders(1))
    sequence = prefilled(0)
    context = kept(NUM_TOKENS)
    assert contexts.keep(context, sequence, None)
    fresh = contexts.get(context.context_id)
    assert fresh is not None and len(fresh.pieces(1)) > 1
    slow.set()
    wait(contexts)
    stored = contexts.get(context.context_id)
    assert stored is not None and stored is not fresh
    # the step that reads it first finds the means of its values, too
    monkeypatch.setattr(_C.index, "mean_rows", lambda *args: pytest.fail("means are made"))
    for number, name in enumerate(LAYERS):
        assert sequence.layers[name].segments == {}
        [(begin, whole)] = fresh.pieces(number)
        assert begin == 0 and whole.num_keys == NUM_TOKENS
        for head in range(KV_HEADS):
            assert stored.index(number, head) is whole.indexes[head]
    found, _ = attention(fresh, NUM_TOKENS, 1e-37)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(found, attention(stored, NUM_TOKENS, 1e-37)[0])
    contexts.close()
