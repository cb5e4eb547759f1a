# SPDX-License-Identifier: Apache-2.0
"""The rules of the AlayaDB paper."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.sparse.paper_rules import plan_by_rules
from tests.sparse.planned_heads import COSTS, head
from vllm_relay.sparse.index.query_types import Dipr, TopK

LONG = 100_000


@pytest.mark.parametrize(
    ("num_keys", "options", "kind", "query"),
    [
        (2000, {}, "full", None),
        (LONG, {"layer": 0}, "flat", Dipr(alpha=0.01)),
        (LONG, {"layer": 5}, "graph", Dipr(alpha=0.01)),
        (LONG, {"memory_budget": 1 << 30, "layer": 0}, "coarse", TopK(100)),
        (LONG, {"memory_budget": 1000, "layer": 5}, "graph", Dipr(alpha=0.01)),
        (LONG, {"prefix_len": 2000}, "full", None),
    ],
)
def test_the_rules_of_the_paper(
    num_keys: int, options: dict[str, Any], kind: str, query: Any
) -> None:
    prefix_len = options.pop("prefix_len", None)
    found = plan_by_rules(num_keys, prefix_len, head(num_keys), COSTS, **options)
    assert (found.kind, found.query) == (kind, query)
    assert "rule: " in found.explain()
