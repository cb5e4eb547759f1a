# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from benchmarks.sparse.heads.corpus import make_head
from benchmarks.sparse.searches import exact
from tests.support import reference
from vllm_relay.sparse import Dipr, TopK


@pytest.fixture(params=["rope", "hubs", "negative"])
def head(request: pytest.FixtureRequest):
    return make_head(request.param, keys=700, train=10, tests=33, head_size=32)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "BLOCK_SCORES", 7 * 700)


def test_top_k_is_the_oracles(head) -> None:
    queries = head.queries[:, 0]
    ids, _ = reference.search(queries, head.keys, TopK(17))
    np.testing.assert_array_equal(exact.top_k(queries, head.keys, 17), np.stack(ids))


def test_ranges_are_the_oracles(head) -> None:
    queries = head.queries[:, 0]
    ids, _ = reference.search(queries, head.keys, Dipr(beta=20.0))
    for found, true_ids in zip(exact.ranges(queries, head.keys, 20.0), ids, strict=True):
        np.testing.assert_array_equal(found, np.sort(true_ids))


def test_attention_is_the_oracles(head) -> None:
    queries = head.queries[:, 0]
    everything = [np.arange(700)] * len(queries)
    output, _ = reference.attend(queries, head.keys, head.values, everything)
    mine = exact.attention(queries, head.keys, head.values, head.scale)
    np.testing.assert_allclose(mine, output, atol=1e-4)


def test_range_mass_is_the_part_of_the_range_that_was_found(head) -> None:
    queries = head.queries[:, 0]
    truth = exact.ranges(queries, head.keys, 20.0)
    found = [np.append(ids[::2], 699) for ids in truth]
    mass = exact.range_mass(found, truth, queries, head.keys, head.scale)
    for i, (ids, true_ids) in enumerate(zip(found, truth, strict=True)):
        dropped = reference.dropped_mass(queries[i : i + 1], head.keys[true_ids], [
            np.flatnonzero(np.isin(true_ids, ids))
        ])  # fmt: skip
        assert mass[i] == pytest.approx(1 - dropped[0], abs=1e-5)
    nothing = [np.array([], np.int32)] * len(queries)
    assert exact.range_mass(nothing, truth, queries, head.keys, head.scale).max() == 0


def test_recall_counts_found_keys_once_and_ignores_fillers(head) -> None:
    queries = head.queries[:4, 0]
    truth = exact.top_k(queries, head.keys, 10)
    worst = np.argsort(queries @ head.keys.T, axis=1)[:, :5]
    found = [
        truth[0],
        truth[1, :7],
        np.concatenate([truth[2, :3], truth[2, :3], [-1, -1], worst[2]]),
        np.array([-1] * 10),
    ]
    recall = exact.recall(found, queries, head.keys, truth)
    np.testing.assert_allclose(recall, [1, 0.7, 0.3, 0])


def test_recall_takes_any_of_equal_keys() -> None:
    head = make_head("duplicates", keys=640, train=10, tests=20, head_size=32)
    queries = head.queries[:, 0]
    truth = exact.top_k(queries, head.keys, 10)
    copies = [np.flatnonzero((head.keys == head.keys[ids[0]]).all(axis=1))[-10:] for ids in truth]
    assert any(len(np.intersect1d(a, b)) < 10 for a, b in zip(copies, truth, strict=True))
    assert exact.recall(copies, queries, head.keys, truth).min() == 1
