# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY, generate_latest

from vllm_relay.attention_backends.step_stats import RelayStats
from vllm_relay.metrics import RelayStatLogger, snapshot
from vllm_relay.prefix_cache.stats import PREFIX_CACHE, PrefixCacheStats


def config(backend: str = "RELAY", scheduler: bool = False) -> Any:
    return SimpleNamespace(
        additional_config={"relay": {"scheduler": scheduler}},
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        attention_config=SimpleNamespace(
            backend=SimpleNamespace(name=backend), backend_per_kind={}
        ),
        speculative_config=None,
        model_config=SimpleNamespace(served_model_name="tiny"),
    )


def step(**kwargs: Any) -> Any:
    return SimpleNamespace(relay=RelayStats(steps=1, **kwargs).to_dict())


def values(engine: str = "0") -> dict[str, float]:
    return {m.name: m.value for m in snapshot() if m.labels["engine"] == engine}


def test_steps_add_up_per_engine() -> None:
    logger = RelayStatLogger(config(), [0, 1])
    logger.record(step(request_steps=4, planning_seconds=0.25, groups=2), None, engine_idx=0)
    logger.record(step(request_steps=3, planning_seconds=0.5, groups=1), None, engine_idx=0)
    logger.record(step(request_steps=7), None, engine_idx=1, argument_of_a_later_vllm=1)
    logger.record(SimpleNamespace(relay=None), None)
    logger.record(None, None)
    first = values("0")
    assert first["relay:steps"] == 2
    assert first["relay:request_steps"] == 7
    assert first["relay:planning_seconds"] == 0.75
    assert first["relay:groups"] == 1
    assert values("1")["relay:request_steps"] == 7


def test_names_and_labels_on_the_metrics_page() -> None:
    RelayStatLogger(config(), [0]).record(step(kv_tokens_read=5), None)
    page = generate_latest(REGISTRY).decode()
    assert 'relay:kv_tokens_read_total{engine="0",model_name="tiny"} 5.0' in page
    assert 'relay:forest_depth{engine="0",model_name="tiny"} 0.0' in page


def test_next_engine_of_the_process_starts_from_zero() -> None:
    RelayStatLogger(config(), [0]).record(step(request_steps=4), None)
    RelayStatLogger(config(), [0])
    assert values()["relay:request_steps"] == 0


def test_other_backends_get_no_metrics() -> None:
    RelayStatLogger(config(), [0])  # an earlier engine of the process
    logger = RelayStatLogger(config("CPU_ATTN"), [0])
    logger.record(step(request_steps=4), None)
    assert values().get("relay:request_steps", 0) == 0


def prefix_cache_step(**kwargs: Any) -> Any:
    return SimpleNamespace(relay={PREFIX_CACHE: asdict(PrefixCacheStats(**kwargs))})


def test_prefix_cache_of_the_relay_scheduler() -> None:
    logger = RelayStatLogger(config("CPU_ATTN", scheduler=True), [0])
    logger.record(
        prefix_cache_step(
            prefix_query_tokens=100,
            prefix_hit_tokens=60,
            tokens_saved=70,
            overtakes=2,
            evicted_blocks={"unused": 3, "needed": 1},
            pinned_blocks=4,
            pinned_bytes=512,
            held_requests=5,
            overtaken_requests=6,
            scheduling_steps=3,
            scheduling_seconds=0.5,
            tenants={"none": (60, 40), "lora:sql": (40, 20)},
        ),
        None,
    )
    logger.record(prefix_cache_step(evicted_blocks={"unused": 2}, pinned_blocks=3), None)
    page = generate_latest(REGISTRY).decode()
    labels = 'engine="0",model_name="tiny"'
    assert f"relay:prefix_query_tokens_total{{{labels}}} 100.0" in page
    assert f"relay:prefix_hit_tokens_total{{{labels}}} 60.0" in page
    assert f"relay:tokens_saved_total{{{labels}}} 70.0" in page
    assert f"relay:overtakes_total{{{labels}}} 2.0" in page
    assert f'relay:evicted_blocks_total{{{labels},reason="unused"}} 5.0' in page
    assert f'relay:evicted_blocks_total{{{labels},reason="needed"}} 1.0' in page
    assert f"relay:pinned_blocks{{{labels}}} 3.0" in page
    assert f"relay:held_requests{{{labels}}} 0.0" in page
    assert f"relay:scheduling_seconds_total{{{labels}}} 0.5" in page
    assert f'relay:tenant_query_tokens_total{{{labels},tenant="none"}} 60.0' in page
    assert f'relay:tenant_hit_tokens_total{{{labels},tenant="lora:sql"}} 20.0' in page
    assert "relay:steps" not in page
    evicted = {m.labels["reason"]: m.value for m in snapshot() if "evicted" in m.name}
    assert evicted == {"unused": 5.0, "needed": 1.0}


def test_gauges_stay_when_a_step_has_nothing_about_them() -> None:
    logger = RelayStatLogger(config(scheduler=True), [0])
    logger.record(step(groups=3), None)
    logger.record(prefix_cache_step(pinned_blocks=2), None)
    logger.record(step(groups=4), None)
    assert values()["relay:groups"] == 4
    assert values()["relay:pinned_blocks"] == 2
    logger.record(prefix_cache_step(pinned_blocks=1), None)
    assert values()["relay:groups"] == 4


def test_prefix_cache_has_no_metrics_without_the_relay_scheduler() -> None:
    logger = RelayStatLogger(config(), [0])
    logger.record(prefix_cache_step(prefix_hit_tokens=1), None)
    assert "relay:prefix_hit_tokens" not in values()
