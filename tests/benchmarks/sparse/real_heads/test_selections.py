# SPDX-License-Identifier: Apache-2.0
"""Selections against brute force on small arrays, and their bytes against counts by hand."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.sparse.real_heads.aids import Aids, importance
from benchmarks.sparse.real_heads.model import Read, attend
from benchmarks.sparse.real_heads.selections import (
    SINK_TOKENS,
    WINDOW_TOKENS,
    Dense,
    InfLLM,
    Quest,
    Range,
    Remainder,
    Selection,
    TopK,
    Wave,
    Window,
)

KV_HEADS, GROUP, D = 2, 3, 16
CONTEXT_TOKENS, NEW_TOKENS = 720, 4
SCALE = 1 / math.sqrt(D)
FAR_TOKENS = [CONTEXT_TOKENS + t + 1 - SINK_TOKENS - WINDOW_TOKENS for t in range(NEW_TOKENS)]


class Layer:
    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.queries = 2 * normal(KV_HEADS, GROUP, NEW_TOKENS, D)
        self.keys = normal(KV_HEADS, CONTEXT_TOKENS + NEW_TOKENS, D)
        self.values = normal(KV_HEADS, CONTEXT_TOKENS + NEW_TOKENS, D)
        asked = normal(KV_HEADS, GROUP, CONTEXT_TOKENS, D)
        keys = self.keys[:, :CONTEXT_TOKENS]
        self.aids = Aids(keys, self.values[:, :CONTEXT_TOKENS], importance(asked, keys))

    def attend(self, selection: Selection) -> tuple[torch.Tensor, Read]:
        return attend(self.queries, self.keys, self.values, self.aids, selection, SCALE)

    def scores(self, head: int, row: int, token: int) -> torch.Tensor:
        """Of all tokens up to this one."""
        return self.keys[head, : self.end(token)] @ self.queries[head, row, token] * SCALE

    def end(self, token: int) -> int:
        return CONTEXT_TOKENS + token + 1

    def far(self, token: int) -> range:
        return range(SINK_TOKENS, self.end(token) - WINDOW_TOKENS)

    def output(self, head: int, row: int, token: int, ids: list[int]) -> torch.Tensor:
        """Attention over the sinks, the window and these."""
        end = self.end(token)
        read = [*range(SINK_TOKENS), *ids, *range(end - WINDOW_TOKENS, end)]
        weights = torch.softmax(self.scores(head, row, token)[read].double(), 0)
        return (weights @ self.values[head, read].double()).float()


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer()


ROWS = [(h, g, t) for h in range(KV_HEADS) for g in range(GROUP) for t in range(NEW_TOKENS)]


def test_dense_reads_everything(layer: Layer) -> None:
    found, read = layer.attend(Dense())
    for h, g, t in ROWS:
        torch.testing.assert_close(found[h, g, t], layer.output(h, g, t, list(layer.far(t))))
    assert read == Read(1, 1, 1)


@pytest.mark.parametrize("selection", [Range(0), Remainder(0)])
def test_alpha_0_is_dense(layer: Layer, selection: Selection) -> None:
    found, read = layer.attend(selection)
    torch.testing.assert_close(found, layer.attend(Dense())[0])
    assert read.keys == 1


def test_the_smaller_alpha_the_smaller_the_error(layer: Layer) -> None:
    right = layer.attend(Dense())[0]
    errors = [
        [(layer.attend(kind(alpha))[0] - right).norm().item() for alpha in (0.5, 0.1, 1e-3)]
        for kind in (Range, Remainder)
    ]
    for alone in errors:
        assert alone == sorted(alone, reverse=True)
    assert errors[1][0] < errors[0][0]


def test_a_range_reads_what_has_the_weight(layer: Layer) -> None:
    alpha = 0.05
    found, read = layer.attend(Range(alpha))
    counts, same = [], 0
    for h, g, t in ROWS:
        scores = layer.scores(h, g, t)
        wanted = [i for i in layer.far(t) if scores[i] >= scores.max() + math.log(alpha)]
        counts.append(len(wanted) / FAR_TOKENS[t])
        same += torch.allclose(found[h, g, t], layer.output(h, g, t, wanted), atol=1e-5)
    # a key at the range's edge may be on its other side by codes
    assert same >= 0.6 * len(ROWS)
    assert read.keys == pytest.approx(sum(counts) / len(counts), rel=0.02)
    assert read.bytes == pytest.approx(read.group_keys + 1 / 4)


def test_the_remainder_is_the_weight_of_blocks_times_their_mean_value() -> None:
    layer = Layer(seed=1)
    # each block of 64 has one value: nothing is lost but what upper halves do not tell
    blocks = layer.values[:, :CONTEXT_TOKENS:64].repeat_interleave(64, 1)
    layer.values[:, :CONTEXT_TOKENS] = blocks[:, :CONTEXT_TOKENS]
    found, read = layer.attend(Remainder(0.3))
    assert read.keys < 0.2
    right, alone = layer.attend(Dense())[0], layer.attend(Range(0.3))[0]
    assert (found - right).norm() < 0.1 * (alone - right).norm()
    # upper halves, means, and of those that are read the lower halves and values at least
    least = (0.5 + 2 / 64) / 4 + read.group_keys * (0.5 + 2) / 4
    assert least < read.bytes < read.group_keys + (1 + 2 / 64) / 4


def test_keys_of_little_weight_are_not_read(layer: Layer) -> None:
    """Their codes tell their scores; those of much weight count by true ones."""
    few, many = (layer.attend(Remainder(alpha)) for alpha in (1e-3, 2e-4))
    assert few[1].group_keys < many[1].group_keys
    by_key = (many[1].bytes - few[1].bytes) / (many[1].group_keys - few[1].group_keys)
    assert by_key == pytest.approx((2 + 0.5) / 4, abs=0.05)
    torch.testing.assert_close(many[0], layer.attend(Dense())[0], atol=0.03, rtol=0.03)


def test_a_query_head_may_read_what_its_group_reads(layer: Layer) -> None:
    own, shared = (layer.attend(Quest(0.2, shared=each))[1] for each in (False, True))
    assert own.keys < own.group_keys == shared.group_keys == pytest.approx(shared.keys)
    assert own.bytes == shared.bytes


def test_best_k(layer: Layer) -> None:
    found, read = layer.attend(TopK(10))
    for h, g, t in ROWS:
        scores = layer.scores(h, g, t)
        best = sorted(layer.far(t), key=lambda i: -scores[i])[:10]
        torch.testing.assert_close(found[h, g, t], layer.output(h, g, t, best))
    assert read.keys == pytest.approx(sum(10 / n for n in FAR_TOKENS) / NEW_TOKENS)
    assert read.bytes == read.group_keys


def test_windows(layer: Layer) -> None:
    found, read = layer.attend(Window(0.25))
    for h, g, t in ROWS:
        longer = list(layer.far(t))[len(layer.far(t)) - round(0.25 * FAR_TOKENS[t]) :]
        torch.testing.assert_close(found[h, g, t], layer.output(h, g, t, longer))
    assert read.keys == pytest.approx(0.25, abs=0.002)
    assert read.bytes == read.group_keys == pytest.approx(read.keys)
    assert layer.attend(Window(0))[1] == Read(0, 0, 0)


def test_quest_reads_the_pages_with_the_largest_bounds(layer: Layer) -> None:
    found, read = layer.attend(Quest(0.2))
    for h, g, t in ROWS:
        query, far = layer.queries[h, g, t], layer.far(t)
        bounds = {}
        for page in range(far.start // 16, (far.stop - 1) // 16 + 1):
            keys = layer.keys[h, page * 16 : min(page * 16 + 16, CONTEXT_TOKENS)]
            bounds[page] = torch.maximum(query * keys.amin(0), query * keys.amax(0)).sum().item()
        pages = sorted(bounds, key=bounds.__getitem__, reverse=True)[: round(0.2 * len(bounds))]
        ids = [i for i in far if i // 16 in pages]
        torch.testing.assert_close(found[h, g, t], layer.output(h, g, t, ids))
    assert read.bytes == pytest.approx(read.group_keys + 2 * 2 / 16 / 4)


def test_infllm_reads_the_blocks_with_the_best_representatives(layer: Layer) -> None:
    found, read = layer.attend(InfLLM(0.4))
    for h, g, t in ROWS:
        far = layer.far(t)
        scores = {}
        for block in range(far.start // 128, (far.stop - 1) // 128 + 1):
            ids = range(block * 128, min(block * 128 + 128, CONTEXT_TOKENS))
            best = sorted(ids, key=lambda i: -layer.aids.importance[h, i].item())[:4]
            scores[block] = (layer.keys[h, best] @ layer.queries[h, g, t]).sum().item()
        blocks = sorted(scores, key=scores.__getitem__, reverse=True)[: round(0.4 * len(scores))]
        ids = [i for i in far if i // 128 in blocks]
        torch.testing.assert_close(found[h, g, t], layer.output(h, g, t, ids))
    assert read.bytes == pytest.approx(read.group_keys + 2 * 4 / 128 / 4)


def test_importance_is_the_mean_product_with_the_queries_after_a_key() -> None:
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(1, 2, 300, D, generator=generator)
    keys = torch.randn(1, 300, D, generator=generator)
    found = importance(queries, keys)[0]
    for m in (0, 20, 298):
        after = queries[0, :, m + 1 : m + 257].reshape(-1, D)
        torch.testing.assert_close(found[m], (after @ keys[0, m]).mean(), atol=1e-5, rtol=1e-4)
    assert found[299] == 0


def test_a_wave_index_of_all_clusters_is_dense(layer: Layer) -> None:
    found, read = layer.attend(Wave(1.0))
    torch.testing.assert_close(found, layer.attend(Dense())[0])
    num_clusters = CONTEXT_TOKENS // 16
    assert read.keys == 1
    assert read.bytes == pytest.approx(1 + 2 * num_clusters / CONTEXT_TOKENS / 4, abs=1e-6)


def test_a_wave_index_estimates_what_it_does_not_read() -> None:
    layer = Layer(seed=2)
    # of each cluster all keys and values are the same, so its centre says all
    generator = torch.Generator().manual_seed(5)
    num_clusters = CONTEXT_TOKENS // 16
    which = torch.randint(0, num_clusters, (CONTEXT_TOKENS,), generator=generator)
    which[torch.linspace(0, CONTEXT_TOKENS - 1, num_clusters).long()] = torch.arange(num_clusters)
    for array in (layer.keys, layer.values):
        array[:, :CONTEXT_TOKENS] = array[:, which].clone()
    found, read = layer.attend(Wave(0.1, shared=True))
    assert read.keys < 0.5
    torch.testing.assert_close(found, layer.attend(Dense())[0], atol=1e-4, rtol=1e-4)
    unread = read.bytes - read.group_keys - 2 * num_clusters / CONTEXT_TOKENS / 4
    assert 0.6 < unread / (2 * num_clusters / CONTEXT_TOKENS / 4) < 0.95


def test_the_window_must_reach_the_context(layer: Layer) -> None:
    further = torch.zeros(KV_HEADS, WINDOW_TOKENS, D)
    keys = torch.cat([layer.keys, further], 1)
    with pytest.raises(ValueError, match="260 tokens behind the context, expected at most"):
        attend(layer.queries, keys, keys, layer.aids, Dense(), SCALE)
