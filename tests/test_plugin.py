# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_relay import plugin
from vllm_relay.attention_backends.cpu.relay import RelayBackend
from vllm_relay.config import SCHEDULER_PATH, RelayConfig
from vllm_relay.limits import RelayUnsupportedError
from vllm_relay.long_context.start_checks import check_context_dir

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="relay's kernels are for CPUs"
)


@pytest.fixture(autouse=True)
def registered() -> None:
    plugin.register()


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """Messages of the logger vllm.relay, whose parent does not propagate them to caplog."""
    vllm.logger._print_warning_once.cache_clear()
    lines: list[str] = []
    logger, handler = logging.getLogger("vllm.relay"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def relay_config(**kwargs: Any) -> VllmConfig:
    return VllmConfig(
        device_config=DeviceConfig(device="cpu"),
        attention_config=AttentionConfig(backend="relay"),
        **kwargs,
    )


def selector_config(**kwargs: Any) -> AttentionSelectorConfig:
    defaults = {"dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 128}
    return AttentionSelectorConfig(**({"head_size": 64} | defaults | kwargs))


def test_registering_again_changes_nothing() -> None:
    def state() -> list[Any]:
        platform_cls = type(current_platform)
        return [
            AttentionBackendEnum["RELAY"],
            platform_cls.get_attn_backend_cls.__func__,
            platform_cls.check_and_update_config.__func__,
            SchedulerStats.__dataclass_fields__["relay"],
        ]

    before = state()
    plugin.register()
    assert all(old is new for old, new in zip(before, state(), strict=True))


def test_backend_is_found_by_name() -> None:
    assert AttentionConfig(backend="relay").backend.get_class() is RelayBackend


def test_misspelled_section_is_refused_where_it_matters(log_lines: list[str]) -> None:
    message = "additional_config.Relay: nobody reads this section; did you mean additional_config"
    VllmConfig(
        device_config=DeviceConfig(device="cpu"), additional_config={"Relay": {"scheduler": True}}
    )
    assert message in log_lines[0]
    with pytest.raises(ValueError, match=message):
        relay_config(additional_config={"Relay": {"sharing": False}})


def test_options_outside_their_section_are_told(log_lines: list[str]) -> None:
    VllmConfig(
        device_config=DeviceConfig(device="cpu"),
        additional_config={"scheduler": True, "other_plugin": True},
    )
    [line] = log_lines
    assert "additional_config.scheduler is not under relay" in line
    assert "did you mean additional_config.relay.scheduler?" in line


def test_options_of_the_scheduler_need_the_scheduler() -> None:
    with pytest.raises(ValueError, match=r"relay\.eviction is given but only RelayScheduler"):
        relay_config(additional_config={"relay": {"eviction": "lru"}})
    relay_config(additional_config={"relay": {"eviction": "lru", "scheduler": True}})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("kernel", "portable", "only its backends read it: use --attention-backend relay"),
        ("sharing", False, "only its backends read it"),
        ("min_shared_tokens", 5, "only its backends read it"),
        ("contexts", ["text"], "only RELAY_SPARSE reads it: use --attention-backend relay_sparse"),
        ("alpha", 0.5, "only RELAY_SPARSE reads it"),
    ],
)
def test_options_that_nobody_reads_beside_the_scheduler_are_refused(
    option: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=rf"relay\.{option} is given but {message}"):
        VllmConfig(
            device_config=DeviceConfig(device="cpu"),
            additional_config={"relay": {"scheduler": True, option: value}},
        )


def test_a_scheduler_that_is_chosen_and_refused_is_an_error() -> None:
    scheduler_config = SchedulerConfig.default_factory(scheduler_cls=SCHEDULER_PATH)
    with pytest.raises(ValueError, match=r"relay\.scheduler is false and --scheduler-cls is"):
        relay_config(
            scheduler_config=scheduler_config, additional_config={"relay": {"scheduler": False}}
        )


def test_prefix_caching_that_is_off_is_pointed_out(log_lines: list[str]) -> None:
    relay_config(cache_config=CacheConfig(enable_prefix_caching=True))
    assert log_lines == []
    relay_config(cache_config=CacheConfig(enable_prefix_caching=False))
    assert "prefix caching is off" in log_lines[0]


