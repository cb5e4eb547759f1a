# SPDX-License-Identifier: Apache-2.0
"""Tables whose answers are known."""

import pydoc_data.topics
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

NUM_TOPICS = 20
_DIMENSIONS = 32


@cache
def _words() -> list[str]:
    text = " ".join(pydoc_data.topics.topics.values())
    return sorted({each.lower() for each in re.findall(r"[A-Za-z]{3,}", text)})


def texts(count: int, num_words: int, rng: np.random.Generator) -> list[str]:
    words = _words()
    return [
        " ".join(words[i] for i in row) for row in rng.integers(len(words), size=(count, num_words))
    ]


@dataclass(frozen=True)
class Statements:
    """Rows, of which a statement is true or not, and how likely a cheap model takes it for true."""

    table: pa.Table
    is_true: npt.NDArray[np.bool_]
    scores: npt.NDArray[np.float64]

    @classmethod
    def made(cls, rows: int, true_share: float, spread: float, seed: int) -> "Statements":
        """
        Args:
            spread: of scores around what they would be of a model that knows; 0 is one.
        """
        rng = np.random.default_rng(seed)
        is_true = rng.random(rows) < true_share
        logits = 4 * (2 * is_true - 1 + spread * rng.normal(size=rows))
        table = pa.table({"id": range(rows), "text": texts(rows, 40, rng)})
        return cls(table, is_true, (1 / (1 + np.exp(-logits))).round(6))


@dataclass(frozen=True)
class Pairs:
    """Rows of two tables; a pair is true where both are about the same."""

    left: pa.Table
    right: pa.Table
    topics: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    embed: Callable[[list[str]], Any]

    @property
    def is_true(self) -> npt.NDArray[np.bool_]:
        """[left, right]."""
        return self.topics[0][:, None] == self.topics[1]

    @classmethod
    def made(cls, rows: int, spread: float, seed: int) -> "Pairs":
        """
        Args:
            rows: of each table.
            spread: of the vectors of a topic.
        """
        rng = np.random.default_rng(seed)
        centres = rng.normal(size=(NUM_TOPICS, _DIMENSIONS))
        tables, topics, vectors = [], [], {}
        for name in ("paper", "grant"):
            own = rng.integers(NUM_TOPICS, size=rows)
            shown = [f"{name[0]}{i} {text}" for i, text in enumerate(texts(rows, 40, rng))]
            noise = spread * rng.normal(size=(rows, _DIMENSIONS))
            vectors |= dict(zip(shown, centres[own] + noise, strict=True))
            tables.append(pa.table({name: shown}))
            topics.append(own)

        def embed(given: list[str]) -> Any:
            return np.array([vectors[each] for each in given])

        return cls(*tables, (topics[0], topics[1]), embed)


def ranked(rows: int, seed: int) -> tuple[pa.Table, npt.NDArray[np.int64]]:
    """Rows, and the rank of each, from 0."""
    rng = np.random.default_rng(seed)
    shown = [f"r{i} {text}" for i, text in enumerate(texts(rows, 40, rng))]
    return pa.table({"text": shown}), rng.permutation(rows)


def amounts(rows: int, groups: int, seed: int) -> pa.Table:
    """Rows with an amount, of groups whose sums are asked for."""
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "shop": rng.integers(groups, size=rows),
            "amount": rng.integers(1000, size=rows),
            "note": texts(rows, 10, rng),
        }
    )


def copied(rows: int, share: float, seed: int) -> tuple[list[str], list[int]]:
    """Texts, a share of which differ from an earlier one by a word, and the number of the text that
    each was made of."""
    rng = np.random.default_rng(seed)
    shown, origins = texts(rows, 60, rng), list(range(rows))
    for row in range(1, rows):
        if rng.random() < share:
            origins[row] = origins[int(rng.integers(row))]
            words = shown[origins[row]].split()
            words[int(rng.integers(len(words)))] = "altered"
            shown[row] = " ".join(words)
    return shown, origins
