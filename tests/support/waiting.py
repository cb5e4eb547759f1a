# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

WAIT_S = 300.0
"""More than any of it takes on a machine that is slow and has other work."""


def wait_for(condition: Callable[[], Found]) -> Found:
    """The first value that is true."""
    until_s = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < until_s, "waited in vain"
        time.sleep(0.005)
    return found
