# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from vllm_relay.tables.semantic import calibration
from vllm_relay.tables.semantic.calibration import (
    Draws,
    Targets,
    Thresholds,
    calibrate,
    choose_thresholds,
    draw_rows,
)

Floats = npt.NDArray[np.float64]
Population = Callable[[np.random.Generator, int], tuple[Floats, Floats]]

SEEDS = cases(200)
ROWS = 1200


def calibrated(rng: np.random.Generator, size: int) -> tuple[Floats, Floats]:
    """Scores are the probabilities of the labels."""
    scores = rng.beta(0.2, 0.5, size)
    return scores, (rng.random(size) < scores).astype(float)


def separated(rng: np.random.Generator, size: int) -> tuple[Floats, Floats]:
    labels = (rng.random(size) < 0.3).astype(float)
    logits = 4 * (rng.normal(size=size) * 0.6 + 2 * labels - 1)
    return 1 / (1 + np.exp(-logits)), labels


def hidden(rng: np.random.Generator, size: int) -> tuple[Floats, Floats]:
    """Scores are wrong altogether for a seventh of the rows."""
    scores, labels = separated(rng, size)
    flipped = rng.random(size) < 1 / 7
    return np.where(flipped, 1 - scores, scores), labels


def useless(rng: np.random.Generator, size: int) -> tuple[Floats, Floats]:
    return rng.random(size), (rng.random(size) < 0.4).astype(float)


def inverted(rng: np.random.Generator, size: int) -> tuple[Floats, Floats]:
    scores, labels = calibrated(rng, size)
    return 1 - scores, labels


def answers(rng: np.random.Generator, size: int) -> tuple[Floats, Floats]:
    """Scores of a model without probabilities, which is wrong about one row of twelve."""
    labels = (rng.random(size) < 0.5).astype(float)
    return np.where(rng.random(size) < 1 / 12, 1 - labels, labels), labels


POPULATIONS = [calibrated, separated, hidden, useless, inverted, answers]


def shares(scores: Floats, labels: Floats, chosen: Thresholds) -> tuple[float, float]:
    """Recall and precision, where what is between the thresholds is looked at."""
    is_true = labels == 1
    found = (scores >= chosen.high) | (is_true & (scores >= chosen.low))
    right = float((found & is_true).sum())
    return right / max(is_true.sum(), 1), right / max(found.sum(), 1)


def most_failures(num_seeds: int, failure: float) -> int:
    """More happen once in ten thousand times where each seed fails with this probability."""
    rng = np.random.default_rng(0)
    return int(np.quantile(rng.binomial(num_seeds, failure, 200_000), 0.9999))


def failures(population: Population, targets: Targets, choose: Callable[..., Thresholds]) -> int:
    num_failures = 0
    for seed in range(SEEDS):
        scores, labels = population(np.random.default_rng(1000 + seed), ROWS)
        found = shares(scores, labels, choose(scores, labels, seed, targets))
        num_failures += found[0] < targets.recall or found[1] < targets.precision
    return num_failures


def chosen(scores: Floats, labels: Floats, seed: int, targets: Targets) -> Thresholds:
    return calibrate(
        scores, np.sqrt(scores), labels.__getitem__, targets, most_draws=600, seed=seed
    )


def uncertain(scores: Floats, labels: Floats, seed: int, targets: Targets) -> Thresholds:
    """What the sample says of each threshold, taken for the truth."""
    draws = draw_rows(np.sqrt(scores), 600, seed)
    own, weights, sampled = scores[draws.rows], draws.weights[draws.rows], labels[draws.rows]
    values = np.unique(own)
    total = (weights * sampled).sum()
    recalls = np.array([(weights * sampled * (own >= t)).sum() / total for t in values])
    taken = np.array([(weights * (own >= t)).sum() for t in values])
    precisions = np.array([(weights * sampled * (own >= t)).sum() for t in values]) / taken
    low, high = values[recalls >= targets.recall], values[precisions >= targets.precision]
    return Thresholds(low[-1], high[0] if len(high) else math.inf)


@pytest.mark.parametrize("population", POPULATIONS)
@pytest.mark.parametrize("targets", [Targets(0.9, 0.9, 0.8), Targets(0.8, 0.95, 0.9)])
def test_recall_and_precision_are_missed_no_more_often_than_allowed(
    population: Population, targets: Targets
) -> None:
    allowed = most_failures(SEEDS, 1 - targets.confidence)
    assert failures(population, targets, chosen) <= allowed


