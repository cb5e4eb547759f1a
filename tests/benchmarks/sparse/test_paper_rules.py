# SPDX-License-Identifier: Apache-2.0
"""The rules of the AlayaDB paper."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.sparse.paper_rules import way_by_rules
from vllm_relay.sparse.index.query_types import Dipr, TopK

LONG = 100_000


@pytest.mark.parametrize(
    ("prefix_len", "options", "kind", "query"),
    [
        (2000, {}, "full", None),
        (2000, {"has_memory": True}, "full", None),
        (LONG, {"layer": 0}, "flat", Dipr(alpha=0.01)),
        (LONG, {"layer": 5}, "graph", Dipr(alpha=0.01)),
        (LONG, {"has_memory": True, "layer": 0}, "coarse", TopK(100)),
        (LONG, {}, "graph", Dipr(alpha=0.01)),
    ],
)
def test_the_rules_of_the_paper(
    prefix_len: int, options: dict[str, Any], kind: str, query: Any
) -> None:
    assert way_by_rules(prefix_len, **options) == (kind, query)
