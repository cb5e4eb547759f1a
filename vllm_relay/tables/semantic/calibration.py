# SPDX-License-Identifier: Apache-2.0
"""Thresholds of scores between which a row is worth asking about, from a labelled sample.

Kang et al., "Approximate Selection with Guarantees using Proxies", VLDB 2020 (SUPG): rows are drawn
by importance, mixed with uniform draws. Their bounds hold for large samples; those here for samples
of any size and scores of any quality. A threshold is tested by bets whose capital does not grow on
average where the threshold is wrong, and so is seldom large at any time (Ville's inequality;
Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", 2023): the
sample may end as soon as it says enough. Thresholds for recall are tested from the safest on, up to
the first that fails, which needs no correction for their number (Angelopoulos et al., "Learn then
Test", 2021); those for precision share the failures that are allowed.

Whatever the scores are, rows that are left out unseen must be shown to hold few true ones: with a
recall of 0.9 and a confidence of 0.95 in it that takes about 45 true rows in the sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_UNIFORM_SHARE = 0.8
"""Of the draws: no row's weight is above its inverse, and what a row may hide decides how many
draws are needed."""
_FIRST_DRAWS = 200
_MOST_THRESHOLDS = 100
_NUM_ACCEPTING = 16
_LARGEST_ACCEPTED_SHARE, _NEXT_ACCEPTED = 0.95, 0.75
"""Of the rows, that thresholds for precision accept: each accepts this part of the one before."""
_STAKES = np.array([0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95, 1.0])[:, None, None]
"""Of the capital; the mean of their capitals is a capital too."""


@dataclass(frozen=True)
class Targets:
    """
    Attributes:
        recall: of the rows that are true, how many are found at least; a share.
        precision: of the rows that are found, how many are true at least; a share.
        confidence: the probability that both hold at least.

    Raises:
        ValueError: one is not within 0 and 1.
    """

    recall: float
    precision: float
    confidence: float

    def __post_init__(self) -> None:
        for name, most in (("recall", 1.0), ("precision", 1.0), ("confidence", 0.9999)):
            value = getattr(self, name)
            is_number = isinstance(value, Real)
            if not is_number or not 0 < value <= most:
                raise ValueError(
                    f"{name}={value!r} given, expected a share above 0, {most} at most"
                )


@dataclass(frozen=True)
class Thresholds:
    """
    Attributes:
        low: rows with lower scores are left out; -inf leaves out none.
        high: rows with this score or a higher one are taken, also if they are below `low`; inf
            takes none.
    """

    low: float = -math.inf
    high: float = math.inf

    def are_between(self, scores: Floats) -> npt.NDArray[np.bool_]:
        """Of rows that are neither left out nor taken, [rows]."""
        return (scores >= self.low) & (scores < self.high)


@dataclass(frozen=True)
class Draws:
    """Rows drawn with replacement, independent of each other.

    Attributes:
        rows: int64 [draws].
        weights: of each row of the table: its uniform probability by that with which it is drawn,
            [rows].
    """

    rows: npt.NDArray[np.int64]
    weights: Floats


LabelOf = Callable[[npt.NDArray[np.int64]], Floats]
"""Labels of rows, 1 where they are true, 0 where not and NaN where that cannot be known, [rows]."""


def calibrate(
    scores: Floats,
    importance: Floats,
    label_of: LabelOf,
    targets: Targets,
    *,
    most_draws: int,
    seed: int,
    accepts: bool = True,
) -> Thresholds:
    """Draw and label rows until more labels are not worth it, and choose thresholds.

    Args:
        scores: of all rows, [rows].
        importance: of each row, 0 or more, [rows].
        label_of: is asked about rows of the sample; those that were asked about may come again.
        most_draws: of rows, some of them several times.
        accepts: see `choose_thresholds`.
    """
    draws = draw_rows(importance, most_draws, seed)
    labels = np.empty(0)
    chosen, num_between, num_idle = Thresholds(), len(scores), 0
    while len(labels) < most_draws:
        num_new = min(max(len(labels), _FIRST_DRAWS), most_draws - len(labels))
        new = draws.rows[len(labels) : len(labels) + num_new]
        labels = np.append(labels, label_of(new))
        before = num_between
        part = Draws(draws.rows[: len(labels)], draws.weights)
        chosen = choose_thresholds(scores, part, labels, targets, accepts=accepts)
        num_between = int(chosen.are_between(scores).sum())
        # labels are worth it as long as they spare as many
        num_idle = num_idle + 1 if before - num_between < num_new else 0
        is_whole = chosen.high < math.inf or not accepts
        if num_between == 0 or (chosen.low > -math.inf and num_idle > (0 if is_whole else 1)):
            break
    return chosen


def draw_rows(importance: Floats, num_draws: int, seed: int) -> Draws:
    """
    Args:
        importance: of each row, 0 or more, [rows].
    """
    num_rows = len(importance)
    total = float(importance.sum())
    probabilities = np.full(num_rows, 1 / num_rows)
    if total > 0:
        probabilities *= _UNIFORM_SHARE
        probabilities += (1 - _UNIFORM_SHARE) * importance / total
    rng = np.random.default_rng(seed)
    rows = rng.choice(num_rows, num_draws, p=probabilities / probabilities.sum())
    return Draws(rows, 1 / (num_rows * probabilities))


def choose_thresholds(
    scores: Floats, draws: Draws, labels: Floats, targets: Targets, *, accepts: bool = True
) -> Thresholds:
    """The thresholds that leave least between them, of those that are certain enough.

    Args:
        scores: of all rows, [rows].
        labels: of the rows of `draws`, 1 where they are true, else 0; NaN where that is not known,
            and such rows count as none, [draws].
        accepts: whether rows may be taken without a look: else precision is no matter.

    Returns:
        Rows between the thresholds are to be looked at. With the probability of the targets their
        recall and their precision are kept, if what is found by looking is right.
    """
    failure = 1 - targets.confidence
    if accepts:
        failure /= 2
    return Thresholds(
        _low(scores, draws, labels, targets.recall, failure),
        _high(scores, draws, labels, targets.precision, failure) if accepts else math.inf,
    )


def _low(scores: Floats, draws: Draws, labels: Floats, recall: float, failure: float) -> float:
    values = np.unique(scores)[1:]
    places = np.linspace(0, len(values) - 1, min(len(values), _MOST_THRESHOLDS)).round()
    thresholds = values[places.astype(np.int64)]
    if not len(thresholds):
        return -math.inf
    # the others gain and lose nothing
    true = draws.rows[labels == 1]
    # the sum of these over all rows is 0 or more exactly where the recall is kept
    gains = (scores[true] >= thresholds[:, None]) - recall
    losses = recall * _largest_weights(scores, draws.weights, thresholds, above=False)
    certain = _capitals(gains * draws.weights[true], losses) >= 1 / failure
    num_certain = len(certain) if certain.all() else int(np.argmin(certain))
    return float(thresholds[num_certain - 1]) if num_certain else -math.inf


def _high(scores: Floats, draws: Draws, labels: Floats, precision: float, failure: float) -> float:
    shares = _LARGEST_ACCEPTED_SHARE * _NEXT_ACCEPTED ** np.arange(_NUM_ACCEPTING)
    thresholds = np.unique(np.quantile(scores, 1 - shares, method="higher"))
    taken = scores[draws.rows] >= thresholds[:, None]
    gains = taken * np.nan_to_num(labels - precision)
    losses = precision * _largest_weights(scores, draws.weights, thresholds, above=True)
    capitals = _capitals(gains * draws.weights[draws.rows], losses)
    certain = thresholds[capitals >= len(thresholds) / failure]
    return float(certain[0]) if len(certain) else math.inf


def _largest_weights(scores: Floats, weights: Floats, thresholds: Floats, *, above: bool) -> Floats:
    """Of the rows below each threshold, or of the others, [thresholds]."""
    order = np.argsort(scores, kind="stable")
    places = np.searchsorted(scores[order], thresholds)
    if above:
        return np.maximum.accumulate(weights[order][::-1])[::-1][places]
    return np.maximum.accumulate(weights[order])[places - 1]


def _capitals(gains: Floats, losses: Floats) -> Floats:
    """What a bet of 1 on each threshold has become, [thresholds].

    Where the gains are 0 or less on average, 1 or less is expected.

    Args:
        gains: of each draw, [thresholds, draws].
        losses: no draw can lose more, [thresholds].
    """
    bets = _STAKES * (gains / losses[:, None])
    with np.errstate(divide="ignore"):
        logs = np.log1p(np.maximum(bets, -1.0)).sum(axis=2)
    return np.exp(np.minimum(logs, 700.0)).mean(axis=0)
