# SPDX-License-Identifier: Apache-2.0
"""What is known of a kv head before its index is chosen: how much of its attention how few tokens
carry, from a sample of its queries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from vllm_relay.sparse.index.elements import Elements, as_elements
from vllm_relay.sparse.index.query_types import Dipr, QueryType, TopK, check_scale
from vllm_relay.sparse.plan.answer_errors import AnswerErrors
from vllm_relay.sparse.plan.error_bound import error_p99, error_p99_upper

MASSES = (0.9, 0.98, 0.99)
ALPHAS = tuple(float(f"{10 ** (-power / 8):.2g}") for power in range(8, 49))
"""One step errs about 1.2 times less, and takes up to a tenth longer."""
TOP_KS = (50, 100, 200, 400, 800, 1600, 3200)
DEFAULT_QUERIES: tuple[QueryType, ...] = (
    *(Dipr(alpha=alpha) for alpha in ALPHAS),
    *(TopK(k) for k in TOP_KS),
)
_MOST_KEYS = 0.7
"""Of the keys: attending more of them one by one takes longer than attending all in order."""
_BLOCK_QUERIES = 32
_LEAST_MASS = 0.8


class Spread(NamedTuple):
    """Tokens, over the queries of a sample."""

    median: float
    p90: float
    p99: float


@dataclass(frozen=True)
class ExactAnswer:
    """What attention has of the exact answer to a query type, over the queries of a sample.

    Attributes:
        tokens: of one query's answer.
        mean_tokens: its mean.
        mass_mean, mass_p1: attention weight of the answer: the mean, and what 99% have at least.
        error_p99, error_max: of the relative L2 error of the attention output; None without values,
            and 1 where the answer has too little mass for that to be looked at.
        error_p99_upper: what 99% of all queries are expected to keep to (`error_bound`); None if
            only `error_p99` is known.
    """

    query: QueryType
    tokens: Spread
    mean_tokens: float
    mass_mean: float
    mass_p1: float
    error_p99: float | None = None
    error_max: float | None = None
    error_p99_upper: float | None = None

    @property
    def error_bound(self) -> float | None:
        return self.error_p99 if self.error_p99_upper is None else self.error_p99_upper

    @property
    def expected_error(self) -> float:
        return 1 - self.mass_p1 if self.error_bound is None else self.error_bound


@dataclass(frozen=True)
class MeasuredSearch:
    """What a built index does for a query type at a width.

    Attributes:
        kind: of the index; or "full", for reading all keys.
        query: with its width; None for "full".
        distances, hops: as in `SearchStats`, of one search of a group; means.
        rescored, found: keys scored exactly and returned, summed over the queries of the group;
            means.
        mass_mean, mass_p1, error_p99, error_max, error_p99_upper: as in `ExactAnswer`.
        time_us: of a search of a group and the attention over what it found, on one thread of the
            machine that measured it; None if that was not measured.
    """

    kind: str
    query: QueryType | None
    distances: float
    hops: float
    rescored: float
    found: float
    mass_mean: float
    mass_p1: float
    error_p99: float | None = None
    error_max: float | None = None
    time_us: float | None = None
    error_p99_upper: float | None = None

    @property
    def error_bound(self) -> float | None:
        return self.error_p99 if self.error_p99_upper is None else self.error_p99_upper


@dataclass(frozen=True)
class HeadProfile:
    """A kv head of a context, seen through a sample of its queries; of the whole context, or of a
    prefix with the queries of the tokens that come after that.

    Attributes:
        prefix_len: keys that the queries saw.
        head_size: elements of a key.
        key_bytes, value_bytes: of one row.
        group_size: query heads that share the keys.
        num_queries: in the sample.
        tokens_for_mass: tokens that carry each of `MASSES` of the attention.
        hub_statistic: different best keys, as a fraction of the queries.
        answers: of exact searches.
        searches: of indexes that were built and measured.
    """

    prefix_len: int
    head_size: int
    key_bytes: int
    value_bytes: int
    group_size: int
    num_queries: int
    tokens_for_mass: tuple[Spread, ...]
    hub_statistic: float
    answers: tuple[ExactAnswer, ...]
    searches: tuple[MeasuredSearch, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prefix_len", "head_size", "key_bytes", "value_bytes", "group_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")

    def with_searches(self, searches: Iterable[MeasuredSearch]) -> HeadProfile:
        """With these measured searches in place of those of the same kinds of index."""
        new = tuple(searches)
        kinds = {search.kind for search in new}
        kept = tuple(search for search in self.searches if search.kind not in kinds)
        return replace(self, searches=kept + new)

    def promising(self, max_error: float, most: int = 3) -> tuple[ExactAnswer, ...]:
        """Of ranges and of top-k, the `most` smallest answers that are good enough: smaller ones
        fail even where an index finds all of it, larger ones only take longer; so does reading
        everything, for answers of most of the keys, of which only one is returned. Without values
        the error is taken to be the mass that is lost."""
        chosen: list[ExactAnswer] = []
        for query_type in (Dipr, TopK):
            good = [
                answer
                for answer in self.answers
                if isinstance(answer.query, query_type) and answer.expected_error <= max_error
            ]
            for answer in sorted(good, key=lambda answer: answer.mean_tokens)[:most]:
                if not chosen or answer.mean_tokens <= _MOST_KEYS * self.prefix_len:
                    chosen.append(answer)
        return tuple(chosen)

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold, for `from_json`."""
        content = asdict(self)
        for entry, answer in zip(content["answers"], self.answers, strict=True):
            entry["query"] = query_to_json(answer.query)
        for entry, search in zip(content["searches"], self.searches, strict=True):
            entry["query"] = None if search.query is None else query_to_json(search.query)
        return content

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> HeadProfile:
        """
        Raises:
            ValueError: not what `to_json` returned.
        """
        try:
            if set(content) != {each.name for each in fields(cls)}:
                raise ValueError(f"fields {', '.join(map(str, content))}")
            answers = tuple(
                ExactAnswer(
                    **{
                        **each,
                        "query": query_from_json(each["query"]),
                        "tokens": Spread(*each["tokens"]),
                    }
                )
                for each in content["answers"]
            )
            searches = tuple(
                MeasuredSearch(
                    **{**each, "query": each["query"] and query_from_json(each["query"])}
                )
                for each in content["searches"]
            )
            masses = tuple(Spread(*each) for each in content["tokens_for_mass"])
            return cls(
                **{
                    **content,
                    "answers": answers,
                    "searches": searches,
                    "tokens_for_mass": masses,
                }
            )
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"head profile: {error!r}; profile the head again") from None


