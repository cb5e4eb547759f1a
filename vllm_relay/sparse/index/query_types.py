# SPDX-License-Identifier: Apache-2.0
"""What a search asks for: the k best keys, or all keys within a range of the best one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class TopK:
    """The `k` keys with the largest inner products.

    Attributes:
        k: how many; fewer come back where fewer exist.
        width: how much an approximate index looks at: nodes expanded by a graph's search, lists
            probed by an inverted file, tokens taken by a block index. None: the index's own
            default, which for an index built with training queries was measured at build.
        max_dropped_mass: the most attention weight, among the keys of the index, that may be left
            out: more keys are added until a computed bound says so. That takes a look at the code
            of every key, on any index. 1.0: add none, but tell the bound.
        scale: factor of the scores in the softmax, for `max_dropped_mass`; 1 / sqrt(head_size) if
            not said.

    Raises:
        ValueError: a number is out of range.
    """

    k: int
    width: int | None = None
    max_dropped_mass: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        _check_count("k", self.k)
        if self.width is not None:
            _check_count("width", self.width)
        _check_mass(self.max_dropped_mass, self.scale)


@dataclass(frozen=True)
class Dipr:
    """A dynamic inner-product range query: every key with q.k >= max(q.k) - beta.

    Exactly one of `beta` and `alpha` is given. `alpha` in (0, 1] is the smallest attention weight
    of interest relative to the largest one, and beta = -ln(alpha) / scale, where `scale` is the
    factor of the scores in the softmax (1 / sqrt(head_size) if not said).

    Exact on a flat index. Other indexes tell by their codes what is in range, with a margin of two
    standard deviations, and may miss a key at the edge of the range at any width.

    Attributes:
        width: as for `TopK`; for a graph it is the beam floor l0: that many nodes are kept even if
            they are out of range.
        max_dropped_mass: as for `TopK`.
        estimate: attention counts what is out of range too, where the index tells its weight: by
            the means of the values of `MEAN_TOKENS` adjacent tokens. Not with `max_dropped_mass`,
            which bounds what does not count.

    Raises:
        ValueError: a number is out of range, or both or none of beta and alpha are given.

    Source: AlayaDB (2504.10326), definitions 6.1 to 6.3 and theorem 1.
    """

    beta: float | None = None
    alpha: float | None = None
    scale: float | None = None
    width: int | None = None
    max_dropped_mass: float | None = None
    estimate: bool = False

    def __post_init__(self) -> None:
        if self.estimate and self.max_dropped_mass is not None:
            raise ValueError(
                f"Dipr: max_dropped_mass={self.max_dropped_mass} with estimate=True: expected one "
                "of them, a bound of what is left out or an estimate of it"
            )
        if (self.beta is None) == (self.alpha is None):
            raise ValueError(
                f"Dipr: given beta={self.beta} and alpha={self.alpha}, expected one of them"
            )
        if self.beta is not None and not (_is_number(self.beta) and self.beta >= 0):
            raise ValueError(f"Dipr: beta is {self.beta!r}, expected a number >= 0")
        if self.alpha is not None and not (_is_number(self.alpha) and 0 < self.alpha <= 1):
            raise ValueError(f"Dipr: alpha is {self.alpha!r}, expected a number in (0, 1]")
        if self.width is not None:
            _check_count("width", self.width)
        _check_mass(self.max_dropped_mass, self.scale)

    def range(self, head_size: int) -> float:
        """beta in units of inner products."""
        if self.beta is not None:
            return self.beta
        assert self.alpha is not None
        return -math.log(self.alpha) / softmax_scale(self, head_size)


QueryType = TopK | Dipr


def softmax_scale(query: QueryType, head_size: int) -> float:
    return 1 / math.sqrt(head_size) if query.scale is None else query.scale


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def check_scale(scale: float | None) -> None:
    """
    Raises:
        ValueError: given, and no positive number.
    """
    if scale is not None and not (_is_number(scale) and scale > 0):
        raise ValueError(f"scale is {scale!r}, expected a positive number")


def _check_mass(max_dropped_mass: float | None, scale: float | None) -> None:
    if max_dropped_mass is not None and not (
        _is_number(max_dropped_mass) and 0 <= max_dropped_mass <= 1
    ):
        raise ValueError(f"max_dropped_mass is {max_dropped_mass!r}, expected a number in [0, 1]")
    check_scale(scale)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        raise ValueError(f"{name} is {value!r}, expected a whole number from 1 to {MAX_COUNT}")
