# SPDX-License-Identifier: Apache-2.0
"""What vLLM's processes do with the plug-in: where it is not selected, and where what is theirs
comes from one that has it."""

from __future__ import annotations

import pickle

import pytest
from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from tests.long_context.kv_cache_managers import SHAPE, spec_of
from tests.support.forked_programs import lines_of_each
from vllm_relay.attention_backends import step_rows
from vllm_relay.plugin import register

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

UNPICKLE_SPECS = """
import pickle
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
for spec in pickle.loads(bytes.fromhex({pickled!r})):
    print(type(spec).__name__, KVCacheSpecRegistry.get_manager_class(spec).__name__)
    KVCacheSpecRegistry.check_kv_cache_spec_registry({{"layer": spec}})
"""

UNPICKLE_BACKEND = """
import os, pickle
os.environ["VLLM_PLUGINS"] = ""
backend = pickle.loads(bytes.fromhex({pickled!r}))
from vllm.v1.attention.backends.registry import AttentionBackendEnum
print(backend is AttentionBackendEnum["RELAY"])
print(pickle.loads(pickle.dumps(backend)) is backend)
"""

IMPORTED = """
import vllm.config, vllm.plugins, vllm.v1.kv_cache_spec_registry
assert not any(name.startswith("vllm_relay") for name in sys.modules)
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    """The lines of each program."""
    specs = [spec_of(), FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=8)]
    register()
    backend = AttentionBackendEnum["RELAY"]
    programs = {
        "engine core": STOCK_ENGINE_CORE,
        "server": STOCK_SERVER,
        "specs": UNPICKLE_SPECS.format(pickled=pickle.dumps(specs).hex()),
        "backend": UNPICKLE_BACKEND.format(pickled=pickle.dumps(backend).hex()),
    }
    return dict(zip(programs, lines_of_each(IMPORTED, [*programs.values()]), strict=True))


def test_a_stock_engine_core_starts_where_the_extension_is_broken(
    printed: dict[str, list[str]],
) -> None:
    module, loaded = printed["engine core"]
    assert module.startswith("vllm.v1.core.sched.")
    assert loaded == "[]"


def test_a_stock_server_ends_as_it_does(printed: dict[str, list[str]]) -> None:
    assert printed["server"] == ["False", "False"]


def test_another_process_knows_the_managers_of_all_specs(printed: dict[str, list[str]]) -> None:
    """vLLM registers its own specs only while the registry is empty."""
    assert printed["specs"] == [
        "RelaySparseSpec RelaySparseManager",
        "FullAttentionSpec FullAttentionManager",
        "SlidingWindowSpec SlidingWindowManager",
    ]


def test_spawned_process_unpickles_the_backend_before_it_loads_plugins(
    printed: dict[str, list[str]],
) -> None:
    assert printed["backend"] == ["True", "True"]


def test_a_backend_without_the_plug_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tokens that requests hide would be seen."""
    monkeypatch.setattr(step_rows, "_make_source", None)
    with pytest.raises(RuntimeError, match=r"call vllm_relay\.plugin\.register\(\) first"):
        step_rows.row_source(VllmConfig())
