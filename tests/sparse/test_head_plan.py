# SPDX-License-Identifier: Apache-2.0
"""What a stored context keeps of a plan."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_relay.sparse import Dipr, TopK
from vllm_relay.sparse.head_plan import HeadPlan


def test_a_plan_is_that_of_the_nearest_prefix() -> None:
    plan = HeadPlan(((1000, None), (4000, Dipr(alpha=0.1)), (16000, TopK(5, width=7))), "so")
    asked = [plan.query_for(n) for n in (1, 1999, 2001, 7999, 8001, 99999)]
    ranged, best = Dipr(alpha=0.1), TopK(5, width=7)
    assert asked == [None, None, ranged, ranged, best, best]
    assert HeadPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    "content",
    [None, {}, [], {"by_prefix": [], "why": ""}, {"by_prefix": [[5, {"k": 0}]], "why": ""},
     {"by_prefix": [[5, None], [5, None]], "why": ""}, {"by_prefix": [[5, {"x": 1}]], "why": ""}],
)  # fmt: skip
def test_other_content_is_no_plan(content: Any) -> None:
    with pytest.raises(ValueError, match="expected what HeadPlan"):
        HeadPlan.from_json(content)
