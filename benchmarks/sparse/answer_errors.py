# SPDX-License-Identifier: Apache-2.0
"""How far off attention is with the best keys of a query alone, for ever more of them."""

from __future__ import annotations

import numpy as np

SMALL_ERROR = 1e-4
"""Answers that hold one that is off by less are not looked at: nobody needs them."""
_SMALL_LOST_MASS = 1e-2
"""With more than that left out, whether the error is small is not looked at."""
_CHUNK_KEYS = 1024


class AnswerErrors:
    """
    Args:
        values: float32 [n, value_size].
    """

    def __init__(self, values: np.ndarray) -> None:
        self._values = values
        self._rows = np.empty((min(_CHUNK_KEYS, len(values)), values.shape[1]), np.float32)

    def of_query(
        self,
        order: np.ndarray,
        weights: np.ndarray,
        ends: np.ndarray,
        masses: np.ndarray,
        whole: np.ndarray,
    ) -> np.ndarray:
        """float64 [answers]; relative L2 errors of attention over each of `order[:end]`.

        Each answer adds to the one before, so that a value is read once.

        Args:
            order: int64; keys by falling weight, as many as the largest answer holds.
            weights: float32; theirs, before they are normalised.
            ends: [answers], from 1 to the length of `order`, in any order.
            masses: [answers], the part of the weight of all keys that each holds.
            whole: [value_size], the sum of all values, each by the weight of its key.
        """
        rising, firsts, places = np.unique(ends, return_index=True, return_inverse=True)
        shares = masses[firsts]
        length = max(float(np.linalg.norm(whole)), float(np.finfo(np.float32).tiny))
        parts = np.empty((len(rising), len(whole)))
        part = np.zeros(len(whole))
        begin, known = 0, len(rising)
        for i, end in enumerate(rising.tolist()):
            part = part + self._sum(order[begin:end], weights[begin:end])
            parts[i], begin = part, end
            is_nearly_all = 1 - shares[i] < _SMALL_LOST_MASS
            if is_nearly_all and _length(part / shares[i] - whole) < SMALL_ERROR * length:
                known = i + 1
                break
        errors = np.linalg.norm(parts[:known] / shares[:known, None] - whole, axis=1) / length
        errors[rising[:known] == len(self._values)] = 0.0
        return errors[np.minimum(places, known - 1)]

    def _sum(self, keys: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """[value_size]; of the values of these keys."""
        total = np.zeros(self._values.shape[1], np.float32)
        for begin in range(0, len(keys), _CHUNK_KEYS):
            chunk = slice(begin, begin + _CHUNK_KEYS)
            rows = self._rows[: len(keys[chunk])]
            np.take(self._values, keys[chunk], axis=0, out=rows, mode="clip")
            total += weights[chunk] @ rows
        return total


def _length(vector: np.ndarray) -> float:
    return float(np.sqrt(vector @ vector))
