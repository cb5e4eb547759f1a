# SPDX-License-Identifier: Apache-2.0
"""Actors on two machines of a cluster, both of which are this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tables.engines.ray_actors.fake_replica import ROWS, logs
from tests.tables.fake_engine import FakeEngine
from vllm_relay.tables import llm_map


def test_a_machine_that_goes_loses_nothing(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "tests.tables.engines.ray_actors.cluster_main", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["num_nodes"] == 2
    # each machine had one, and the other one's prompts were asked again
    taken = logs(tmp_path, "taken")
    assert len(taken) == 2 and len(ROWS) < sum(map(len, taken.values())) <= len(ROWS) + 10
    assert "is gone" in done.stderr
    expected = llm_map(ROWS, "Which {text}?", engine=FakeEngine(), show_progress=False)
    assert found["values"] == expected.values.to_pylist()
    assert found["errors"] == {} and found["output_tokens"] == len(ROWS)
    assert not found["is_connected"]
