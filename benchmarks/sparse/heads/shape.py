# SPDX-License-Identifier: Apache-2.0
"""What heads are asked for."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """What a kind is asked for: sizes, `head_noise`, and how many keys the queries may see."""

    keys: int
    train: int
    tests: int
    heads: int
    head_size: int
    head_noise: float
    prefix_len: int
