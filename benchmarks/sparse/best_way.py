# SPDX-License-Identifier: Apache-2.0
"""The best of all ways to attend a head, found by measuring."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.sparse.exact_answers import exact_answers
from benchmarks.sparse.heads.corpus import Head
from benchmarks.sparse.index_timing import Run, full_run, in_turn, search_run
from benchmarks.support.timing import Timing
from vllm_relay.sparse import CoarseIndex, QueryType
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import Elements

Way = tuple[str, QueryType | None]
FULL: Way = ("full", None)
TIMED_TOKENS = 96
WIDTH_STEP = 1.4
_STAGES = ((8, 10.0), (64, 1.5))
"""Tokens, and how many times the target their p99 may be for more of them to be looked at."""
_FEW_TOKENS = 48
_GOOD_OF_A_ROW = 2
_NEAR = 1.25
"""Times of a few calls: a way that takes so many times as long is no faster with all of them. Only
that of reading everything, which takes as long for each, may compare in another way: it is always
among the ways that are timed to the end."""
_ANSWER_TOKENS, _ANSWER_ERROR, _MOST_ANSWERS = 96, 1.4, 5
"""Query types that are tried: their exact answer has, for so many tokens, at most so many times
the error; of these the smallest answers."""


@dataclass
class Measured:
    """One way in one cell.

    Attributes:
        error_p99: of the attention output.
        cpu_s: of one group, in every round.
    """

    way: Way
    run: Run
    error_p99: float
    cpu_s: list[float] = field(default_factory=list)

    @property
    def us(self) -> float:
        return Timing(self.cpu_s).median_s * 1e6


class Cell:
    """Ways to attend a prefix of a head, measured with test queries. What is known of a way is
    kept, so that several targets share it.

    Args:
        keys, values: of the whole context, [n, d] and [n, value_size].
        queries: [tokens, group, d], which neither plans nor indexes have seen.
    """

    def __init__(
        self,
        head: Head,
        keys: Elements,
        values: Elements,
        indexes: dict[str, CompiledIndex],
        queries: np.ndarray,
    ) -> None:
        self._head, self._keys, self._values, self._indexes = head, keys, values, indexes
        self._queries = queries
        self._prefix = keys.rows(0, head.prefix_len), values.rows(0, head.prefix_len)
        self._truth = _float64_outputs(*self._prefix, queries, head.scale)
        self._lengths = np.linalg.norm(self._truth, axis=2)
        self._errors: dict[Way, np.ndarray] = {}
        self._few_times_us: dict[Way, float] = {}
        some = queries[:: max(1, len(queries) // _ANSWER_TOKENS)]
        self._answers = exact_answers(*self._prefix, some, head.scale)

    def measure(self, max_error: float, others: Iterable[Way], rounds: int) -> dict[Way, Measured]:
        """Times of the fastest ways whose p99 error is at most `max_error`, of those that are
        about as fast, and of `others`, whatever they are."""
        near = self._fastest_good(max_error)
        ways = list(dict.fromkeys([*near, *others]))
        measured = {way: Measured(way, self._run(way), self._error_p99(way)) for way in ways}
        timed = self._queries[:: max(1, len(self._queries) // TIMED_TOKENS)]
        times = in_turn([measured[way].run for way in ways], timed, rounds + 1)[:, 1:]
        for each, row in zip(measured.values(), times, strict=True):
            each.cpu_s = (row / 1e6).tolist()
        return measured

    def _fastest_good(self, max_error: float) -> list[Way]:
        """Those that are good enough and about as fast as the fastest of them. Of each row, wider
        ones take longer: they are looked at when it is their turn."""
        good: list[Way] = []
        rows = [iter([FULL]), *map(iter, self._rows(max_error))]
        good_of_row = [0] * len(rows)
        waiting = [(self._few_us(way), i, way) for i, row in enumerate(rows) for way in [next(row)]]
        heapq.heapify(waiting)
        while waiting:
            us, i, way = heapq.heappop(waiting)
            if good and us > _NEAR * self._few_us(good[0]):
                break
            if self._is_good(way, max_error):
                good.append(way)
                good_of_row[i] += 1
            if good_of_row[i] < _GOOD_OF_A_ROW:
                for wider in itertools.islice(rows[i], 1):
                    heapq.heappush(waiting, (self._few_us(wider), i, wider))
        return list(dict.fromkeys([*good, FULL]))

    def _few_us(self, way: Way) -> float:
        """Microseconds, roughly."""
        if way not in self._few_times_us:
            few = self._queries[:: max(1, len(self._queries) // _FEW_TOKENS)]
            self._few_times_us[way] = float(in_turn([self._run(way)], few, 1)[0, 0])
        return self._few_times_us[way]

    def _rows(self, max_error: float) -> Iterator[list[Way]]:
        """For each index and query type its widths, rising."""
        near_error = _ANSWER_ERROR * max_error
        for query_type in {type(answer.query) for answer in self._answers}:
            near = [
                answer
                for answer in self._answers
                if type(answer.query) is query_type and answer.error_p99 <= near_error
            ]
            for answer in sorted(near, key=lambda each: each.mean_tokens)[:_MOST_ANSWERS]:
                for kind, index in self._indexes.items():
                    yield [(kind, replace(answer.query, width=width)) for width in widths(index)]

    def _is_good(self, way: Way, max_error: float) -> bool:
        for tokens, factor in _STAGES:
            errors = self._errors_of(way, tokens)
            if np.quantile(errors[:tokens], 0.99) > factor * max_error:
                return False
        return self._error_p99(way) <= max_error

    def _error_p99(self, way: Way) -> float:
        return float(np.quantile(self._errors_of(way, len(self._queries)), 0.99))

    def _errors_of(self, way: Way, tokens: int) -> np.ndarray:
        """[at least `tokens`, group]; relative L2 errors of the first test queries."""
        known = self._errors.get(way, np.zeros((0, self._queries.shape[1])))
        if len(known) < min(tokens, len(self._queries)):
            run, new = self._run(way), slice(len(known), tokens)
            outputs = np.stack([run(rows) for rows in self._queries[new]])
            errors = np.linalg.norm(outputs - self._truth[new], axis=2) / self._lengths[new]
            known = self._errors[way] = np.concatenate([known, errors])
        return known

    def _run(self, way: Way) -> Run:
        kind, query = way
        prefix_len, scale = self._head.prefix_len, self._head.scale
        if query is None:
            return full_run(*self._prefix, scale=scale)
        prefix = prefix_len if prefix_len < self._keys.shape[0] else None
        return search_run(self._indexes[kind], self._values, query, prefix, scale)


def widths(index: CompiledIndex) -> Iterator[int | None]:
    """What is worth trying, rising; None for an index that has no width."""
    if index.kind == "flat":
        yield None
        return
    width, most = (
        (4.0, index.num_lists) if isinstance(index, CoarseIndex) else (32.0, index.num_keys)
    )
    while width < most:
        yield round(width)
        width *= WIDTH_STEP
    yield most


def _float64_outputs(
    keys: Elements, values: Elements, queries: np.ndarray, scale: float
) -> np.ndarray:
    key_rows, value_rows = (part.to_float32().astype(np.float64) for part in (keys, values))
    outputs = []
    for rows in queries:
        logits = (rows.astype(np.float64) * scale) @ key_rows.T
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        outputs.append((weights @ value_rows) / weights.sum(axis=1, keepdims=True))
    return np.stack(outputs)
