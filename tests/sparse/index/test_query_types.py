# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from vllm_relay.sparse.index.query_types import Dipr, TopK


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3", None, 2**31, np.int64(3), math.nan])
def test_counts_are_whole_positive_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^k is .*, expected a whole number from 1"):
        TopK(value)
    if value is None:  # the default
        return
    for make in (lambda: TopK(1, width=value), lambda: Dipr(beta=1.0, width=value)):
        with pytest.raises(ValueError, match="^width is "):
            make()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "beta=None and alpha=None"),
        ({"beta": 1.0, "alpha": 0.5}, "expected one of them"),
        ({"beta": -1e-9}, "beta is -1e-09"),
        ({"beta": math.nan}, "beta is nan"),
        ({"beta": math.inf}, "beta is inf"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"alpha": 1.0001}, "alpha is 1.0001"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"alpha": "0.5"}, "alpha is '0.5', expected a number"),
        ({"alpha": True}, "alpha is True"),
        ({"beta": [1.0]}, "beta is .1.0., expected a number"),
        ({"alpha": 0.5, "max_dropped_mass": "all"}, "max_dropped_mass is 'all'"),
        ({"alpha": 0.5, "scale": "1"}, "scale is '1'"),
        ({"alpha": 0.5, "scale": 0.0}, "scale is 0.0"),
        ({"alpha": 0.5, "scale": -1.0}, "scale is -1.0"),
        ({"alpha": 0.5, "scale": math.inf}, "scale is inf"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dipr(**arguments)


def test_a_range_keeps_the_weights_above_alpha() -> None:
    """exp(-scale * range) is alpha, whatever the scale."""
    assert Dipr(beta=2.5).range(128) == 2.5
    assert Dipr(alpha=1.0).range(64) == 0
    for scale in (None, 0.3):
        reach = Dipr(alpha=0.01, scale=scale).range(64)
        assert math.exp(-reach * (scale or 1 / 8)) == pytest.approx(0.01)
