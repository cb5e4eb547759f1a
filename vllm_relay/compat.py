# SPDX-License-Identifier: Apache-2.0
"""Every change vllm-relay makes to vLLM: one function each, its reason, and when it can go.

All functions are idempotent, and the replaced functions pass on arguments they do not know.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_MARK = "_replaced_by_vllm_relay"


def _wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace ``owner.name`` by ``make(original)`` once; classmethods stay classmethods."""
    original = inspect.getattr_static(owner, name)
    is_classmethod = isinstance(original, classmethod)
    function = original.__func__ if is_classmethod else original
    if getattr(function, _MARK, False):
        return
    replacement = functools.wraps(function)(make(function))
    setattr(replacement, _MARK, True)
    setattr(owner, name, classmethod(replacement) if is_classmethod else replacement)


def pickle_backend_by_restoring(member: Any, restore: Callable[[], Any]) -> None:
    """Unpickle the dynamic enum member ``member`` by calling ``restore()``.

    Reason: an enum member pickles by value, and a spawned process unpickles VllmConfig before it
    loads plugins: "'...RelayBackend' is not a valid AttentionBackendEnum".
    Remove when: vLLM loads general plugins before it unpickles in a spawned process.
    """
    # both picklers look __reduce_ex__ up on the object, so an instance attribute is enough
    member.__reduce_ex__ = lambda protocol: (restore, ())


