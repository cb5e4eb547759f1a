# SPDX-License-Identifier: Apache-2.0
"""What a stored context keeps of a plan."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from vllm_relay.sparse import Dipr, TopK
from vllm_relay.sparse.plan.head_plan import HeadPlan


def test_a_plan_is_that_of_the_nearest_prefix() -> None:
    plan = HeadPlan(((1000, None), (4000, Dipr(alpha=0.1)), (16000, TopK(5, width=7))), "so", 0.1)
    asked = [plan.query_for(n) for n in (1, 1999, 2001, 7999, 8001, 99999)]
    ranged, best = Dipr(alpha=0.1), TopK(5, width=7)
    assert asked == [None, None, ranged, ranged, best, best]
    assert HeadPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_plan_that_does_not_say_what_it_was_made_for_meets_no_max_error() -> None:
    plan = HeadPlan.from_json({"by_prefix": [[5, {"k": 3}]], "why": ""})
    assert plan.max_error is None and not plan.keeps_to(1.0)


@pytest.mark.parametrize("made_for", [-0.1, 1.5, math.nan, True, "0.1"])
def test_unusable_errors_a_plan_was_made_for(made_for: Any) -> None:
    with pytest.raises(ValueError, match="max_error"):
        HeadPlan(((5, None),), "", made_for)


@pytest.mark.parametrize(
    "content",
    [None, {}, [], {"by_prefix": [], "why": ""}, {"by_prefix": [[5, {"k": 0}]], "why": ""},
     {"by_prefix": [[5, None], [5, None]], "why": ""}, {"by_prefix": [[5, {"x": 1}]], "why": ""}],
)  # fmt: skip
def test_other_content_is_no_plan(content: Any) -> None:
    with pytest.raises(ValueError, match="expected what HeadPlan"):
        HeadPlan.from_json(content)
