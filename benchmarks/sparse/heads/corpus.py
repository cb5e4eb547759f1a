# SPDX-License-Identifier: Apache-2.0
"""Keys, values and queries shaped like those of attention heads, float32, made from a seed.

rope           hidden states of a token and topic process through low-rank projections that
               queries and keys share in part, with biases in the slow rotary pairs: queries and
               keys differ in distribution, and most queries have a best key of their own
hubs           clustered keys and queries around different means: a few keys are the best ones
               of thousands of queries
sinks          the first tokens take most of the mass, and their values are near 0
flat           nearly uniform attention, as in first layers
local          keys drift from token to token, and queries look for the latest
needle         one key far above all others, for every query
duplicates     every key stands there many times
norm_outliers  a few keys are many times longer than the others
negative       all scores are below 0
one_key        a single key
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from benchmarks.sparse.heads import rope
from benchmarks.sparse.heads.random_matrices import (
    noisy_heads,
    normal,
    power_law,
    rotation,
    take_heads,
)
from benchmarks.sparse.heads.shape import Shape

NUM_SINKS = 4
SINK_MASS = 0.85
SINK_VALUE_FACTOR = 0.01
NEEDLE_MARGIN_NATS = 12.0
COPIES_PER_KEY = 64
OUTLIER_FRACTION, OUTLIER_FACTOR = 0.005, 8.0


@dataclass(frozen=True)
class Head:
    """One kv head of one context, and the queries of the query heads that share it.

    Attributes:
        keys, values: [n, d], in token order.
        train_queries: [m, d]; of all query heads of the group, mixed.
        queries: [tests, heads, d]; of tokens that follow the first `prefix_len`.
        prefix_len: how many of the keys the queries may see.
        scale: the factor of scores in the softmax.
    """

    name: str
    keys: np.ndarray
    values: np.ndarray
    train_queries: np.ndarray
    queries: np.ndarray
    prefix_len: int
    scale: float

    @property
    def num_keys(self) -> int:
        return self.keys.shape[0]

    @property
    def head_size(self) -> int:
        return self.keys.shape[1]

    @property
    def group_size(self) -> int:
        return self.queries.shape[1]


class Parts(NamedTuple):
    """keys [n, d], values [n, d], train_queries [m, d], queries [tests, heads, d]."""

    keys: np.ndarray
    values: np.ndarray
    train_queries: np.ndarray
    queries: np.ndarray


def make_head(
    kind: str,
    *,
    keys: int = 100_000,
    train: int = 40_000,
    tests: int = 1_000,
    heads: int = 1,
    head_size: int = 128,
    head_noise: float = 0.25,
    reuse: float = 1.0,
    seed: int = 7,
) -> Head:
    """Makes a head; the same arguments give the same arrays.

    Args:
        kind: one of `KINDS`.
        keys, train, tests: numbers of keys, of training queries and of test queries per head.
        heads: query heads that share the keys, which do not depend on it, nor does the first head.
        head_noise: how far the further query heads are from the first, as a fraction of the
            standard deviation of its projection (`rope`) or of its queries (all others).
        reuse: the fraction of the keys that the test queries may see, as those of a session that
            reuses the beginning of a stored context. Keys and training queries stay the same.

    Raises:
        ValueError: an argument is out of its range; names it.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
    keys = 1 if kind == "one_key" else keys
    for name, value, least in (
        ("keys", keys, 1), ("train", train, 1), ("tests", tests, 1), ("heads", heads, 1),
        ("head_size", head_size, 8), ("head_noise", head_noise, 0), ("seed", seed, 0),
    ):  # fmt: skip
        if value < least:
            raise ValueError(f"{name} is {value}, expected at least {least}")
    if head_size % 2:
        raise ValueError(f"head_size is {head_size}, expected an even number: channels are paired")
    if not 0 < reuse <= 1:
        raise ValueError(f"reuse is {reuse}, expected more than 0 and at most 1")
    prefix_len = max(1, round(keys * reuse))
    shape = Shape(keys, train, tests, heads, head_size, head_noise, prefix_len)
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    parts = Parts(*(np.ascontiguousarray(x, np.float32) for x in _MAKERS[kind](rng, shape)))
    return Head(kind, *parts, prefix_len=prefix_len, scale=1 / math.sqrt(head_size))


def _rope(rng: np.random.Generator, shape: Shape) -> Parts:
    return Parts(*rope.make(rng, shape))


def _hubs(rng: np.random.Generator, shape: Shape) -> Parts:
    d, factor = shape.head_size, 3.0
    key_axes, query_axes = rotation(rng, d), rotation(rng, d)
    centres = normal(rng, 256, d)

    def keys(count: int) -> np.ndarray:
        z = 0.8 * centres[rng.integers(0, 256, count)] + 0.8 * normal(rng, count, d)
        return factor * (1.6 * (z * power_law(d, 0.6)) @ key_axes + 3.0 * key_axes[0])

    def queries(count: int) -> np.ndarray:
        centre = 0.8 * (centres[rng.integers(0, 256, count)] * power_law(d, 0.2)) @ key_axes
        noise = 0.5 * (normal(rng, count, d) * power_law(d, 0.1)) @ query_axes
        return factor * (centre + noise - 2.0 * key_axes[0] + 1.0 * query_axes[1])

    return Parts(keys(shape.keys), normal(rng, shape.keys, d), *_groups_of(rng, shape, queries))


