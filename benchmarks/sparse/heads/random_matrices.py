# SPDX-License-Identifier: Apache-2.0
"""The random ingredients of made-up heads."""

import numpy as np


def normal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """float32 [rows, columns]"""
    return rng.standard_normal((rows, columns), dtype=np.float32)


def power_law(size: int, exponent: float) -> np.ndarray:
    """float32 [size]; 1, 2^-exponent, 3^-exponent, ..."""
    return (np.arange(1, size + 1) ** -exponent).astype(np.float32)


def rotation(rng: np.random.Generator, size: int) -> np.ndarray:
    """float32 [size, size], orthogonal."""
    return np.linalg.qr(rng.standard_normal((size, size)))[0].astype(np.float32)


def noisy_heads(
    rng: np.random.Generator, queries: np.ndarray, heads: int, noise: float
) -> np.ndarray:
    """[m, heads, d]; the first head's queries [m, d], and for the others those with normal noise.

    Args:
        noise: its deviation as a fraction of that of the queries, channel by channel.
    """
    rng = rng.spawn(1)[0]  # what follows from `rng` does not depend on the number of heads
    deviation = noise * queries.std(axis=0)
    others = [queries + deviation * normal(rng, *queries.shape) for _ in range(heads - 1)]
    return np.stack([queries, *others], axis=1)


def take_heads(rng: np.random.Generator, queries: np.ndarray) -> np.ndarray:
    """[m, d]; the query of one head at random from each of [m, heads, d]."""
    rng = rng.spawn(1)[0]
    return queries[np.arange(len(queries)), rng.integers(0, queries.shape[1], len(queries))]
