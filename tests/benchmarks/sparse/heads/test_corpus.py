# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np
import pytest

from benchmarks.sparse.heads.corpus import (
    COPIES_PER_KEY,
    KINDS,
    NUM_SINKS,
    OUTLIER_FACTOR,
    SINK_MASS,
    Head,
    make_head,
)
from tests.benchmarks.sparse.heads import head_statistics

KEYS, TRAIN, TESTS, HEADS, HEAD_SIZE = 3000, 500, 40, 3, 64


def small(kind: str, **changes: object) -> Head:
    settings = {
        "keys": KEYS, "train": TRAIN, "tests": TESTS, "heads": HEADS, "head_size": HEAD_SIZE,
    }  # fmt: skip
    return make_head(kind, **(settings | changes))


def median_tokens(head: Head, mass: float = 0.9) -> float:
    weights = head_statistics.sorted_weights(head)
    return float(np.median(head_statistics.tokens_for_mass(weights, mass)))


def softmax(head: Head) -> np.ndarray:
    queries = head.queries.reshape(-1, head.head_size)
    return head_statistics.softmax_weights(queries, head.keys[: head.prefix_len], head.scale)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes(kind: str) -> None:
    head = small(kind)
    num_keys = 1 if kind == "one_key" else KEYS
    assert head.name == kind
    assert head.keys.shape == head.values.shape == (num_keys, HEAD_SIZE)
    assert head.train_queries.shape == (TRAIN, HEAD_SIZE)
    assert head.queries.shape == (TESTS, HEADS, HEAD_SIZE)
    assert head.prefix_len == head.num_keys == num_keys
    assert head.scale == HEAD_SIZE**-0.5
    for array in (head.keys, head.values, head.train_queries, head.queries):
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        assert np.isfinite(array).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_decides_everything(kind: str) -> None:
    first, again, other = (small(kind, seed=seed) for seed in (1, 1, 2))
    for field in ("keys", "values", "train_queries", "queries"):
        np.testing.assert_array_equal(getattr(first, field), getattr(again, field))
        assert not np.array_equal(getattr(first, field), getattr(other, field))


@pytest.mark.parametrize("kind", KINDS)
def test_reuse_changes_nothing_but_test_queries(kind: str) -> None:
    whole, part = small(kind), small(kind, reuse=0.2)
    for field in ("keys", "values", "train_queries"):
        np.testing.assert_array_equal(getattr(whole, field), getattr(part, field))
    assert part.prefix_len == max(1, whole.num_keys // 5)


def test_rope_positions_of_reusing_queries_follow_the_prefix() -> None:
    whole, part = small("rope"), small("rope", reuse=0.2)
    half = HEAD_SIZE // 2
    for head, begin in ((whole, KEYS), (part, KEYS // 5)):
        # the fastest pair turns by one radian per token
        pair = head.queries[:, 0, 0] + 1j * head.queries[:, 0, half]
        turned_back = pair * np.exp(-1j * (begin + np.arange(TESTS)))
        if head is whole:
            expected = turned_back
    np.testing.assert_allclose(turned_back, expected, atol=1e-3)
    assert not np.allclose(whole.queries, part.queries, atol=0.1)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"negative"}))  # moved away from every query
@pytest.mark.parametrize("changes", [{"head_noise": 0.6}, {"heads": 1}])
def test_keys_and_first_head_do_not_depend_on_the_others(
    kind: str, changes: dict[str, float]
) -> None:
    head, other = small(kind), small(kind, **changes)
    np.testing.assert_array_equal(head.keys, other.keys)
    np.testing.assert_array_equal(head.values, other.values)
    np.testing.assert_allclose(head.queries[:, 0], other.queries[:, 0], atol=1e-5)


@pytest.mark.parametrize("kind", ["rope", "hubs"])
def test_heads_agree_less_the_more_noise_they_have(kind: str) -> None:
    same, near, far = (
        head_statistics.top_k_overlap(small(kind, head_noise=noise)) for noise in (0, 0.25, 0.5)
    )
    assert same == 1
    assert 0.95 > near > far + 0.05 > 0.4


