# SPDX-License-Identifier: Apache-2.0
"""Heads with rotary embedding over hidden states of a token and topic process.

A hidden state is the embedding of its token (frequencies follow a power law), of the token before
and of the topic of its segment, normalised. W_q and W_k share a low-rank part and have private
parts with opposite power laws over the channels. Large biases in the slowest rotary pairs give
queries and keys different means.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.sparse.heads.random_matrices import normal, power_law
from benchmarks.sparse.heads.shape import Shape

HIDDEN_SIZE = 512
SHARED_RANK = 48
VOCABULARY = 20_000
TOPICS = 400
SEGMENT_TOKENS = 200
ROPE_THETA = 500_000.0
BIASED_PAIRS = np.array([56, 58, 60, 62, 63]) / 64
"""Of all pairs, from the fastest to the slowest."""
BLOCK_TOKENS = 16_384


def make(
    rng: np.random.Generator, shape: Shape
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """keys [n, d], values [n, d], train_queries [m, d], queries [tests, heads, d].

    Training queries are those of random tokens and heads of the context; test queries those of the
    tokens that follow it, at the positions after `prefix_len`.
    """
    n, d, heads = shape.keys, shape.head_size, shape.heads
    projections = _Projections(rng, d, heads, shape.head_noise)
    train_token = np.sort(rng.choice(n, shape.train, replace=shape.train > n))
    of_heads = rng.spawn(1)[0]  # keys and the first head do not depend on how many there are
    train_head = of_heads.integers(0, heads, shape.train)
    keys, values = np.empty((n, d), np.float32), np.empty((n, d), np.float32)
    train = np.empty((shape.train, d), np.float32)
    queries = np.empty((shape.tests, heads, d), np.float32)
    for begin, hidden in _hidden_states(rng, n + shape.tests):
        token = np.arange(begin, begin + len(hidden))
        stored = hidden[: max(0, n - begin)]
        position = token[: len(stored)]
        keys[position] = _rotate(stored @ projections.key + projections.key_bias, position)
        values[position] = stored @ projections.value
        here = slice(*np.searchsorted(train_token, [begin, begin + len(stored)]))
        states = stored[train_token[here] - begin]
        for head, weight in enumerate(projections.queries):
            mine = train_head[here] == head
            raw = states[mine] @ weight + projections.query_bias
            train[here][mine] = _rotate(raw, train_token[here][mine])
            test = token[len(stored) :] - n
            raw = hidden[len(stored) :] @ weight + projections.query_bias
            queries[test, head] = _rotate(raw, shape.prefix_len + test)
    return keys, values, train[of_heads.permutation(shape.train)], queries


class _Projections:
    """key, value and queries[head]: [HIDDEN_SIZE, d]; key_bias and query_bias: [d]."""

    def __init__(
        self, rng: np.random.Generator, head_size: int, heads: int, head_noise: float
    ) -> None:
        d = head_size
        shared = normal(rng, HIDDEN_SIZE, SHARED_RANK) @ normal(rng, SHARED_RANK, d)
        shared *= 0.22 / np.sqrt(HIDDEN_SIZE)

        def private(spread: np.ndarray) -> np.ndarray:
            return normal(rng, HIDDEN_SIZE, d) * (0.8 / np.sqrt(HIDDEN_SIZE)) * spread

        self.key = shared + private(power_law(d, 0.3))
        first = shared + private(power_law(d, 0.3)[::-1])
        noise, of_heads = head_noise * first.std(), rng.spawn(1)[0]
        self.queries = [first]
        self.queries += [first + noise * normal(of_heads, HIDDEN_SIZE, d) for _ in range(heads - 1)]
        self.value = normal(rng, HIDDEN_SIZE, d) / np.float32(np.sqrt(HIDDEN_SIZE))
        self.key_bias = _bias(rng, d, 5, 10)
        self.query_bias = _bias(rng, d, 6, 9)


def _bias(rng: np.random.Generator, head_size: int, least: float, most: float) -> np.ndarray:
    pairs = np.unique((BIASED_PAIRS * (head_size // 2)).astype(int))
    channels = np.concatenate([pairs, pairs + head_size // 2])
    bias = np.zeros(head_size, np.float32)
    signs = rng.choice([-1, 1], len(channels))
    bias[channels] = signs * rng.uniform(least, most, len(channels))
    return bias


def _hidden_states(rng: np.random.Generator, tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks of (first token, states [tokens, HIDDEN_SIZE])."""
    embedding = normal(rng, VOCABULARY, HIDDEN_SIZE)
    topics = normal(rng, TOPICS, HIDDEN_SIZE)
    segments = rng.integers(0, TOPICS, tokens // SEGMENT_TOKENS + 1)
    words = np.minimum(rng.pareto(1.1, tokens + 1) * 20, VOCABULARY - 1).astype(int)
    for begin in range(0, tokens, BLOCK_TOKENS):
        token = np.arange(begin, min(begin + BLOCK_TOKENS, tokens))
        state = 0.7 * embedding[words[token + 1]]
        state += 0.4 * embedding[words[token]]
        state += 0.5 * topics[segments[token // SEGMENT_TOKENS]]
        state += 0.2 * normal(rng, len(token), HIDDEN_SIZE)
        state *= np.sqrt(HIDDEN_SIZE) / np.linalg.norm(state, axis=1, keepdims=True)
        yield begin, state.astype(np.float32, copy=False)


def _rotate(vectors: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Rotary embedding whose pair i is channels i and i + d / 2."""
    half = vectors.shape[1] // 2
    angle = np.outer(position, ROPE_THETA ** (-np.arange(half) / half))
    cosine, sine = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    first, second = vectors[:, :half], vectors[:, half:]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=1)
