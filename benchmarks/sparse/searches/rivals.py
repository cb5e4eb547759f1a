# SPDX-License-Identifier: Apache-2.0
"""Vector searches that others have written, with the settings their users would choose.

Each is there if its package is: `pip install 'vllm-relay[benchmarks]'`, and for DiskANN `pip
install --no-deps diskannpy`, which asks for a NumPy that vLLM cannot use.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.sparse.searches.contenders import Contender, Search

HOW_TO_INSTALL = "pip install faiss-cpu hnswlib usearch; pip install --no-deps diskannpy"
GRAPH_DEGREE, BUILD_WIDTH = 32, 400
GRAPH_EFFORTS = (10, 20, 50, 100, 150, 200, 300, 400, 500, 600, 800, 1000, 1400, 2000)
LIST_EFFORTS = (2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512)
KEYS_PER_LIST = 39
"""faiss wants as many for each centroid it trains."""


class Rival(Contender):
    """A contender of another project."""

    package: ClassVar[str]

    @classmethod
    def is_installed(cls) -> bool:
        return find_spec(cls.package) is not None

    @property
    def module(self) -> Any:
        return importlib.import_module(self.package)


class _Faiss(Rival):
    """Stands for `index`, a faiss index; `stats` are its counters, where it has some."""

    package = "faiss"
    index: Any
    stats: ClassVar[str | None] = None

    @property
    def module(self) -> Any:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when faiss loads its own
        faiss = super().module
        faiss.omp_set_num_threads(1)
        return faiss

    def save(self, path: Path) -> bool:
        self.module.write_index(self.index, str(path))
        return True

    def load(self, path: Path) -> bool:
        if path.exists():
            self.index = self.module.read_index(str(path))
        return path.exists()

    def take_distances(self) -> int | None:
        if self.stats is None:
            return super().take_distances()
        stats = getattr(self.module.cvar, self.stats)
        taken = stats.ndis
        stats.reset()
        return taken


class FaissIvf(_Faiss):
    name = "faiss IVF-Flat"
    efforts = LIST_EFFORTS
    stats = "indexIVF_stats"

    def build(self, keys: np.ndarray, train_queries: np.ndarray) -> None:
        faiss = self.module
        lists = max(1, min(1024, len(keys) // KEYS_PER_LIST))
        self.index = faiss.index_factory(
            keys.shape[1], f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT
        )
        self.index.train(keys)
        self.index.add(keys)

    def search(self, k: int, effort: int) -> Search:
        index = self.index
        parameters = self.module.SearchParametersIVF(nprobe=min(effort, index.nlist))
        return lambda queries: index.search(queries, k, params=parameters)[1]


class FaissIvfBatch(FaissIvf):
    """The same index, all queries in one call: their coarse step is one matrix product."""

    name = "faiss IVF-Flat, batch"
    whole_batch = True


class FaissHnsw(_Faiss):
    name = "faiss HNSW32"
    efforts = GRAPH_EFFORTS
    effort_from_k = True
    stats = "hnsw_stats"

    def build(self, keys: np.ndarray, train_queries: np.ndarray) -> None:
        faiss = self.module
        self.index = faiss.IndexHNSWFlat(keys.shape[1], GRAPH_DEGREE, faiss.METRIC_INNER_PRODUCT)
        self.index.hnsw.efConstruction = BUILD_WIDTH
        self.index.add(keys)

    def search(self, k: int, effort: int) -> Search:
        index = self.index
        parameters = self.module.SearchParametersHNSW(efSearch=effort)
        return lambda queries: index.search(queries, k, params=parameters)[1]


class FaissFlat(_Faiss):
    name = "faiss Flat"
    efforts = (1,)
    _distances = 0

    def build(self, keys: np.ndarray, train_queries: np.ndarray) -> None:
        self.index = self.module.IndexFlatIP(keys.shape[1])
        self.index.add(keys)

    def search(self, k: int, effort: int) -> Search:
        def run(queries: np.ndarray) -> np.ndarray:
            self._distances += len(queries) * self.index.ntotal
            return self.index.search(queries, k)[1]

        return run

    def save(self, path: Path) -> bool:
        return False  # building it is copying the keys

    def load(self, path: Path) -> bool:
        return False


class Hnswlib(Rival):
    name, package = "hnswlib M32", "hnswlib"
    efforts = GRAPH_EFFORTS
    effort_from_k = True

    def build(self, keys: np.ndarray, train_queries: np.ndarray) -> None:
        self._index = self.module.Index("ip", keys.shape[1])
        self._index.init_index(len(keys), M=GRAPH_DEGREE, ef_construction=BUILD_WIDTH)
        self._index.add_items(keys, num_threads=1)

    def search(self, k: int, effort: int) -> Search:
        def run(queries: np.ndarray) -> np.ndarray:
            self._index.set_ef(effort)
            return self._index.knn_query(queries, k, num_threads=1)[0].astype(np.int64)

        return run

    def save(self, path: Path) -> bool:
        np.save(path.with_suffix(".size.npy"), self._index.dim)
        self._index.save_index(str(path))
        return True

    def load(self, path: Path) -> bool:
        if path.exists():
            self._index = self.module.Index("ip", int(np.load(path.with_suffix(".size.npy"))))
            self._index.load_index(str(path))
        return path.exists()


class Usearch(Rival):
    name, package = "usearch M32", "usearch"
    efforts = GRAPH_EFFORTS
    effort_from_k = True
    _distances = 0

    @property
    def module(self) -> Any:
        return importlib.import_module("usearch.index")

    def build(self, keys: np.ndarray, train_queries: np.ndarray) -> None:
        self._index = self.module.Index(
            ndim=keys.shape[1],
            metric="ip",
            dtype="f32",
            connectivity=GRAPH_DEGREE,
            expansion_add=BUILD_WIDTH,
        )
        self._index.add(np.arange(len(keys)), keys, threads=1)

    def search(self, k: int, effort: int) -> Search:
        def run(queries: np.ndarray) -> Sequence[np.ndarray]:
            self._index.expansion_search = effort
            matches = [self._index.search(query, k, threads=1) for query in queries]
            self._distances += sum(match.computed_distances for match in matches)
            return [match.keys.astype(np.int64) for match in matches]

        return run

    def save(self, path: Path) -> bool:
        self._index.save(str(path))
        return True

    def load(self, path: Path) -> bool:
        if path.exists():
            self._index = self.module.Index.restore(str(path))
        return path.exists()


class Diskann(Rival):
    """Vamana in memory; its inner product (`mips`) is an L2 search in one more dimension."""

    name, package = "diskannpy R64", "diskannpy"
    efforts = GRAPH_EFFORTS
    effort_from_k = True
    degree, build_width, alpha = 64, 200, 1.2

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def build(self, keys: np.ndarray, train_queries: np.ndarray) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="diskann-")
        self._write(keys, Path(self._folder.name))
        self._open(Path(self._folder.name))

    def search(self, k: int, effort: int) -> Search:
        def run(queries: np.ndarray) -> np.ndarray:
            # not its `search`, which was built for NumPy 1 and returns k times the same id
            answer = self._index.batch_search(queries, k, effort, num_threads=1)
            return answer.identifiers.astype(np.int64)

        return run

    def save(self, path: Path) -> bool:
        if self._folder is not None:
            path.mkdir(parents=True, exist_ok=True)
            for file in Path(self._folder.name).iterdir():
                (path / file.name).write_bytes(file.read_bytes())
        return True

    def load(self, path: Path) -> bool:
        if path.exists():
            self._open(path)
        return path.exists()

    def _write(self, keys: np.ndarray, folder: Path) -> None:
        self.module.build_memory_index(
            keys,
            distance_metric="mips",
            index_directory=str(folder),
            complexity=self.build_width,
            graph_degree=self.degree,
            num_threads=1,
            alpha=self.alpha,
        )

    def _open(self, folder: Path) -> None:
        self._index = self.module.StaticMemoryIndex(
            index_directory=str(folder), num_threads=1, initial_search_complexity=512
        )


RIVALS: tuple[type[Rival], ...] = (
    FaissIvf, FaissIvfBatch, FaissHnsw, Hnswlib, Usearch, Diskann, FaissFlat,
)  # fmt: skip


def installed_rivals() -> list[type[Rival]]:
    """Those that can run here; says which cannot and how to get them."""
    missing = sorted({rival.package for rival in RIVALS if not rival.is_installed()})
    if missing:
        print(f"# without {', '.join(missing)}: {HOW_TO_INSTALL}")
    return [rival for rival in RIVALS if rival.is_installed()]