@pytest.mark.parametrize("kind", ["rope", "hubs"])
def test_training_queries_come_from_every_head(kind: str) -> None:
    """With noise so large that heads differ in length, a mixture has all lengths."""
    alone, mixed = (small(kind, heads=heads, head_noise=20) for heads in (1, 3))
    lengths = np.linalg.norm(alone.train_queries, axis=1)
    shares = (np.linalg.norm(mixed.train_queries, axis=1) > 3 * lengths.max()).mean()
    assert 0.5 < shares < 0.8


def test_rope_concentrates_and_has_best_keys_of_its_own() -> None:
    head = small("rope", heads=1)
    assert median_tokens(head) < 0.05 * KEYS
    assert head_statistics.distinct_best_keys(head) > 0.5
    of_queries, of_keys = head_statistics.mahalanobis(head)
    assert of_queries > 1.5 * of_keys


def test_hubs_are_the_best_keys_of_most_queries() -> None:
    head = small("hubs", heads=1)
    assert head_statistics.distinct_best_keys(head) < 0.3
    of_queries, of_keys = head_statistics.mahalanobis(head)
    assert of_queries > 2 * of_keys


def test_sinks_take_most_of_the_mass_and_have_no_values() -> None:
    head = small("sinks")
    mass = softmax(head)[:, :NUM_SINKS].sum(axis=1)
    assert abs(mass.mean() - SINK_MASS) < 0.08
    lengths = np.linalg.norm(head.values, axis=1)
    assert lengths[:NUM_SINKS].max() < 0.05 * lengths[NUM_SINKS:].min()


def test_flat_needs_most_tokens() -> None:
    assert median_tokens(small("flat")) > 0.75 * KEYS


@pytest.mark.parametrize("reuse", [1.0, 0.3])
def test_local_looks_at_the_last_tokens(reuse: float) -> None:
    head = small("local", reuse=reuse)
    assert softmax(head)[:, -64:].sum(axis=1).mean() > 0.8


@pytest.mark.parametrize("reuse", [1.0, 0.1])
def test_needle_is_one_key_for_every_query(reuse: float) -> None:
    weights = softmax(small("needle", reuse=reuse))
    assert weights.max(axis=1).min() > 0.99
    assert len(set(weights.argmax(axis=1).tolist())) == 1


def test_duplicates_are_exact_and_spread_over_the_context() -> None:
    head = small("duplicates")
    distinct, copies = np.unique(head.keys, axis=0, return_counts=True)
    assert len(distinct) == KEYS // COPIES_PER_KEY
    assert copies.min() >= COPIES_PER_KEY
    assert len(np.unique(head.keys[: KEYS // 4], axis=0)) > 0.9 * len(distinct)


def test_norm_outliers_are_few_and_win() -> None:
    head = small("norm_outliers", heads=1)
    lengths = np.linalg.norm(head.keys, axis=1)
    outliers = lengths > OUTLIER_FACTOR / 2 * np.median(lengths)
    assert 0 < outliers.mean() < 0.02
    best = (head.queries[:, 0] @ head.keys.T).argmax(axis=1)
    assert outliers[best].mean() > 0.5


def test_negative_has_no_score_above_zero() -> None:
    head = small("negative")
    assert (head.queries.reshape(-1, HEAD_SIZE) @ head.keys.T).max() < 0
    assert (head.train_queries @ head.keys.T).max() < 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "ropes"}, "kind is 'ropes', expected one of rope"),
        ({"keys": 0}, "keys is 0, expected at least 1"),
        ({"train": 0}, "train is 0"),
        ({"tests": 0}, "tests is 0"),
        ({"heads": 0}, "heads is 0"),
        ({"head_size": 6}, "head_size is 6, expected at least 8"),
        ({"head_size": 65}, "head_size is 65, expected an even number"),
        ({"head_noise": -1}, "head_noise is -1"),
        ({"reuse": 0}, "reuse is 0"),
        ({"reuse": 1.1}, "reuse is 1.1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_arguments_out_of_range_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**({"kind": "flat"} | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_keys_than_anything_else(kind: str) -> None:
    head = small(kind, keys=2, train=50, reuse=0.5)
    assert head.prefix_len == 1
    assert all(len(getattr(head, f.name)) for f in dataclasses.fields(head)[1:5])
