# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tests.support.vllm_processes import WARM_SUBPROCESS
from vllm_relay.demo import engine_process


@pytest.fixture
def quick_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of one process that has vLLM already: a core in another one would poll for work."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(engine_process, "_POLLING_S", 0.0)
    monkeypatch.setattr(engine_process, "subprocess", WARM_SUBPROCESS)
