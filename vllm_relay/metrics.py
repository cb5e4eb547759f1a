# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics ``relay:*`` of the front-end process."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics import reader
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_relay.attention_backends.step_stats import COUNTERS, GAUGES, prometheus_name
from vllm_relay.commands.engine import call, call_ranks_async
from vllm_relay.commands.errors import CommandError
from vllm_relay.config import scheduler_is_selected
from vllm_relay.limits import relay_is_selected, sparse_is_selected
from vllm_relay.long_context import orders as long_contexts
from vllm_relay.prefix_cache import stats as prefix_cache

_LABELS = ("model_name", "engine")
_fresh: dict[str, dict[int, dict[str, Any]]] = {}
"""Metrics of the last engine of this process, by the command that tells them."""


class RelayStatLogger(AggregateStatLoggerBase):
    """Publishes the statistics that arrive with each step's SchedulerStats.

    Those of attention only for the backends RELAY and RELAY_SPARSE, those of long contexts only for
    RELAY_SPARSE, those of the prefix cache only for RelayScheduler. With none of these it registers
    no metric and records nothing.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        backend, scheduler = relay_is_selected(vllm_config), scheduler_is_selected(vllm_config)
        self._attention: dict[int, dict[str, Any]] = {}
        self._long_contexts: dict[int, dict[str, Any]] = {}
        self._prefix_cache: dict[int, dict[str, Any]] = {}
        _fresh.clear()
        if not (backend or scheduler):
            return
        _unregister_stale_metrics()
        model_config = vllm_config.model_config
        model_name = getattr(model_config, "served_model_name", None) or "unknown"
        if isinstance(model_name, list):
            model_name = model_name[0]
        self._engine_labels = {index: (model_name, str(index)) for index in engine_indexes}
        if backend:
            self._attention = self._register(COUNTERS, GAUGES)
        if sparse_is_selected(vllm_config):
            self._long_contexts = self._register(long_contexts.COUNTERS, long_contexts.GAUGES)
            _fresh["context_gauges"] = self._long_contexts
        if scheduler:
            self._prefix_cache = self._register(prefix_cache.COUNTERS, prefix_cache.GAUGES)
            _fresh["gauges"] = self._prefix_cache
            self._evicted_blocks = Counter(
                prometheus_name(prefix_cache.EVICTED_BLOCKS),
                prefix_cache.EVICTED_BLOCKS_TEXT,
                (*_LABELS, "reason"),
            )
            self._tenants = [
                Counter(prometheus_name(name), text, (*_LABELS, "tenant"))
                for name, text in prefix_cache.TENANT_COUNTERS.items()
            ]
            for labels in self._engine_labels.values():
                for reason in prefix_cache.EVICTION_REASONS:
                    self._evicted_blocks.labels(*labels, reason)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **_: Any,
    ) -> None:
        stats = getattr(scheduler_stats, "relay", None)
        if not stats:
            return
        _record(self._attention.get(engine_idx), stats)
        _record(self._long_contexts.get(engine_idx), stats.get(long_contexts.LONG_CONTEXTS, {}))
        stats = stats.get(prefix_cache.PREFIX_CACHE)
        if stats and engine_idx in self._prefix_cache:
            _record(self._prefix_cache[engine_idx], stats)
            for reason, blocks in stats.get(prefix_cache.EVICTED_BLOCKS, {}).items():
                labels = (*self._engine_labels[engine_idx], reason)
                self._evicted_blocks.labels(*labels).inc(blocks)
            for tenant, tokens in stats.get(prefix_cache.TENANTS, {}).items():
                labels = (*self._engine_labels[engine_idx], tenant)
                for counter, count in zip(self._tenants, tokens, strict=True):
                    counter.labels(*labels).inc(count)

    def log_engine_initialized(self) -> None:
        pass

    def _register(
        self, counters: dict[str, str], gauges: dict[str, str]
    ) -> dict[int, dict[str, Any]]:
        """Metrics by engine and name."""
        families: dict[str, Counter | Gauge] = {}
        for name, text in counters.items():
            families[name] = Counter(prometheus_name(name), text, _LABELS)
        for name, text in gauges.items():
            families[name] = Gauge(
                prometheus_name(name), text, _LABELS, multiprocess_mode="mostrecent"
            )
        return {
            index: {name: family.labels(*labels) for name, family in families.items()}
            for index, labels in self._engine_labels.items()
        }


def _record(metrics: dict[str, Any] | None, stats: dict[str, Any]) -> None:
    for name, metric in (metrics or {}).items():
        if name not in stats:
            continue
        if isinstance(metric, Counter):
            metric.inc(stats[name])
        else:
            metric.set(stats[name])


def refresh(engine: Any) -> None:
    """Ask an LLMEngine for its gauges: statistics come with steps only."""
    for command, metrics in _fresh.items():
        _record(metrics.get(0), call(engine, command, {}))


async def refresh_async(engine: Any) -> None:
    """:func:`refresh` for an AsyncLLM."""
    for command, metrics in _fresh.items():
        for rank, gauges in (await call_ranks_async(engine, command, {})).items():
            if not isinstance(gauges, CommandError):
                _record(metrics.get(rank), gauges)


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
