# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that bind them themselves."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Nobody's now, and none that the system gives to a connection of other tests before it is
    bound, nor Ray to its workers."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
