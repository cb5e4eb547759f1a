# SPDX-License-Identifier: Apache-2.0
"""What a vector search must offer to be compared, and vllm-relay's own indexes as such."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

import vllm_relay.sparse
from tests.support.reference import search as reference_search
from vllm_relay.sparse import KeyIndex, TopK

Search = Callable[[np.ndarray], Sequence[np.ndarray] | np.ndarray]

SEED = 0


class Contender(ABC):
    """A library's index with its settings. Everything it does runs on one thread.

    Attributes:
        efforts: what is swept, from fast to thorough: lists probed, nodes kept or
            expanded.
        effort_from_k: efforts below k mean k.
        whole_batch: all queries are handed over in one call instead of one by one.
    """

    name: ClassVar[str]
    efforts: ClassVar[tuple[int, ...]]
    effort_from_k: ClassVar[bool] = False
    whole_batch: ClassVar[bool] = False

    # keys scored; those whose library tells, or that know, begin at 0
    _distances: int | None = None

    @abstractmethod
    def build(self, keys: np.ndarray, train_queries: np.ndarray) -> None:
        """Indexes float32 keys [n, d]; train_queries [m, d] are for those that learn from them."""

    def efforts_for(self, k: int) -> list[int]:
        least = k if self.effort_from_k else 1
        return sorted({max(least, effort) for effort in self.efforts})

    @abstractmethod
    def search(self, k: int, effort: int) -> Search:
        """What finds the `k` best keys of queries [q, d]: ids [q][k], negative where fewer."""

    def take_distances(self) -> int | None:
        """Keys scored since the last call; None if the library does not tell."""
        taken = self._distances
        if taken is not None:
            self._distances = 0
        return taken

    def save(self, path: Path) -> bool:
        """Keeps the built index for later runs; False if there is no point in it."""
        return False

    def load(self, path: Path) -> bool:
        """Takes what `save` wrote in place of `build`; False if there is nothing."""
        return False


class Reference(Contender):
    """The float64 oracle of the sparse package."""

    name = "reference"
    efforts = (1,)
    _distances = 0

    def build(self, keys: np.ndarray, train_queries: np.ndarray) -> None:
        self._keys = keys.astype(np.float64)

    def search(self, k: int, effort: int) -> Search:
        def run(queries: np.ndarray) -> Sequence[np.ndarray]:
            self._distances += len(self._keys) * len(queries)
            return reference_search(queries, self._keys, TopK(k))[0]

        return run


class OwnIndex(Contender):
    """One of `vllm_relay.sparse`'s indexes."""

    class_name: ClassVar[str]

    index: KeyIndex
    _distances = 0

    @classmethod
    def is_there(cls) -> bool:
        return hasattr(vllm_relay.sparse, cls.class_name)

    def build(self, keys: np.ndarray, train_queries: np.ndarray) -> None:
        index_class = getattr(vllm_relay.sparse, self.class_name)
        self.index = index_class().build(keys, train_queries, seed=SEED, threads=1)

    def search(self, k: int, effort: int) -> Search:
        query = TopK(k, width=effort)

        def run(queries: np.ndarray) -> Sequence[np.ndarray]:
            result = self.index.search(queries, query)
            self._distances += result.stats.distances
            return result.ids

        return run


class Flat(OwnIndex):
    name, class_name = "FlatIndex", "FlatIndex"
    efforts = (1,)


class Coarse(OwnIndex):
    name, class_name = "CoarseIndex", "CoarseIndex"
    efforts = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512)


class Graph(OwnIndex):
    name, class_name = "GraphIndex", "GraphIndex"
    efforts = (10, 20, 30, 40, 50, 70, 100, 140, 180, 220, 260, 300, 350, 400, 500, 700, 1000, 1500)


OWN: tuple[type[OwnIndex], ...] = (Graph, Coarse, Flat)


def own_contenders() -> list[type[OwnIndex]]:
    """Those of the indexes that this version of the package has."""
    return [contender for contender in OWN if contender.is_there()]
