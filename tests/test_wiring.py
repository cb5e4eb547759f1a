# SPDX-License-Identifier: Apache-2.0
"""What vLLM's processes do with the plug-in where it is not selected."""

from __future__ import annotations

import subprocess
import sys

import pytest
from vllm.config import VllmConfig

from vllm_relay.attention_backends import step_rows

STOCK_SERVER = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config import DeviceConfig, VllmConfig
VllmConfig(device_config=DeviceConfig(device="cpu"))
from vllm.entrypoints.launchers import launcher
from vllm.v1.engine.async_llm import AsyncLLM
for function in (AsyncLLM.shutdown, launcher.NoSignalServer.shutdown):
    print(hasattr(function, "__wrapped__"))
"""

STOCK_ENGINE_CORE = """
import sys
sys.modules["vllm_relay._C"] = None  # cannot be imported
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config import SchedulerConfig
config = SchedulerConfig(max_model_len=64, is_encoder_decoder=False)
print(config.get_scheduler_cls().__module__)
print([name for name in sys.modules if name.startswith("vllm_relay.sparse")])
"""


def test_a_stock_engine_core_starts_where_the_extension_is_broken() -> None:
    command = [sys.executable, "-c", STOCK_ENGINE_CORE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    module, loaded = done.stdout.splitlines()[-2:]
    assert module.startswith("vllm.v1.core.sched.")
    assert loaded == "[]"


def test_a_stock_server_ends_as_it_does() -> None:
    command = [sys.executable, "-c", STOCK_SERVER]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["False", "False"]


def test_a_backend_without_the_plug_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tokens that requests hide would be seen."""
    monkeypatch.setattr(step_rows, "_make_source", None)
    with pytest.raises(RuntimeError, match=r"call vllm_relay\.plugin\.register\(\) first"):
        step_rows.row_source(VllmConfig())
