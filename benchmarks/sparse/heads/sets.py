# SPDX-License-Identifier: Apache-2.0
"""The heads a benchmark runs on, each with its variants: groups of query heads and a prefix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.sparse.heads import recorded
from benchmarks.sparse.heads.corpus import Head, make_head

SEED = 7
SEED_OF_KIND = {"rope": 37}
"""Random biases decide how hard `rope` is. At 100,000 keys an inverted file of 1,024 lists scores
16,000 of them for recall@100 0.95 with this seed, and from 6,000 to 36,000 with others."""
GROUP_HEADS, GROUP_NOISES = 4, (0.25, 0.5)
REUSE = 0.2


@dataclass(frozen=True)
class Sizes:
    """Numbers of keys, training queries and test queries; no seed for the kind's usual one."""

    keys: int
    train: int
    tests: int
    seed: int | None = None

    def seed_of(self, kind: str) -> int:
        return SEED_OF_KIND.get(kind, SEED) if self.seed is None else self.seed


class HeadSet(ABC):
    """A head with one query head, and what goes with it."""

    head: Head
    file_name: str
    """Tells apart what was built of the keys."""

    @abstractmethod
    def groups(self) -> Iterator[tuple[str, Head]]:
        """Groups of query heads and what to call them."""

    @abstractmethod
    def prefix(self) -> Head | None:
        """The same keys with queries that may only see the first of them."""


class MadeSet(HeadSet):
    """A kind of `corpus`."""

    def __init__(self, kind: str, sizes: Sizes) -> None:
        self._kind, self._sizes = kind, sizes
        self.head = self._make()
        self.file_name = f"{kind}-{sizes.seed_of(kind)}-{sizes.keys}-{sizes.train}"

    def groups(self) -> Iterator[tuple[str, Head]]:
        for noise in GROUP_NOISES:
            yield f"{GROUP_HEADS} heads, noise {noise}", self._make(heads=GROUP_HEADS, noise=noise)

    def prefix(self) -> Head:
        return self._make(reuse=REUSE)

    def _make(self, heads: int = 1, noise: float = 0.0, reuse: float = 1.0) -> Head:
        sizes = self._sizes
        return make_head(
            self._kind,
            keys=sizes.keys,
            train=sizes.train,
            tests=sizes.tests,
            heads=heads,
            head_noise=noise,
            reuse=reuse,
            seed=sizes.seed_of(self._kind),
        )


class ModelSet(HeadSet):
    """A kv head of a model with all query heads that share it."""

    def __init__(self, group: Head, file_name: str) -> None:
        self._group = group
        self.head = replace(group, queries=group.queries[:, :1])
        self.file_name = file_name

    def groups(self) -> Iterator[tuple[str, Head]]:
        if self._group.group_size > 1:
            yield f"{self._group.group_size} heads", self._group

    def prefix(self) -> None:
        return None


def recall_sets(num_tokens: int, sizes: Sizes) -> Iterator[ModelSet]:
    """The first kv head of each layer of the recall model, for so many tokens."""
    yield from _sets_of(recorded.recall_model_layers(num_tokens), "recall model", sizes)


def model_sets(folder: Path, text: str, num_tokens: int, sizes: Sizes) -> Iterator[ModelSet]:
    """The first kv head of each layer of a model that reads the first tokens of a text."""
    yield from _sets_of(recorded.model_layers(folder, text, num_tokens), folder.name, sizes)


def _sets_of(layers: list[recorded.LayerTensors], name: str, sizes: Sizes) -> Iterator[ModelSet]:
    for number, layer in enumerate(layers):
        title = f"{name}, layer {number}"
        tests = min(sizes.tests, max(1, len(layer.keys) // 8))
        head = recorded.head_of(layer, 0, tests=tests, train=sizes.train, name=title)
        yield ModelSet(head, f"{title}-{len(layer.keys)}-{sizes.train}")