def profile_head(
    keys: Any,
    queries: Any,
    values: Any = None,
    *,
    scale: float | None = None,
    query_types: Sequence[QueryType] = DEFAULT_QUERIES,
) -> HeadProfile:
    """Scores every key with every query, exactly.

    Args:
        keys: [n, d] in token order.
        queries: [tokens, group, d]: for each token those of all query heads that share the keys;
            or [m, d], of a head that shares them with no other.
        values: [n, value_size]; without them errors stay unknown, and plans go by mass.
        scale: of the scores in the softmax; 1 / sqrt(d) if None.
        query_types: whose exact answers are looked at; of each type, each answer holds the one
            before.

    Raises:
        ValueError: shapes do not fit, or something is not finite; names it.

    Source: AlayaDB (2504.10326), section 6.1 and figure 5: heads differ in how many tokens matter.
    """
    key_elements = as_elements("keys", keys)
    if len(key_elements.shape) != 2 or 0 in key_elements.shape:
        raise ValueError(f"keys: shape {list(key_elements.shape)}, expected [keys, head_size]")
    n, d = key_elements.shape
    rows = grouped_queries(queries, d)
    value_elements = None if values is None else as_elements("values", values)
    if value_elements is not None and (
        len(value_elements.shape) != 2 or value_elements.shape[0] != n
    ):
        raise ValueError(f"values: shape {list(value_elements.shape)}, expected [{n}, value_size]")
    check_scale(scale)
    if not query_types:
        raise ValueError("query_types: there are none, expected at least one TopK or Dipr")
    scale = 1 / math.sqrt(d) if scale is None else scale
    measured = _Measured(query_types, [_least_weight(q, d, scale) for q in query_types])
    flat_rows = rows.reshape(-1, d)
    key_rows = key_elements.to_float32()
    value_rows = None if value_elements is None else value_elements.to_float32()
    factor = np.float32(scale)
    for begin in range(0, len(flat_rows), _BLOCK_QUERIES):
        weights = (flat_rows[begin : begin + _BLOCK_QUERIES] * factor) @ key_rows.T
        measured.best.append(weights.argmax(axis=1))
        weights -= weights.max(axis=1, keepdims=True)
        np.exp(weights, out=weights)
        measured.add(weights, value_rows)
    return HeadProfile(
        prefix_len=n,
        head_size=d,
        key_bytes=d * key_elements.data.itemsize,
        value_bytes=_row_bytes(value_elements or key_elements),
        group_size=rows.shape[1],
        num_queries=len(flat_rows),
        tokens_for_mass=measured.tokens_for_mass(),
        hub_statistic=len(np.unique(np.concatenate(measured.best))) / len(flat_rows),
        answers=measured.answers(),
    )


def grouped_queries(queries: Any, head_size: int) -> np.ndarray:
    """float32 [tokens, group, head_size].

    Raises:
        ValueError: another shape, or none.
    """
    elements = as_elements("queries", queries)
    shape = elements.shape
    if len(shape) not in (2, 3) or shape[-1] != head_size or 0 in shape:
        raise ValueError(
            f"queries: shape {list(shape)}, expected [tokens, group, {head_size}] or "
            f"[queries, {head_size}], at least one"
        )
    rows = elements.to_float32()
    return rows[:, None] if rows.ndim == 2 else rows


def query_to_json(query: QueryType) -> dict[str, Any]:
    return {key: value for key, value in asdict(query).items() if value is not None}


