# SPDX-License-Identifier: Apache-2.0
"""The order of predicates that ask the model."""

from __future__ import annotations

from collections.abc import Callable

from vllm_relay.tables.sql.select_plan import Predicate

# rows on which the selectivity of a predicate is seen before all are asked about
SAMPLE_ROWS = 32
# with fewer, the sample would be much of the work
MIN_SAMPLED_ROWS = 4 * SAMPLE_ROWS


def ranked(predicates: list[Predicate], rank: Callable[[Predicate], float]) -> list[Predicate]:
    """Predicates with those first that leave out most rows for their tokens.

    With independent predicates this order asks for the fewest tokens.
    """
    return sorted(predicates, key=rank, reverse=True)
