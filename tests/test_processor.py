# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

from vllm_relay.processor import cpu_name


def test_cpu_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\n")
    assert cpu_name(cpuinfo).startswith("A CPU @ 2 GHz, ")
    assert cpu_name(tmp_path / "none")
