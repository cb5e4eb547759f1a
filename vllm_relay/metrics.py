# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics ``relay:*`` of the front-end process."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics import reader
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_relay.limits import relay_is_selected
from vllm_relay.stats import COUNTERS, GAUGES, prometheus_name

_LABELS = ("model_name", "engine")


class RelayStatLogger(AggregateStatLoggerBase):
    """Publishes the statistics that arrive with each step's SchedulerStats.

    Without the RELAY backend it registers no metric and records nothing.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        self._metrics: dict[int, dict[str, Any]] = {}
        if not relay_is_selected(vllm_config):
            return
        _unregister_stale_metrics()
        families: dict[str, Counter | Gauge] = {}
        for name, text in COUNTERS.items():
            families[name] = Counter(prometheus_name(name), text, _LABELS)
        for name, text in GAUGES.items():
            families[name] = Gauge(
                prometheus_name(name), text, _LABELS, multiprocess_mode="mostrecent"
            )
        model_config = vllm_config.model_config
        model_name = getattr(model_config, "served_model_name", None) or "unknown"
        if isinstance(model_name, list):
            model_name = model_name[0]
        for index in engine_indexes:
            self._metrics[index] = {
                name: family.labels(model_name, str(index)) for name, family in families.items()
            }

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **_: Any,
    ) -> None:
        stats = getattr(scheduler_stats, "relay", None)
        metrics = self._metrics.get(engine_idx)
        if not stats or metrics is None:
            return
        for name in COUNTERS:
            metrics[name].inc(stats.get(name, 0))
        for name in GAUGES:
            metrics[name].set(stats.get(name, 0))

    def log_engine_initialized(self) -> None:
        pass


def snapshot() -> list[reader.Metric]:
    """The ``relay:*`` metrics of this process, in the form ``LLM.get_metrics()`` returns."""
    metrics: list[reader.Metric] = []
    for family in REGISTRY.collect():
        if not family.name.startswith(prometheus_name("")):
            continue
        for sample in family.samples:
            if sample.name == f"{family.name}_total":
                metrics.append(reader.Counter(family.name, sample.labels, sample.value))
            elif sample.name == family.name:
                metrics.append(reader.Gauge(family.name, sample.labels, sample.value))
    return metrics


def _unregister_stale_metrics() -> None:
    """Drop the metrics of an earlier engine in this process, as vLLM does with its own."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(prometheus_name("")):
            REGISTRY.unregister(collector)
