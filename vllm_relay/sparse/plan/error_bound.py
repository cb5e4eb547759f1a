# SPDX-License-Identifier: Apache-2.0
"""What 99% of all queries keep to, going by the errors of a sample of them."""

from __future__ import annotations

import math

import numpy as np

_DESIGN_EFFECT = 3.0
"""The queries of one token err alike: so many tell as much as one alone. With the four query heads
of benchmarks/sparse it is 1.2 to 3.0."""
_DEVIATIONS = 1.6
"""Of a normal distribution, 95% lies below so many above its mean."""
_GROWTH_BEYOND = 50.0
"""How an error grows, relative to the largest of a sample, with the quantile behind its end."""


def error_p99_upper(errors: np.ndarray) -> float:
    """An upper confidence bound of the 99% quantile: in about nineteen samples of twenty, it is at
    least that of all queries.

    It is the quantile that lies 1.6 standard deviations of the number of larger errors further out;
    so heads with long tails get a wide margin, others a narrow one. Where a sample is too small to
    have that quantile, the largest error grows by what is missing.

    Args:
        errors: [queries], at least one.

    Source: order statistics as confidence limits of quantiles: David and Nagaraja, Order
    Statistics, section 7.1, in the normal approximation of the binomial distribution.
    """
    quantile = 0.99 + _DEVIATIONS * math.sqrt(0.99 * 0.01 * _DESIGN_EFFECT / errors.size)
    bound = float(np.quantile(errors, min(quantile, 1.0)))
    return bound * (1 + _GROWTH_BEYOND * max(0.0, quantile - 1))
