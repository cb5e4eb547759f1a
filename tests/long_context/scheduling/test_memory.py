# SPDX-License-Identifier: Apache-2.0
"""What is left of the machine's memory, and of a container's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_relay.long_context.scheduling import memory

AVAILABLE_BYTES = 1000


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 1000 bytes left."""
    left = SimpleNamespace(available=AVAILABLE_BYTES, total=5 * AVAILABLE_BYTES)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: left)


def cgroup(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, AVAILABLE_BYTES),
        ({"max": "max\n", "current": "300\n"}, AVAILABLE_BYTES),
        ({"max": "700\n"}, AVAILABLE_BYTES),
        ({"current": "700\n"}, AVAILABLE_BYTES),
        ({"max": "", "current": "300\n"}, AVAILABLE_BYTES),
        ({"max": "700\n", "current": "300\n"}, 400),
        ({"max": "7000\n", "current": "300\n"}, AVAILABLE_BYTES),
        ({"max": "700\n", "current": "800\n"}, 0),
        ({"max": "700\n", "current": "300\n", "stat": "anon 5\nfile 9\n"}, 400),
        ({"max": "700\n", "current": "600\n", "stat": "active_file 3\ninactive_file 50\n"}, 150),
        ({"max": "700\n", "current": "800\n", "stat": "inactive_file 50\nslab 7\n"}, 0),
        ({"max": "1200\n", "current": "300\n", "stat": "inactive_file 200\n"}, AVAILABLE_BYTES),
    ],
    ids=[
        "no_cgroup",
        "no_limit",
        "no_usage",
        "no_maximum",
        "empty",
        "limit",
        "limit_above_the_machine",
        "over_the_limit",
        "no_inactive_file",
        "inactive_file",
        "over_the_limit_with_files",
        "files_above_the_machine",
    ],
)
def test_available_bytes(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert memory.available_bytes(cgroup(tmp_path, **files)) == expected


def test_half_of_what_is_available_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 901)
    assert memory.capacity_bytes(None) == 450


@pytest.mark.parametrize(
    ("files", "expected"), [({}, 5000), ({"max": "max\n"}, 5000), ({"max": "700\n"}, 700)]
)
def test_all_memory_is_that_of_the_container(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert memory.total_bytes(cgroup(tmp_path, **files)) == expected
