# SPDX-License-Identifier: Apache-2.0
"""What vLLM's KV events tell of a cache is what its requests find there."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.integration.tiny_models import save_model
from tests.support import vllm_processes

pytestmark = pytest.mark.integration


def test_requests_find_what_is_told(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "model")
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # sockets have short paths
        done = vllm_processes.run_module("tests.cluster.told_vllm_main", [str(model), folder], {})
        assert done.returncode == 0, done.stderr[-4000:]
        found = json.loads(Path(folder, "found.json").read_text())
    told, cached = zip(*found["rows"], strict=True)
    assert told == cached
    assert len(set(cached)) > 4
    # of 60 last blocks and 30 of prefixes; one block is not full
    assert found["held"] == 24 - 1
    assert found["held_after_reset"] == 1
