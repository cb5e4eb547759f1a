# SPDX-License-Identifier: Apache-2.0
"""Requests that have ended as contexts: all tokens are their own, or some were reused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_relay.long_context.host.host_sequence import (
    TRAIN_QUERIES_PER_KEY,
    HostSequence,
    SequencePlace,
)
from vllm_relay.long_context.host.sequence_context import SequenceContext
from vllm_relay.sparse.contexts.context_fingerprint import ContextFingerprint
from vllm_relay.sparse.contexts.context_store import HeadStates, MemoryContextStore, StoredContext
from vllm_relay.sparse.contexts.disk.context_file import QUERIES_SUFFIX
from vllm_relay.sparse.contexts.disk.disk_context_store import DiskContextStore
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.key_codes import row_bytes
from vllm_relay.sparse.index.sparse_layer import MEAN_TOKENS

LAYERS = ["first", "second"]
KV_HEADS, GROUP, HEAD_SIZE = 2, 3, 32
NUM_TOKENS, NUM_STORED_TOKENS = 501, 203
CHUNK_TOKENS = 40
TOKENS = np.arange(NUM_TOKENS, dtype=np.int64)

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def states(layer: int, kind: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, ...] of the whole sequence."""
    generator = torch.Generator().manual_seed(10 * layer + kind)
    return torch.randn(NUM_TOKENS, *shape, generator=generator).to(dtype)


def computed(
    begin: int, end: int, dtype: torch.dtype, place: SequencePlace | None = None
) -> HostSequence:
    """A request that computes the tokens from `begin` on, chunk by chunk."""
    sequence = HostSequence(place or SequencePlace(begin, NUM_TOKENS - begin, 0, 0, NUM_TOKENS))
    for number, name in enumerate(LAYERS):
        keys, values = (states(number, kind, KV_HEADS, HEAD_SIZE, dtype=dtype) for kind in (1, 2))
        queries = states(number, 3, KV_HEADS, GROUP, HEAD_SIZE, dtype=dtype).permute(1, 2, 0, 3)
        for first in range(begin, end, CHUNK_TOKENS):
            at = slice(first, min(first + CHUNK_TOKENS, end))
            layer = sequence.layer(name, keys[at])
            layer.write(first, keys[at], values[at])
            layer.train_queries.add(queries[:, :, at], first_position=first)
    return sequence


def context_of(num_tokens: int, dtype: torch.dtype) -> SequenceContext:
    return SequenceContext(TOKENS[:num_tokens], computed(0, num_tokens, dtype), LAYERS)


def stored(context: SequenceContext, folder: Path | None) -> StoredContext:
    """As the worker stores it when its indexes are built; in memory without a folder."""
    fingerprint = ContextFingerprint(
        model="tiny",
        model_hash="0",
        num_layers=len(LAYERS),
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        dtype=context.shape.dtype,
        rope={},
    )
    store = MemoryContextStore() if folder is None else DiskContextStore(folder, fingerprint)
    layers = []
    for layer in range(len(LAYERS)):
        layers.append([])
        for head in range(KV_HEADS):
            keys, values = context.rows(layer, head, 0, context.num_tokens)
            train = context.train_queries(layer, head)
            layers[-1].append(HeadStates(keys, values, FlatIndex().build(keys), train))
    return store.add(context.tokens, layers)


