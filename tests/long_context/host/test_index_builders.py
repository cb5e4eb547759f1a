# SPDX-License-Identifier: Apache-2.0
"""The threads that build indexes: out of the way, and gone when the process ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tests.support.waiting import WAIT_S
from vllm_relay.long_context.host.index_builders import process_ends, start_builders


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_builders_leave_the_cores_to_others() -> None:
    def priority() -> tuple[int, int]:
        thread = threading.get_native_id()
        return os.getpriority(os.PRIO_PROCESS, thread), len(os.sched_getaffinity(0))

    own_priority, num_cores = priority()
    with start_builders(1) as builders:
        assert builders.submit(priority).result() == (10, num_cores)
    assert priority() == (own_priority, num_cores)
    assert not process_ends()


def test_a_process_that_ends_does_not_wait_for_what_is_queued() -> None:
    program = (
        "import time\n"
        "from vllm_relay.long_context.host.index_builders import process_ends, start_builders\n"
        "def build():\n"
        "    for _ in range(6000):\n"
        "        if process_ends():\n"
        "            return\n"
        "        time.sleep(0.1)\n"
        "builders = start_builders(1)\n"
        "for _ in range(3):\n"
        "    builders.submit(build)\n"
        "time.sleep(0.3)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=WAIT_S)