@pytest.mark.parametrize("population", [calibrated, hidden, inverted])
def test_recall_alone_is_missed_no_more_often_than_allowed(population: Population) -> None:
    def low_only(scores: Floats, labels: Floats, seed: int, targets: Targets) -> Thresholds:
        found = calibrate(
            scores, scores, labels.__getitem__, targets, most_draws=600, seed=seed, accepts=False
        )
        assert found.high == math.inf
        return found

    targets = Targets(0.8, 1.0, 0.8)
    assert failures(population, targets, low_only) <= most_failures(SEEDS, 0.2)


def test_without_bounds_they_are_missed_more_often() -> None:
    targets = Targets(0.9, 0.9, 0.8)
    assert failures(calibrated, targets, uncertain) > most_failures(SEEDS, 1 - targets.confidence)


@pytest.mark.parametrize(("population", "most"), [(calibrated, 0.6), (separated, 0.4)])
def test_scores_that_tell_spare_rows(population: Population, most: float) -> None:
    rng = np.random.default_rng(5)
    scores, labels = population(rng, 10_000)
    seen = np.zeros(len(scores), bool)

    def label_of(rows: npt.NDArray[np.int64]) -> Floats:
        seen[rows] = True
        return labels[rows]

    found = calibrate(
        scores, np.sqrt(scores), label_of, Targets(0.9, 0.9, 0.95), most_draws=2500, seed=3
    )
    share = (seen | found.are_between(scores)).mean()
    assert share < most
    assert seen.mean() < 0.25


@settings(max_examples=cases(100), deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=1, max_size=30),
    st.integers(1, 100),
    st.integers(0, 5),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_few_rows_and_equal_scores(
    given_scores: list[float], num_draws: int, seed: int, accepts: bool, random: Random
) -> None:
    scores = np.array(given_scores)
    labels = np.array([random.choice([0.0, 1.0, np.nan]) for _ in given_scores])
    found = calibrate(
        scores,
        np.sqrt(scores),
        lambda rows: labels[rows],
        Targets(0.9, 0.9, 0.95),
        most_draws=num_draws,
        seed=seed,
        accepts=accepts,
    )
    assert accepts or found.high == math.inf
    assert found.low in (-math.inf, *given_scores) and found.high in (math.inf, *given_scores)
    # without labels nothing is certain
    unknown = np.full(num_draws, np.nan)
    draws = draw_rows(np.sqrt(scores), num_draws, seed)
    assert choose_thresholds(scores, draws, unknown, Targets(0.9, 0.9, 0.95)) == Thresholds()


def test_how_many_labels_it_takes() -> None:
    scores = np.concatenate([np.zeros(500), np.ones(500)])
    targets = Targets(0.9, 1.0, 0.95)

    def low_of(num_above: int, num_below: int) -> float:
        """With so many true rows of the sample above and below."""
        draws = Draws(np.arange(400, 500 + num_above), np.ones(1000))
        labels = scores[draws.rows].copy()
        labels[:num_below] = 1
        return choose_thresholds(scores, draws, labels, targets).low

    # 0.9 to the power of 36 is below 0.025, and the best bet is not known before
    needed = next(count for count in range(500) if low_of(count, 0) == 1.0)
    assert 36 <= needed <= 48
    assert low_of(needed, 1) == -math.inf
    assert low_of(needed + 40, 1) == 1.0
    # a recall of 0.8 is below 0.9
    assert low_of(80, 20) == -math.inf


def test_draws_have_the_weights_of_their_probabilities() -> None:
    importance = np.array([0.0, 1.0, 3.0, 0.0])
    draws = draw_rows(importance, 200_000, 1)
    counts = np.bincount(draws.rows, minlength=4) / 200_000
    share = calibration._UNIFORM_SHARE
    expected = share / 4 + (1 - share) * importance / 4
    np.testing.assert_allclose(counts, expected, atol=0.005)
    np.testing.assert_allclose(draws.weights, 1 / (4 * expected))
    assert draw_rows(np.zeros(3), 5, 0).weights.tolist() == [1.0] * 3


@pytest.mark.parametrize("name", ["recall", "precision", "confidence"])
def test_targets_are_shares(name: str) -> None:
    given = {"recall": 0.9, "precision": 0.9, "confidence": 0.9}
    for value in (0, -0.1, 1.1):
        with pytest.raises(ValueError, match=f"{name}={value} given, expected a share"):
            Targets(**{**given, name: value})