@pytest.mark.parametrize(
    "option", [{"eviction": "lru"}, {"warm_up": True}, {"max_pinned_fraction": 0.2}]
)
def test_options_of_the_prefix_cache_without_one_are_refused(option: dict[str, Any]) -> None:
    [name] = option
    additional_config = {"relay": {"scheduler": True, **option}}
    relay_config(additional_config=additional_config)
    with pytest.raises(ValueError, match=rf"relay\.{name} is given and prefix caching is off"):
        relay_config(
            cache_config=CacheConfig(enable_prefix_caching=False),
            additional_config=additional_config,
        )


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.31.9", False),
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.33.1rc2.dev7+g123", True),
        ("0.34.0", False),
        ("0.34.0rc1", False),
        ("dev", False),
    ],
)
def test_supported_versions(version: str, supported: bool) -> None:
    assert plugin.is_supported(version) is supported


def test_other_vllm_versions_are_named_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    monkeypatch.setattr(plugin, "_register_backend", lambda: pytest.fail("it was registered"))
    plugin.register()
    assert len(log_lines) == 1
    assert "vLLM 0.31.0 was found, vLLM <0.34,>=0.32 is supported" in log_lines[0]


def test_register_never_raises(monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> None:
    def fail() -> None:
        raise AttributeError("vLLM has changed")

    monkeypatch.setattr(plugin, "_register_stats", fail)
    plugin.register()
    monkeypatch.setattr(plugin, "_register_backend", fail)
    plugin.register()
    assert "metrics relay:* are not available" in log_lines[0]
    assert "RELAY attention backend could not be registered" in log_lines[1]


def test_cpu_platform_selects_relay_for_the_layers_it_serves() -> None:
    def select(backend: str, **kwargs: Any) -> str:
        member = AttentionBackendEnum[backend]
        return current_platform.get_attn_backend_cls(member, selector_config(**kwargs), None)

    assert select("RELAY") == plugin.CPU_BACKEND_PATH
    assert select("CPU_ATTN") == AttentionBackendEnum.CPU_ATTN.get_path()
    assert "mla" in select("CPU_MLA", use_mla=True)
    with pytest.raises(RelayUnsupportedError, match="multi-head latent attention"):
        select("RELAY", use_mla=True)
    with pytest.raises(RelayUnsupportedError, match="sparse attention"):
        select("RELAY", use_sparse=True)


def test_good_configuration_is_accepted() -> None:
    relay_config(additional_config={"relay": {"min_shared_tokens": 64}})


def test_bad_option_is_refused_when_the_configuration_is_built() -> None:
    message = r"additional_config\.relay\.depht: unknown option; known options: sharing"
    with pytest.raises(ValueError, match=message):
        relay_config(additional_config={"relay": {"depht": 3}})


def test_kernels_of_gpus_are_refused_on_cpus() -> None:
    with pytest.raises(ValueError, match="cuda_kernels: given 'triton', .* leave it out for cpu"):
        relay_config(additional_config={"relay": {"cuda_kernels": "triton"}})


def test_unservable_configuration_is_refused_when_it_is_built() -> None:
    with pytest.raises(ValueError, match="fp8_e4m3 or --attention-backend CPU_ATTN"):
        relay_config(cache_config=CacheConfig(cache_dtype="fp8_e5m2"))


def test_options_without_the_backend_are_noticed(log_lines: list[str]) -> None:
    VllmConfig(
        device_config=DeviceConfig(device="cpu"), additional_config={"relay": {"sharing": False}}
    )
    assert "has no effect without --attention-backend relay" in log_lines[0]


@pytest.mark.parametrize(
    ("cache", "scheduler", "reason"),
    [
        ({"enable_prefix_caching": False}, {}, "page is true and prefix caching is off"),
        ({}, {"scheduler_cls": dict}, "page is true, and --scheduler-cls dict is not based"),
        ({}, {"scheduler_cls": "builtins.dict"}, "page is true, and --scheduler-cls dict"),
    ],
)
def test_a_live_page_with_nothing_to_see_is_refused(
    cache: dict[str, Any], scheduler: dict[str, Any], reason: str
) -> None:
    shape: dict[str, Any] = {"max_model_len": 64, "is_encoder_decoder": False}
    with pytest.raises(ValueError, match=reason):
        VllmConfig(
            device_config=DeviceConfig(device="cpu"),
            cache_config=CacheConfig(**cache),
            scheduler_config=SchedulerConfig(**shape, **scheduler),
            additional_config={"relay": {"page": True}},
        )


@pytest.mark.parametrize("scheduler", [None, "vllm.v1.core.sched.scheduler.Scheduler"])
def test_a_live_page_needs_nothing_else_of_relay(
    scheduler: str | None, log_lines: list[str]
) -> None:
    VllmConfig(
        device_config=DeviceConfig(device="cpu"),
        scheduler_config=SchedulerConfig(
            max_model_len=64, is_encoder_decoder=False, scheduler_cls=scheduler
        ),
        additional_config={"relay": {"page": True}},
    )
    assert log_lines == []


def test_kernel_that_cannot_run_is_refused() -> None:
    config: Any = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    message = r"additional_config\.relay\.kernel: .*avx512_bf16"
    with pytest.raises(ValueError, match=message):
        plugin._check_kernel(config, RelayConfig(kernel="avx512_bf16"))
    plugin._check_kernel(config, RelayConfig(kernel="portable"))


@pytest.mark.parametrize("relay", [None, {"steps": 2, "planning_seconds": 0.5}])
def test_statistics_survive_the_way_to_the_front_end(relay: dict[str, Any] | None) -> None:
    stats = SchedulerStats(num_running_reqs=3)
    if relay is not None:
        stats.relay = relay
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    received = MsgpackDecoder(EngineCoreOutputs).decode(sent)
    assert received.scheduler_stats.num_running_reqs == 3
    assert received.scheduler_stats.relay == relay


@pytest.mark.parametrize("option", ["alpha", "min_context_tokens", "contexts"])
def test_options_of_long_contexts_need_their_backend(option: str) -> None:
    value = {"alpha": 0.1, "min_context_tokens": 5000, "contexts": ["text"]}[option]
    config = relay_config()
    config.additional_config = {"relay": {option: value}}
    with pytest.raises(ValueError, match=rf"relay\.{option} is given but only RELAY_SPARSE"):
        plugin.check_new_config(config)


def test_a_context_that_cannot_be_read_stops_the_start() -> None:
    config = relay_config()
    config.attention_config = AttentionConfig(backend="relay_sparse")
    config.additional_config = {"relay": {"contexts": ["@/nowhere"]}}
    with pytest.raises(ValueError, match=r"relay\.contexts\[0\]: '@/nowhere' was given"):
        plugin.check_new_config(config)


@pytest.mark.parametrize(
    ("relay", "caching", "message"),
    [
        ({"context_dir": "file"}, True, "context_dir: '.*file' was given, expected a folder that"),
        ({"context_dir": "file/in"}, True, "context_dir: '.*in' was given, expected a folder that"),
        ({"context_dir": "new"}, False, "context_dir needs prefix caching"),
        ({"context_disk_gib": 1.0}, True, "context_disk_gib bounds .*, which is not given"),
        ({"context_dir": "new/folder", "context_disk_gib": 1.0}, True, None),
    ],
)
def test_the_folder_of_contexts_is_made_before_an_engine_starts(
    tmp_path: Path, relay: dict[str, Any], caching: bool, message: str | None
) -> None:
    (tmp_path / "file").touch()
    if "context_dir" in relay:
        relay = relay | {"context_dir": str(tmp_path / relay["context_dir"])}
    cache_config = SimpleNamespace(enable_prefix_caching=caching)
    config: Any = SimpleNamespace(cache_config=cache_config, model_config=None)
    if message is None:
        check_context_dir(config, RelayConfig.from_options(relay))
        assert (tmp_path / "new" / "folder").is_dir()
        return
    with pytest.raises(ValueError, match=message):
        check_context_dir(config, RelayConfig.from_options(relay))


def test_both_backends_survive_pickling() -> None:
    for name in ("RELAY", "RELAY_SPARSE"):
        member = AttentionBackendEnum[name]
        assert pickle.loads(pickle.dumps(member)) is member


def test_long_contexts_on_cuda_are_scheduled_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = relay_config()
    config.attention_config = AttentionConfig(backend="relay_sparse")
    config.scheduler_config.async_scheduling = True
    monkeypatch.setattr(plugin, "check_sparse_config", lambda *args: None)
    for is_cpu in (True, False):
        monkeypatch.setattr(type(current_platform), "is_cpu", lambda self, is_cpu=is_cpu: is_cpu)
        device_type = "cpu" if is_cpu else "cuda"
        monkeypatch.setattr(type(current_platform), "device_type", device_type)
        plugin.check_new_config(config)
        assert config.scheduler_config.async_scheduling == is_cpu
