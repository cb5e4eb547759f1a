# SPDX-License-Identifier: Apache-2.0
"""One Ray at a time: those that start together on one machine may take each other's ports."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from tests.support.waiting import WAIT_S

# Ray Serve ends proxies that are not ready within five seconds, which busy machines do not give
_PATIENCE = {f"RAY_SERVE_PROXY_{what}_CHECK_TIMEOUT_S": str(WAIT_S) for what in ("READY", "HEALTH")}


@contextmanager
def one_ray() -> Iterator[None]:
    """Waits until no other test of this machine has Ray."""
    with Path(tempfile.gettempdir(), "vllm-relay-tests-ray.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with mock.patch.dict(os.environ, _PATIENCE):
            yield