def let_cpu_platform_select(
    platform_cls: type, backend_name: str, check_layer: Callable[..., None]
) -> None:
    """Make the CPU platform return the selected backend ``backend_name``.

    ``check_layer(selector_config)`` runs first and raises where the backend cannot serve the layer.

    Reason: CpuPlatform.get_attn_backend_cls falls back to CPU_ATTN, or an MLA backend, for any
    backend it does not know, with no more than a log line.
    Remove when: CpuPlatform honours registered backends as CudaPlatform does.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_attn_backend_cls(
            cls: type, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
        ) -> str:
            if getattr(selected_backend, "name", None) != backend_name:
                return original(cls, selected_backend, attn_selector_config, *args, **kwargs)
            check_layer(attn_selector_config)
            return selected_backend.get_path()

        return get_attn_backend_cls

    _wrap(platform_cls, "get_attn_backend_cls", make)


def run_on_new_config(platform_cls: type, on_config: Callable[[Any], None]) -> None:
    """Call ``on_config(vllm_config)`` when the front end has built a configuration.

    Reason: a wrong option must stop start-up in the user's process, not in a worker whose traceback
    arrives as "engine core initialization failed"; plugins have no hook for it. The platform's hook
    is the last thing VllmConfig runs that every platform has.
    Remove when: vLLM calls plugins with the finished VllmConfig.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def check_and_update_config(cls: type, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            original(cls, vllm_config, *args, **kwargs)
            on_config(vllm_config)

        return check_and_update_config

    _wrap(platform_cls, "check_and_update_config", make)


def add_relay_field_to_scheduler_stats() -> None:
    """Give SchedulerStats an optional dict ``relay`` that survives the way to the front end.

    Reason: EngineCore sends SchedulerStats through msgspec, which drops attributes that are no
    dataclass fields; the existing dict fields are interpreted by the stock loggers. A front end
    without this field ignores it.
    Remove when: SchedulerStats carries a dict for plugins.
    """
    import copy

    from vllm.v1.metrics.stats import SchedulerStats

    fields = SchedulerStats.__dataclass_fields__
    if "relay" in fields:
        return
    field = copy.copy(fields["perf_stats"])  # an optional field with default None
    field.name, field.type = "relay", dict[str, Any] | None
    fields["relay"] = field
    SchedulerStats.__annotations__ = {**SchedulerStats.__annotations__, "relay": field.type}
    SchedulerStats.relay = None


def carry_stats_through_scheduler() -> None:
    """Move the ``relay_stats`` of worker outputs into SchedulerStats.

    Reason: there is no other way from a worker to the front end that works with and without
    multiprocessing. Scheduler is patched when EngineCore asks for it: other processes never
    import it.
    Remove when: ModelRunnerOutput and SchedulerStats carry statistics of plugins.
    """
    from vllm.config import SchedulerConfig

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_scheduler_cls(self: Any, *args: Any, **kwargs: Any) -> Any:
            _patch_scheduler()
            return original(self, *args, **kwargs)

        return get_scheduler_cls

    _wrap(SchedulerConfig, "get_scheduler_cls", make)


def _patch_scheduler() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_relay.stats import RelayStats

    def make_update(original: Callable[..., Any]) -> Callable[..., Any]:
        def update_from_output(
            self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
        ) -> Any:
            step = getattr(model_runner_output, "relay_stats", None)
            if step is not None:
                if getattr(self, "relay_stats", None) is None:
                    self.relay_stats = RelayStats()
                self.relay_stats.merge(step)
            return original(self, scheduler_output, model_runner_output, *args, **kwargs)

        return update_from_output

    def make_make_stats(original: Callable[..., Any]) -> Callable[..., Any]:
        def make_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
            scheduler_stats = original(self, *args, **kwargs)
            relay_stats = getattr(self, "relay_stats", None)
            if scheduler_stats is not None and relay_stats is not None:
                scheduler_stats.relay = relay_stats.to_dict()
                self.relay_stats = None
            return scheduler_stats

        return make_stats

    _wrap(Scheduler, "update_from_output", make_update)
    _wrap(Scheduler, "make_stats", make_make_stats)


def attach_stats_to_worker_output() -> None:
    """Send the statistics of a step with the worker's ModelRunnerOutput, as ``relay_stats``.

    Reason: as for carry_stats_through_scheduler. Called in a worker process only, when its first
    RELAY layers are set up.
    Remove when: ModelRunnerOutput carries statistics of plugins.
    """
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_relay.stats import recorder

    def attach(output: Any) -> Any:
        # the empty output is one object for all steps
        if isinstance(output, ModelRunnerOutput) and output is not EMPTY_MODEL_RUNNER_OUTPUT:
            output.relay_stats = recorder.take_step()
        return output

    def make_execute_model(original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorder.begin_step()
            return attach(original(self, *args, **kwargs))

        return execute_model

    def make_sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
        def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
            return attach(original(self, *args, **kwargs))

        return sample_tokens

    _wrap(Worker, "execute_model", make_execute_model)
    _wrap(Worker, "sample_tokens", make_sample_tokens)


def add_stat_logger_to_every_front_end() -> None:
    """Add RelayStatLogger to every StatLoggerManager.

    Reason: only AsyncLLM loads the entry points of vllm.stat_logger_plugins; LLM does not.
    Remove when: LLMEngine loads these entry points too.
    """
    from vllm.v1.metrics.loggers import StatLoggerManager

    from vllm_relay.metrics import RelayStatLogger

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            call = signature.bind(self, *args, **kwargs)
            factories = list(call.arguments.get("custom_stat_loggers") or [])
            if RelayStatLogger not in factories:
                factories.append(RelayStatLogger)
            call.arguments["custom_stat_loggers"] = factories
            original(*call.args, **call.kwargs)

        return __init__

    _wrap(StatLoggerManager, "__init__", make)


def report_relay_metrics() -> None:
    """Add the ``relay:*`` metrics to ``LLM.get_metrics()``.

    Reason: get_metrics_snapshot returns metrics whose name starts with "vllm:" only, and vLLM
    unregisters foreign metrics of that name.
    Remove when: get_metrics() returns the metrics of stat logger plugins.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm_relay.metrics import snapshot

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_metrics(self: Any, *args: Any, **kwargs: Any) -> Any:
            return [*original(self, *args, **kwargs), *snapshot()]

        return get_metrics

    _wrap(LLMEngine, "get_metrics", make)
