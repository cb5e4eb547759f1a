# SPDX-License-Identifier: Apache-2.0
"""Keys and queries of the kinds that attention has, and of kinds made to mislead an index."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vllm_relay.sparse.index.elements import Elements, from_float32


class KeySet(NamedTuple):
    """float32 [n, d], [queries, d] and [training queries, d]."""

    keys: np.ndarray
    queries: np.ndarray
    train: np.ndarray


def key_set(kind: str, num_keys: int, head_size: int, seed: int = 0) -> KeySet:
    """One of `KINDS`; 32 queries, and two training queries for every five keys."""
    rng = np.random.default_rng([seed, num_keys, head_size])
    keys = KINDS[kind](rng, num_keys, head_size).astype(np.float32)
    queries = _queries(kind, rng, keys, 32 + max(64, 2 * num_keys // 5))
    return KeySet(keys, queries[:32], queries[32:])


def _normal(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    return rng.standard_normal((n, d))


def _rope(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    """A few hundred tokens of a vocabulary, turned by their positions."""
    content = rng.standard_normal((300, d)) + 2 * rng.standard_normal(d)
    return rotate(content[rng.integers(0, 300, n)], np.arange(n))


def _hubs(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    keys = rng.standard_normal((n, d))
    keys[:, 0] += 3 * rng.pareto(3, n)
    return keys


def _duplicates(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    return rng.standard_normal((max(1, n // 20), d))[rng.integers(0, max(1, n // 20), n)]


def _flat(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    return 5 * rng.standard_normal(d) + 0.05 * rng.standard_normal((n, d))


def _outliers(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    keys = rng.standard_normal((n, d))
    chosen = rng.choice(n, min(n // 9, 5), replace=False)
    keys[chosen] *= 10.0 ** rng.uniform(3, 6, (len(chosen), 1))
    return keys


KINDS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "random": _normal,
    "rope": _rope,
    "hubs": _hubs,
    "duplicates": _duplicates,
    "flat": _flat,
    "needle": _normal,
    "outliers": _outliers,
}


def _queries(kind: str, rng: np.random.Generator, keys: np.ndarray, count: int) -> np.ndarray:
    n, d = keys.shape
    near = keys[rng.integers(0, n, count)]
    noise = rng.standard_normal((count, d)).astype(np.float32)
    if kind == "needle":
        return 3 * near + 0.1 * noise
    if kind == "hubs":
        noise[:, 0] = np.abs(noise[:, 0]) + 2
        return noise
    if kind == "outliers":
        return noise
    return 0.5 * near + noise


def rotate(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotary position embedding of [n, d]; an odd last dimension stays."""
    half = rows.shape[1] // 2
    angles = positions[:, None] * 10_000.0 ** (-np.arange(half) / max(1, half))
    a, b = rows[:, :half], rows[:, half : 2 * half]
    turned = [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)]
    return np.concatenate([*turned, rows[:, 2 * half :]], axis=1)


TRAPS = (
    "random",
    "near duplicates",
    "duplicates",
    "constant dimensions",
    "constant keys",
    "negative scores",
    "norm outliers",
    "element outliers",
    "one wide dimension",
    "far from zero",
    "zero keys",
    "zero queries",
    "integers",
)
MAGNITUDES = (1.0, 1e-30, 1e-18, 1e-6, 1e4, 1e12)


def trap(
    name: str,
    rng: np.random.Generator,
    num_keys: int,
    head_size: int,
    num_queries: int,
    key_magnitude: float = 1.0,
    query_magnitude: float = 1.0,
    dtype: str = "float32",
) -> tuple[Elements, np.ndarray]:
    """Keys and float32 queries where rounding to eight bits misleads, or where there is little to
    tell keys apart. The magnitudes of keys count for float32 only."""
    keys = rng.standard_normal((num_keys, head_size))
    queries = rng.standard_normal((num_queries, head_size))
    some = rng.integers(0, num_keys, max(1, num_keys // 10))
    if name == "near duplicates":
        keys = keys[rng.integers(0, max(1, num_keys // 30), num_keys)]
        keys += 10.0 ** rng.uniform(-5, -2) * rng.standard_normal(keys.shape)
    elif name == "duplicates":
        keys = keys[rng.integers(0, max(1, num_keys // 5), num_keys)]
    elif name == "constant dimensions":
        keys[:, rng.random(head_size) < 0.7] = rng.standard_normal()
    elif name == "constant keys":
        keys[:] = keys[0]
    elif name == "negative scores":
        keys = np.abs(keys)
        queries = -np.abs(queries)
    elif name == "norm outliers":
        keys[some[:6]] *= 10.0 ** rng.uniform(3, 6)
    elif name == "element outliers":
        keys[some, rng.integers(0, head_size, len(some))] *= 10.0 ** rng.uniform(1, 4)
    elif name == "one wide dimension":
        keys[:, 0] *= 1000
        queries[:, 0] /= 1000
    elif name == "far from zero":
        keys += 100 * rng.standard_normal(head_size)
    elif name == "zero keys":
        keys[rng.random(num_keys) < 0.7] = 0
    elif name == "zero queries":
        queries[rng.random(num_queries) < 0.6] = 0
    elif name == "integers":
        keys, queries = np.round(2 * keys), np.round(2 * queries)
    if dtype == "float32":
        keys *= key_magnitude
    elif dtype == "float16":
        keys = np.clip(keys, -6e4, 6e4)
    return (
        from_float32(keys.astype(np.float32), dtype),
        (queries * query_magnitude).astype(np.float32),
    )