def _sinks(rng: np.random.Generator, shape: Shape) -> Parts:
    spread_nats, pull = 1.5, 6.0
    parts, axis = _plain(rng, shape, spread_nats, pull)
    # the others' weights sum to exp(log(keys) + spread^2 / 2) on average
    nats = math.log(shape.keys * SINK_MASS / (1 - SINK_MASS) / NUM_SINKS) + spread_nats**2 / 2
    parts.keys[:NUM_SINKS] = 0.1 * parts.keys[:NUM_SINKS] + _along(axis, nats, pull)
    parts.values[:NUM_SINKS] *= SINK_VALUE_FACTOR
    return parts


def _flat(rng: np.random.Generator, shape: Shape) -> Parts:
    return _plain(rng, shape, spread_nats=0.3)[0]


def _local(rng: np.random.Generator, shape: Shape) -> Parts:
    d, stay, gain = shape.head_size, 0.995, 2.0
    steps = normal(rng, shape.keys, d) * math.sqrt(1 - stay**2)
    steps[0] = normal(rng, 1, d)[0]
    keys = steps
    for token in range(1, shape.keys):
        keys[token] += stay * keys[token - 1]

    def queries(tokens: np.ndarray) -> np.ndarray:
        return gain * (keys[tokens] + 0.3 * normal(rng, len(tokens), d))

    train_tokens = rng.integers(0, shape.keys, shape.train)
    train = noisy_heads(rng, queries(train_tokens), shape.heads, shape.head_noise)
    values = normal(rng, shape.keys, d)
    last = np.full(shape.tests, shape.prefix_len - 1)
    tests = noisy_heads(rng, queries(last), shape.heads, shape.head_noise)
    return Parts(keys, values, take_heads(rng, train), tests)


def _needle(rng: np.random.Generator, shape: Shape) -> Parts:
    spread_nats, pull = 1.5, 6.0
    parts, axis = _plain(rng, shape, spread_nats, pull)
    token = int(rng.integers(0, max(1, shape.keys // 10)))
    nats = math.log(shape.keys) + spread_nats**2 / 2 + NEEDLE_MARGIN_NATS
    parts.keys[token] = 0.1 * parts.keys[token] + _along(axis, nats, pull)
    return parts


def _duplicates(rng: np.random.Generator, shape: Shape) -> Parts:
    parts, _ = _plain(rng, shape, spread_nats=3.5)
    distinct = max(1, shape.keys // COPIES_PER_KEY)
    original = rng.permutation(np.arange(shape.keys) % distinct)
    return parts._replace(keys=parts.keys[original])


def _norm_outliers(rng: np.random.Generator, shape: Shape) -> Parts:
    parts, _ = _plain(rng, shape, spread_nats=1.5)
    count = max(1, round(shape.keys * OUTLIER_FRACTION))
    parts.keys[rng.choice(shape.keys, count, replace=False)] *= OUTLIER_FACTOR
    return parts


def _negative(rng: np.random.Generator, shape: Shape) -> Parts:
    parts, axis = _plain(rng, shape, spread_nats=3.5)

    def longest(vectors: np.ndarray) -> float:
        return float(np.linalg.norm(vectors, axis=-1).max())

    queries = max(longest(parts.train_queries), longest(parts.queries))
    offset = math.sqrt(1.05 * queries * longest(parts.keys))
    return parts._replace(
        keys=parts.keys - offset * axis,
        train_queries=parts.train_queries + offset * axis,
        queries=parts.queries + offset * axis,
    )


def _plain(
    rng: np.random.Generator, shape: Shape, spread_nats: float, pull: float = 0.0
) -> tuple[Parts, np.ndarray]:
    """Power-law keys and queries along different axes, and the direction [d] that all queries have
    `pull` of and no key any of.

    Args:
        spread_nats: standard deviation of the scaled scores of a query.
    """
    d = shape.head_size
    axes = rotation(rng, d)
    axis = axes[0]
    key_spread, query_spread = power_law(d, 0.3), power_law(d, 0.3)[::-1].copy()
    key_spread[0] = query_spread[0] = 0
    deviation = math.sqrt(float((key_spread**2 * query_spread**2).sum()) / d)
    factor = math.sqrt(spread_nats / deviation)

    def queries(count: int) -> np.ndarray:
        return factor * (normal(rng, count, d) * query_spread) @ axes

    keys = factor * (normal(rng, shape.keys, d) * key_spread) @ axes
    values = normal(rng, shape.keys, d)
    train, tests = _groups_of(rng, shape, queries)
    train += (pull - train @ axis)[..., None] * axis
    tests += (pull - tests @ axis)[..., None] * axis
    return Parts(keys, values, train, tests), axis


def _along(axis: np.ndarray, nats: float, pull: float) -> np.ndarray:
    """The vector on `axis` whose scaled score with a query that has `pull` there is `nats`."""
    return axis * (nats * math.sqrt(len(axis)) / pull)


def _groups_of(
    rng: np.random.Generator, shape: Shape, queries: Callable[[int], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """train_queries [m, d] and queries [tests, heads, d] of the group whose first head asks so."""
    train = noisy_heads(rng, queries(shape.train), shape.heads, shape.head_noise)
    tests = noisy_heads(rng, queries(shape.tests), shape.heads, shape.head_noise)
    return take_heads(rng, train), tests


_MAKERS: MappingProxyType[str, Callable[[np.random.Generator, Shape], Parts]] = MappingProxyType(
    {
        "rope": _rope,
        "hubs": _hubs,
        "sinks": _sinks,
        "flat": _flat,
        "local": _local,
        "needle": _needle,
        "duplicates": _duplicates,
        "norm_outliers": _norm_outliers,
        "negative": _negative,
        "one_key": _flat,
    }
)
KINDS = tuple(_MAKERS)
