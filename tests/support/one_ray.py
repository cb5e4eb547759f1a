# SPDX-License-Identifier: Apache-2.0
"""One Ray at a time: those that start together on one machine may take each other's ports."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_ray() -> Iterator[None]:
    """Waits until no other test of this machine has Ray."""
    with Path(tempfile.gettempdir(), "vllm-relay-tests-ray.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
