# SPDX-License-Identifier: Apache-2.0
"""How many random cases a test tries: few by default, RELAY_SOAK_DEPTH times as many on request."""

from __future__ import annotations

import os

DEPTH = int(os.environ.get("RELAY_SOAK_DEPTH", "1"))
"""At 4, sweeps are as deep as they are meant to be before a release."""


def cases(count: int) -> int:
    """`count` by default."""
    return count * DEPTH
