# SPDX-License-Identifier: Apache-2.0
"""How far log-probabilities are from those of dense attention, at how many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.sparse.real_heads.model import Read

NUM_COMPARED = 10
LEAST_ERROR = 1e-9  # below what float32 tells
LEAST_BYTES = 1e-6  # for the logarithm of a selection that reads nothing


@dataclass(frozen=True)
class Errors:
    """Of one selection behind one passage.

    Attributes:
        differences: [tokens * NUM_COMPARED] |log-probability - dense| of dense's likeliest tokens.
        divergences: [tokens] the Kullback-Leibler divergence from dense.
        same_best: bool [tokens]
    """

    differences: np.ndarray
    divergences: np.ndarray
    same_best: np.ndarray
    read: Read

    @classmethod
    def between(cls, dense: torch.Tensor, found: torch.Tensor, read: Read) -> Errors:
        """Log-probabilities [tokens, vocabulary] each."""
        likeliest = dense.topk(min(NUM_COMPARED, dense.shape[1]), -1).indices
        differences = (found - dense).gather(-1, likeliest).abs()
        divergences = (dense.exp() * (dense - found)).sum(-1)
        same = dense.argmax(-1) == found.argmax(-1)
        return cls(differences.flatten().numpy(), divergences.numpy(), same.numpy(), read)


@dataclass(frozen=True)
class Summary:
    """Over all passages."""

    read: Read
    mean: float
    p99: float
    divergence: float
    same_best: float

    @classmethod
    def of(cls, passages: Sequence[Errors]) -> Summary:
        differences = np.concatenate([each.differences for each in passages])
        return cls(
            read=Read.mean([each.read for each in passages]),
            mean=float(differences.mean()),
            p99=float(np.quantile(differences, 0.99)),
            divergence=float(np.mean(np.concatenate([each.divergences for each in passages]))),
            same_best=float(np.mean(np.concatenate([each.same_best for each in passages]))),
        )


def at_bytes(wanted: float, num_bytes: Sequence[float], errors: Sequence[float]) -> float | None:
    """The error at so many bytes, between measured ones: straight in the logarithms of both.

    None where the wanted bytes are outside of the measured ones.
    """
    order = np.argsort(num_bytes)
    x, y = np.asarray(num_bytes, float)[order], np.asarray(errors, float)[order]
    if not x[0] <= wanted <= x[-1]:
        return None
    x, y = np.log(np.maximum(x, LEAST_BYTES)), np.log(np.maximum(y, LEAST_ERROR))
    return float(np.exp(np.interp(np.log(max(wanted, LEAST_BYTES)), x, y)))
