# SPDX-License-Identifier: Apache-2.0
"""Which processor this is: what was measured on one is used on it alone."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name and machine type, as far as the system tells."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {platform.machine()}"
    return platform.machine()
