# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def default_capacity_bytes() -> int:
    """Half of what is available now."""
    return available_bytes() // 2


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
