# SPDX-License-Identifier: Apache-2.0
"""Rows whose texts are nearly equal, and that may share an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vllm_relay.tables.jobs.prompts.format import text_of
from vllm_relay.tables.semantic.embeddings import embedder, unit_vectors

_SHINGLE_CHARS = 5
_NUM_PERMUTATIONS = 128
_CANDIDATE_SHARE = 0.9
"""Of the similarity that is asked for: rows that seem to have it are compared exactly."""


@dataclass(frozen=True)
class NearDuplicates:
    """Which rows are held to be equal.

    Attributes:
        similarity: that two rows have at least: of their texts, the share of pieces of five
            characters, without regard to case and spaces, that both have among those that either
            has; or with `embeddings` the cosine of their vectors.
        embeddings: a function from a list of texts to an array of vectors, or a server's address;
            None compares pieces, for which rows are found by MinHash (Broder, "On the resemblance
            and containment of documents", 1997; the library datasketch): a few may be missed.

    Raises:
        ValueError: the similarity is no number above 0, or above 1.
        TypeError: the embeddings are none of the above.
    """

    similarity: float = 0.9
    embeddings: Any = None

    def __post_init__(self) -> None:
        is_number = isinstance(self.similarity, Real) and not isinstance(self.similarity, bool)
        if not is_number or not 0 < self.similarity <= 1:
            raise ValueError(
                f"near_duplicates={self.similarity!r} given, expected a similarity above 0, 1 at "
                f"most, as in 0.9"
            )
        if self.embeddings is not None:
            embedder(self.embeddings)

    def representatives(self, texts: pa.Table, text_names: Iterable[str]) -> npt.NDArray[np.int64]:
        """The row whose answer each row has: an earlier one, or itself.

        A row is similar to its representative, not only to other rows that have the same one. What
        is in other columns than those of texts is equal in both.

        Args:
            texts: JSON of the rows' fields, or NULL.
            text_names: of the columns that hold texts.

        Returns:
            int64 [rows].

        Raises:
            ImportError: datasketch is not installed.
        """
        columns = {name: texts[name].to_pylist() for name in texts.column_names}
        # in an order that is the same in every process
        names = [name for name in columns if name in set(text_names)]
        firsts: dict[tuple[str | None, ...], int] = {}
        equal = [
            firsts.setdefault(row, place)
            for place, row in enumerate(zip(*columns.values(), strict=True))
        ]
        shown: list[str] = []
        groups: dict[tuple[str | None, ...], list[int]] = {}
        for number, place in enumerate(firsts.values()):
            values = {name: column[place] for name, column in columns.items()}
            shown.append("\n".join(text_of(values[name]) for name in names if values[name]))
            others = [
                value if name not in names else value and "" for name, value in values.items()
            ]
            groups.setdefault(tuple(others), []).append(number)
        places = list(firsts.values())
        found = dict(self._pairs(shown, list(groups.values())))
        own = {place: places[found.get(number, number)] for number, place in enumerate(places)}
        return np.array([own[place] for place in equal], np.int64)

    def _pairs(
        self, shown: Sequence[str], groups: Sequence[list[int]]
    ) -> Iterator[tuple[int, int]]:
        """Numbers of texts with those of their representatives, if these are others."""
        several = [group for group in groups if len(group) > 1]
        if self.embeddings is None:
            yield from self._by_pieces(shown, several)
        elif several:
            vectors = unit_vectors(embedder(self.embeddings), shown)
            for group in several:
                yield from self._by_vectors(vectors, group)

    def _by_vectors(
        self, vectors: npt.NDArray[np.float32], group: list[int]
    ) -> Iterator[tuple[int, int]]:
        kept: list[int] = []
        own = np.empty((len(group), vectors.shape[1]), np.float32)
        for number in group:
            similar = own[: len(kept)] @ vectors[number]
            if len(kept) and similar.max() >= self.similarity:
                yield number, kept[int(similar.argmax())]
            else:
                own[len(kept)] = vectors[number]
                kept.append(number)

    def _by_pieces(
        self, shown: Sequence[str], groups: Sequence[list[int]]
    ) -> Iterator[tuple[int, int]]:
        if not groups:
            return
        try:
            from datasketch import MinHash, MinHashLSH
        except ImportError as error:
            raise ImportError(
                "near_duplicates without embeddings needs datasketch: pip install "
                "'vllm-relay[near-duplicates]'"
            ) from error
        for group in groups:
            threshold = self.similarity * _CANDIDATE_SHARE
            index = MinHashLSH(threshold=threshold, num_perm=_NUM_PERMUTATIONS)
            kept: dict[int, frozenset[bytes]] = {}
            for number in group:
                pieces = _pieces(shown[number])
                sketch = MinHash(num_perm=_NUM_PERMUTATIONS, seed=1)
                sketch.update_batch(sorted(pieces))
                candidates = {each: _jaccard(pieces, kept[each]) for each in index.query(sketch)}
                best = min(candidates, key=lambda each: (-candidates[each], each), default=None)
                if best is not None and candidates[best] >= self.similarity:
                    yield number, best
                else:
                    index.insert(number, sketch)
                    kept[number] = pieces


def _pieces(text: str) -> frozenset[bytes]:
    plain = " ".join(text.casefold().split())
    last = max(len(plain) - _SHINGLE_CHARS, 0)
    return frozenset(
        plain[begin : begin + _SHINGLE_CHARS].encode("utf-8", "surrogatepass")
        for begin in range(last + 1)
    )


def _jaccard(first: frozenset[bytes], second: frozenset[bytes]) -> float:
    return len(first & second) / len(first | second)
