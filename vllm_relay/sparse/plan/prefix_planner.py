# SPDX-License-Identifier: Apache-2.0
"""Plans what the queries of a kv head ask of its index, from a sample of queries of its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.plan.head_profile import DEFAULT_QUERIES, MeasuredSearch, profile_head
from vllm_relay.sparse.plan.index_measure import exact_attention, measure_index
from vllm_relay.sparse.plan.options import DBOptions
from vllm_relay.sparse.plan.planner import Plan, plan
from vllm_relay.sparse.plan.search_cost import SearchCost

PROFILE_TOKENS = 192
"""Of which the queries of all heads of the group are looked at."""
_PROFILE_SHARE = 8
"""One of so many training queries of a prefix, at most, is kept back for its profile."""
_LOST_MASS = 0.01
"""Attention weight that an index may lose of the answer to a query that was asked for."""


class PrefixPlanner:
    """Plans for the first keys of a kv head.

    Args:
        keys, values: of the whole context, [n, d] and [n, value_size].
        prefix_len: how many of them count.
        queries: [tokens, group, d]; of tokens of the prefix, that no index learns from.
        seen_len: how many of the keys `queries` look at; all that count if None.
        options: `query`, if it was given, is asked; otherwise plans keep to `max_error`.
        costs: None for what was measured on this machine, or ships.

    Attributes:
        prefix_len: as given.
    """

    def __init__(
        self,
        keys: Elements,
        values: Elements,
        prefix_len: int,
        queries: np.ndarray,
        options: DBOptions,
        costs: SearchCost | None,
        seen_len: int | None = None,
    ) -> None:
        self.prefix_len = prefix_len
        self._seen_len = prefix_len if seen_len is None else seen_len
        self._num_keys = keys.shape[0]
        self._values, self._costs = values, costs
        self._max_error = options.max_error
        given = options.given_query
        self._has_given = given is not None
        types = DEFAULT_QUERIES if given is None else (replace(given, width=None),)
        seen = keys.rows(0, self._seen_len), values.rows(0, self._seen_len)
        self._profile = profile_head(seen[0], queries, seen[1], query_types=types)
        self._exact = exact_attention(*seen, queries)

    def searches(self, index: CompiledIndex) -> list[MeasuredSearch]:
        """What an index over the whole context finds of the prefix.

        Not timed, so that a context that is stored again gets the same plan. No narrower than the
        index searches by default: a needle that one query in a thousand looks for is in no sample.
        """
        answers, max_error, min_mass = self._profile.answers, 0.0, self._min_mass
        if not self._has_given:
            answers, max_error = self._profile.promising(self._max_error), self._max_error
            min_mass = 0.0
        return measure_index(
            index, self._values, self._exact, answers, prefix_len=self._seen_len,
            max_error=max_error, min_mass=min_mass, from_default_width=True,
        )  # fmt: skip

    @property
    def _min_mass(self) -> float:
        """What an index has to find of the weight, where a query was given: nearly as much as the
        exact answer has."""
        return max(0.0, self._profile.answers[0].mass_p1 - _LOST_MASS)

    def plan(self, searches: Sequence[MeasuredSearch], kinds: Sequence[str]) -> Plan:
        """
        Args:
            searches: of indexes that are built; what others find is expected from the profile.
        """
        known = self._profile.with_searches(searches)
        if not self._has_given:
            return plan(
                self._num_keys, self.prefix_len, known, max_error=self._max_error, kinds=kinds,
                costs=self._costs,
            )  # fmt: skip
        return plan(
            self._num_keys, self.prefix_len, known, min_mass=self._min_mass,
            kinds=[kind for kind in kinds if kind != "full"], costs=self._costs,
        )  # fmt: skip


def profile_rows(num_queries: int, group: int) -> np.ndarray:
    """int64 [tokens, group]; which of the training queries of a prefix its plan goes by.

    The queries of one token are not kept together, so that those of neighbouring ones stand in:
    as many in a row as the group has heads, of the last quarter, which has seen most of the keys.

    Args:
        num_queries: of the prefix, in token order, the query heads of the group in turn.
    """
    tokens = min(PROFILE_TOKENS, num_queries // (_PROFILE_SHARE * group))
    first = num_queries - max(num_queries // 4, tokens * group)
    begins = np.linspace(first, num_queries - group, tokens).astype(np.int64)
    return begins[:, None] + np.arange(group)