def query_from_json(content: dict[str, Any]) -> QueryType:
    return TopK(**content) if "k" in content else Dipr(**content)


class _Ranked(NamedTuple):
    """Of one query: the keys that answers hold, int64 by falling weight, and their weights; where
    each answer ends and which part of the weight of all keys it holds; tokens for `MASSES`."""

    order: np.ndarray
    weights: np.ndarray
    ends: np.ndarray
    masses: np.ndarray
    tokens_for_mass: np.ndarray


class _Measured:
    """Collects the answers of one block of queries after the other."""

    def __init__(self, query_types: Sequence[QueryType], least_weights: Sequence[float]) -> None:
        self._types = list(query_types)
        self._ks = np.array([query.k if isinstance(query, TopK) else 0 for query in query_types])
        tiny = np.finfo(np.float32).tiny  # weights below are no different from 0
        self._least_weights = np.maximum(np.array(least_weights, np.float32), tiny)
        ranges = self._least_weights[self._ks == 0]
        self._least_weight = ranges.min() if len(ranges) else np.float32(np.inf)
        self._most_tokens = int(self._ks.max(initial=1))
        self.best: list[np.ndarray] = []
        # of each block [q, types]
        self._counts: list[np.ndarray] = []
        self._masses: list[np.ndarray] = []
        self._errors: list[np.ndarray] = []
        self._for_mass: list[np.ndarray] = []

    def add(self, weights: np.ndarray, values: np.ndarray | None) -> None:
        """Args: weights: [q, n], 1 for the best key of each query."""
        rankings = [self._rank(row) for row in weights]
        self._for_mass.append(np.stack([each.tokens_for_mass for each in rankings]))
        counts = np.stack([each.ends for each in rankings])
        masses = np.stack([each.masses for each in rankings])
        self._counts.append(counts)
        self._masses.append(masses)
        if values is None:
            return
        errors = np.ones(counts.shape)
        looked_at = np.flatnonzero(masses.mean(axis=0) >= _LEAST_MASS)
        if len(looked_at):
            wholes, of_answers = weights @ values, AnswerErrors(values)
            for i, ranked in enumerate(rankings):
                errors[i, looked_at] = of_answers.of_query(
                    ranked.order,
                    ranked.weights,
                    ranked.ends[looked_at],
                    ranked.masses[looked_at],
                    wholes[i],
                )
        self._errors.append(errors)

    def _rank(self, weights: np.ndarray) -> _Ranked:
        """Args: weights: [n], of one query."""
        total = weights.sum(dtype=np.float64)
        chosen = np.flatnonzero(weights >= self._least_weight)
        needed = min(self._most_tokens, len(weights))
        if len(chosen) < needed:
            chosen = np.argpartition(weights, len(weights) - needed)[len(weights) - needed :]
        if weights[chosen].sum(dtype=np.float64) < MASSES[-1] * total:
            chosen = np.arange(len(weights))
        order = chosen[np.argsort(weights[chosen])[::-1]]
        falling = weights[order]
        sums = np.cumsum(falling, dtype=np.float64)
        if len(order) == len(weights):
            total = sums[-1]  # an answer of all keys holds all
        in_range = len(order) - np.searchsorted(falling[::-1], self._least_weights)
        ends = np.where(self._ks > 0, np.minimum(self._ks, len(order)), in_range)
        for_mass = np.searchsorted(sums, np.multiply(MASSES, total)) + 1
        return _Ranked(
            order,
            falling,
            ends,
            np.minimum(sums[ends - 1] / total, 1.0),
            np.minimum(for_mass, len(order)),
        )

    def tokens_for_mass(self) -> tuple[Spread, ...]:
        counts = np.concatenate(self._for_mass)
        return tuple(spread(counts[:, i]) for i in range(len(MASSES)))

    def answers(self) -> tuple[ExactAnswer, ...]:
        found = []
        all_counts, all_masses = np.concatenate(self._counts), np.concatenate(self._masses)
        all_errors = np.concatenate(self._errors) if self._errors else None
        for i, query in enumerate(self._types):
            counts, masses = all_counts[:, i], all_masses[:, i]
            errors = None if all_errors is None else all_errors[:, i]
            found.append(
                ExactAnswer(
                    query,
                    spread(counts),
                    float(counts.mean()),
                    float(masses.mean()),
                    float(np.quantile(masses, 0.01)),
                    None if errors is None else error_p99(errors),
                    None if errors is None else float(errors.max()),
                    None if errors is None else error_p99_upper(errors),
                )
            )
        return tuple(found)


def spread(counts: np.ndarray) -> Spread:
    return Spread(*(float(value) for value in np.quantile(counts, (0.5, 0.9, 0.99))))


def _least_weight(query: QueryType, head_size: int, scale: float) -> float:
    """Of a range, relative to the largest one."""
    if isinstance(query, TopK):
        return 0.0
    if query.alpha is not None and query.scale is None:
        return query.alpha
    return math.exp(-query.range(head_size) * scale)


def _row_bytes(elements: Elements) -> int:
    return elements.shape[1] * elements.data.itemsize