@pytest.fixture(params=["fresh", "memory", "disk"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def reused_context(kind: str, dtype: torch.dtype, tmp_path: Path) -> StoredContext:
    context = context_of(NUM_STORED_TOKENS, dtype)
    return context if kind == "fresh" else stored(context, tmp_path if kind == "disk" else None)


def extended(context: StoredContext, num_reused: int, dtype: torch.dtype) -> SequenceContext:
    """Kept by a request that reused the context's first tokens and computed all others."""
    own = computed(num_reused, NUM_TOKENS, dtype)
    return SequenceContext(TOKENS, own, LAYERS, context.first_tokens(num_reused))


@both_dtypes
@pytest.mark.parametrize("num_reused", [NUM_STORED_TOKENS, 150, 1])
def test_keys_and_values_of_both_parts(
    tmp_path: Path, kind: str, dtype: torch.dtype, num_reused: int
) -> None:
    found = extended(reused_context(kind, dtype, tmp_path), num_reused, dtype)
    wanted = context_of(NUM_TOKENS, dtype)
    assert found.id == wanted.id and found.shape == wanted.shape
    for layer in range(len(LAYERS)):
        for head in range(KV_HEADS):
            for ours, theirs in zip(
                found.rows(layer, head, 0, NUM_TOKENS),
                wanted.rows(layer, head, 0, NUM_TOKENS),
                strict=True,
            ):
                assert ours.dtype == theirs.dtype
                np.testing.assert_array_equal(ours.data, theirs.data)


@both_dtypes
@pytest.mark.parametrize("num_reused", [NUM_STORED_TOKENS, 150, 40])
def test_training_queries_are_of_all_tokens_in_their_order(
    tmp_path: Path, kind: str, dtype: torch.dtype, num_reused: int
) -> None:
    found = extended(reused_context(kind, dtype, tmp_path), num_reused, dtype)
    wanted = context_of(NUM_TOKENS, dtype)
    num_stored_queries = int(NUM_STORED_TOKENS * TRAIN_QUERIES_PER_KEY)
    num_taken = num_stored_queries * num_reused // NUM_STORED_TOKENS
    num_own = int(NUM_TOKENS * TRAIN_QUERIES_PER_KEY) - int(num_reused * TRAIN_QUERIES_PER_KEY)
    assert num_taken >= int(num_reused * TRAIN_QUERIES_PER_KEY) - 1 > 0
    for layer in range(len(LAYERS)):
        assert found.group_size(layer) == GROUP
        for head in range(KV_HEADS):
            ours, theirs = (each.queries(layer, head, 0, NUM_TOKENS) for each in (found, wanted))
            assert ours is not None and theirs is not None and ours.dtype == theirs.dtype
            assert ours.shape == (num_taken + num_own, HEAD_SIZE)
            np.testing.assert_array_equal(ours.data[:num_taken], theirs.data[:num_taken])
            np.testing.assert_array_equal(ours.data[num_taken:], theirs.data[-num_own:])
            last = found.last_queries(layer, head)
            np.testing.assert_array_equal(last, wanted.last_queries(layer, head))


def test_of_a_chain_of_contexts_all_queries_are_kept() -> None:
    """A conversation: each turn reuses the context of the one before."""
    context = context_of(NUM_STORED_TOKENS, torch.float32)
    for end in (300, 333, NUM_TOKENS):
        own = computed(context.num_tokens, end, torch.float32)
        parent = context.first_tokens(context.num_tokens)
        context = SequenceContext(TOKENS[:end], own, LAYERS, parent)
    found = context.queries(1, 1, 0, NUM_TOKENS)
    wanted = context_of(NUM_TOKENS, torch.float32).train_queries(1, 1)
    assert found is not None and wanted is not None
    np.testing.assert_array_equal(found.data, wanted.data)


def test_without_stored_queries_those_of_its_own_tokens_are_left(tmp_path: Path) -> None:
    context = reused_context("disk", torch.float32, tmp_path)
    [queries] = tmp_path.glob(f"*{QUERIES_SUFFIX}")
    queries.unlink()
    found = extended(context, 150, torch.float32).queries(0, 0, 0, NUM_TOKENS)
    wanted = context_of(NUM_TOKENS, torch.float32).train_queries(0, 0)
    assert found is not None and wanted is not None
    num_own = int(NUM_TOKENS * TRAIN_QUERIES_PER_KEY) - int(150 * TRAIN_QUERIES_PER_KEY)
    np.testing.assert_array_equal(found.data, wanted.data[-num_own:])


def test_a_context_behind_another_takes_what_is_its_own_and_copies_nothing() -> None:
    own = computed(150, NUM_TOKENS, torch.float32)
    parent = context_of(NUM_STORED_TOKENS, torch.float32).first_tokens(150)
    found = SequenceContext(TOKENS, own, LAYERS, parent)
    states, codes = 2 * HEAD_SIZE * 4, row_bytes(HEAD_SIZE)
    means = -(-HEAD_SIZE * 4 // MEAN_TOKENS)
    num_rows = len(LAYERS) * (NUM_TOKENS - 150) * KV_HEADS
    assert found.num_bytes == num_rows * (states + codes + means)
    keys, values = found.rows(1, 1, 160, NUM_TOKENS)
    assert np.shares_memory(keys.data, own.layers["second"].keys.numpy())
    assert np.shares_memory(values.data, own.layers["second"].values.numpy())


def test_a_chain_is_one_sequence_of_its_links() -> None:
    """Of a context in the middle, less is taken than it has; then nothing of its own at all."""
    first = context_of(NUM_STORED_TOKENS, torch.float32)
    second = SequenceContext(
        TOKENS[:300], computed(150, 300, torch.float32), LAYERS, first.first_tokens(150)
    )
    third = SequenceContext(
        TOKENS, computed(220, NUM_TOKENS, torch.float32), LAYERS, second.first_tokens(220)
    )
    fourth = SequenceContext(
        TOKENS, computed(120, NUM_TOKENS, torch.float32), LAYERS, third.first_tokens(120)
    )
    assert [(each.context, each.begin, each.end) for each in third.links(NUM_TOKENS)] == [
        (first, 0, 150),
        (second, 150, 220),
        (third, 220, NUM_TOKENS),
    ]
    assert [each.context for each in third.links(150)] == [first]
    assert fourth.parent == (first, 120)
    wanted = context_of(NUM_TOKENS, torch.float32)
    for found in (third, fourth):
        for begin, end in [(0, NUM_TOKENS), (149, 151), (150, 220), (100, 230), (300, 300)]:
            for ours, theirs in zip(
                found.rows(1, 0, begin, end), wanted.rows(1, 0, begin, end), strict=True
            ):
                np.testing.assert_array_equal(ours.data, theirs.data)
