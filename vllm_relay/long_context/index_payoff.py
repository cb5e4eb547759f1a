# SPDX-License-Identifier: Apache-2.0
"""Whether better indexes for a running request pay: what they cost against what they save.

Times are CPU seconds, of one kv head: all heads and layers of a request are alike, so that what
pays for one pays for all.
"""

from __future__ import annotations

from vllm_relay.sparse.coarse import default_num_lists
from vllm_relay.sparse.search_candidates import expected_effort
from vllm_relay.sparse.search_cost import SearchCost, SearchWork, index_bytes

BETTER_KINDS = ("coarse", "graph")
PLAN_US_PER_KEY = 27.0
"""Of planning, for each key and query head, 128 elements each; measured on the machine of
docs/benchmarks.md."""
_EXPECTED_TOKENS = 100.0
"""In the answer of a head for which an index may be better. What they cost to attend is the same
for all kinds."""


class IndexPayoff:
    """Of the kv heads of one model.

    Args:
        group: query heads that share a kv head.
        key_bytes: of one key as stored.
    """

    def __init__(self, costs: SearchCost, *, group: int, head_size: int, key_bytes: int) -> None:
        self._costs = costs
        self._group, self._head_size, self._key_bytes = group, head_size, key_bytes
        self._known: dict[tuple[str, int], tuple[float, float]] = {}

    def cost_s(self, kind: str, num_keys: int) -> float:
        """To plan and to build: a plan begins with a flat index."""
        return self._of(kind, num_keys)[0]

    def saved_s(self, kind: str, num_keys: int) -> float:
        """For each generated token, compared with a flat index; 0 if that is faster."""
        return self._of(kind, num_keys)[1]

    def break_even_tokens(self, kind: str, num_keys: int) -> float:
        """After so many generated tokens an index has saved what it costs."""
        cost_s, saved_s = self._of(kind, num_keys)
        return cost_s / saved_s if saved_s else float("inf")

    def may_pay(self, num_prompt_tokens: int, max_tokens: int) -> bool:
        """Whether `SavedTime` could ever name a kind, of a request that generates `max_tokens`:
        half of them before an index is built, and half of them with it."""
        num_keys = num_prompt_tokens + max_tokens
        least = min(self.break_even_tokens(kind, num_keys) for kind in BETTER_KINDS)
        return 2 * least <= max_tokens

    def _of(self, kind: str, num_keys: int) -> tuple[float, float]:
        key = kind, num_keys
        if key not in self._known:
            self._known[key] = self._cost_s(*key), self._saved_s(*key)
        return self._known[key]

    def _cost_s(self, kind: str, num_keys: int) -> float:
        plan_us = PLAN_US_PER_KEY * num_keys * self._group * self._head_size / 128
        return 1e-6 * plan_us + sum(
            self._costs.build_s(each, num_keys, head_size=self._head_size)
            for each in ("flat", kind)
        )

    def _saved_s(self, kind: str, num_keys: int) -> float:
        _, distances, hops = expected_effort(
            kind, num_keys, self._group, _EXPECTED_TOKENS, _EXPECTED_TOKENS
        )
        centres = default_num_lists(num_keys) if kind == "coarse" else 0
        flat = SearchWork("flat", num_keys, self._group, num_keys, 1)
        better = SearchWork(kind, num_keys, self._group, distances, hops, centres)
        flat_us, better_us = (
            self._costs.time_us(work, head_size=self._head_size, key_bytes=self._key_bytes)
            for work in (flat, better)
        )
        return max(0.0, 1e-6 * (flat_us - better_us))


class SavedTime:
    """What better indexes would have saved a request so far, had it had them from the start.

    Who rents until the rent that was paid is the price, and buys then, pays at most twice what is
    necessary, however long it goes on. Here the rent is what flat searches take longer. Since the
    tokens that are left are known to be no more than so many, nothing is bought either that could
    not save its price with these.
    """

    def __init__(self, payoff: IndexPayoff) -> None:
        self._payoff = payoff
        self._saved_s = dict.fromkeys(BETTER_KINDS, 0.0)

    def count_token(self, num_keys: int) -> None:
        """Another token was generated with a flat index of so many keys."""
        for kind in BETTER_KINDS:
            self._saved_s[kind] += self._payoff.saved_s(kind, num_keys)

    def kinds_that_pay(self, num_keys: int, tokens_left: int) -> tuple[str, ...]:
        """What is to be built.

        Args:
            tokens_left: that the request generates at most.
        """
        return tuple(
            kind
            for kind in BETTER_KINDS
            if self._saved_s[kind] > 0
            and self._payoff.cost_s(kind, num_keys)
            <= min(self._saved_s[kind], tokens_left * self._payoff.saved_s(kind, num_keys))
        )


def index_bytes_per_key(head_size: int, element_bytes: int, train_queries_per_key: float) -> float:
    """Of one kv head: the largest index, and the queries that it learns from."""
    num_keys = 1 << 16
    index = index_bytes("graph", num_keys, head_size, is_hub_heavy=True) / num_keys
    return index + train_queries_per_key * head_size * element_bytes
