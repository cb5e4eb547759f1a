# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from vllm_relay.long_context.scheduling.host_memory import HostMemory

_CGROUP = Path("/sys/fs/cgroup")


def bytes_of_gib(gib: float | None) -> int | None:
    """None stays None."""
    return None if gib is None else int(gib * (1 << 30))


def capacity_bytes(host_memory_gib: float | None) -> int:
    """What contexts and requests may take; None: half of what is available now. Raises ValueError:
    it is more than there is."""
    num_bytes, total = bytes_of_gib(host_memory_gib), total_bytes()
    if num_bytes is None:
        return available_bytes() // 2
    if num_bytes > total:
        raise ValueError(
            f"additional_config.relay.host_memory_gib: {host_memory_gib:g} was given, and there "
            f"are {total / (1 << 30):.1f} GiB: give less than that, or leave it away for half of "
            "what is available"
        )
    return num_bytes


def check_capacity(memory: HostMemory, max_model_len: int) -> None:
    """Raises ValueError: it does not suffice for the longest request."""
    needed = memory.bytes_for(max_model_len)
    if needed > memory.capacity_bytes:
        gib = 1 << 30
        raise ValueError(
            "additional_config.relay.host_memory_gib: one request of max_model_len="
            f"{max_model_len} tokens needs {needed / gib:.2f} GiB of host memory, and "
            f"{memory.capacity_bytes / gib:.2f} GiB are there: raise it to what the machine has, "
            "or lower --max-model-len"
        )


def total_bytes(cgroup: Path = _CGROUP) -> int:
    """What the machine has, or the container if that is less."""
    total = psutil.virtual_memory().total
    limit = _number(cgroup / "memory.max")
    return total if limit is None else min(total, limit)


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """What the machine has left, or the container if that is less."""
    available = psutil.virtual_memory().available
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    # pages of files are given back when memory runs short
    return min(available, max(0, limit - used + (_inactive_file_bytes(cgroup) or 0)))


def _number(path: Path) -> int | None:
    """None where the file is missing or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _inactive_file_bytes(cgroup: Path) -> int | None:
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return None
