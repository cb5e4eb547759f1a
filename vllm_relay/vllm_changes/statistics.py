# SPDX-License-Identifier: Apache-2.0
"""How statistics get from a worker to the metrics of the front end."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from vllm_relay.vllm_changes.wrap import wrap


class StepStats(Protocol):
    """Statistics of steps, as workers send them."""

    def merge(self, later: Any) -> None:
        """Add the statistics of later steps."""


class StepRecorder(Protocol):
    """Collects the statistics of the running step in a worker process."""

    def begin_step(self) -> None: ...

    def take_step(self) -> StepStats | None: ...


def add_field_to_scheduler_stats() -> None:
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


def carry_through_scheduler(
    on_step: Callable[[Any, Any], None], to_numbers: Callable[[Any, Any], dict[str, Any]]
) -> None:
    """Call ``on_step(scheduler, stats)`` with the ``relay_stats`` of each worker output, and send
    ``to_numbers(scheduler, sum of them)`` with the next SchedulerStats.

    Reason: there is no other way from a worker to the front end that works with and without
    multiprocessing. Called in engine cores only.
    Remove when: ModelRunnerOutput and SchedulerStats carry statistics of plugins.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    def make_update(original: Callable[..., Any]) -> Callable[..., Any]:
        def update_from_output(
            self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
        ) -> Any:
            step = getattr(model_runner_output, "relay_stats", None)
            if step is not None:
                on_step(self, step)
                if getattr(self, "relay_stats", None) is None:
                    self.relay_stats = step
                else:
                    self.relay_stats.merge(step)
            return original(self, scheduler_output, model_runner_output, *args, **kwargs)

        return update_from_output

    def make_make_stats(original: Callable[..., Any]) -> Callable[..., Any]:
        def make_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
            scheduler_stats = original(self, *args, **kwargs)
            stats = getattr(self, "relay_stats", None)
            if scheduler_stats is not None and stats is not None:
                scheduler_stats.relay = to_numbers(self, stats)
                self.relay_stats = None
            return scheduler_stats

        return make_stats

    wrap(Scheduler, "update_from_output", make_update)
    wrap(Scheduler, "make_stats", make_make_stats)


def attach_to_worker_output(recorder: StepRecorder) -> None:
    """Send the statistics of a step with the worker's ModelRunnerOutput, as ``relay_stats``.

    Reason: as for carry_through_scheduler. Called in a worker process only, when its first
    RELAY layers are set up.
    Remove when: ModelRunnerOutput carries statistics of plugins.
    """
    from vllm.v1.outputs import (
        EMPTY_MODEL_RUNNER_OUTPUT,
        AsyncModelRunnerOutput,
        ModelRunnerOutput,
    )
    from vllm.v1.worker.gpu_worker import Worker

    def attach(output: Any) -> Any:
        # the empty output is one object for all steps
        if isinstance(output, ModelRunnerOutput) and output is not EMPTY_MODEL_RUNNER_OUTPUT:
            output.relay_stats = recorder.take_step()
        elif isinstance(output, AsyncModelRunnerOutput):
            # another thread asks for the output when the device has it, in a later step
            stats, get_output = recorder.take_step(), output.get_output

            def get_output_with_stats(*args: Any, **kwargs: Any) -> Any:
                arrived = get_output(*args, **kwargs)
                if isinstance(arrived, ModelRunnerOutput):
                    arrived.relay_stats = stats
                return arrived

            output.get_output = get_output_with_stats
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

    wrap(Worker, "execute_model", make_execute_model)
    wrap(Worker, "sample_tokens", make_sample_tokens)


def add_stat_logger(logger_cls: type) -> None:
    """Add a stat logger to every StatLoggerManager.

    Reason: only AsyncLLM loads the entry points of vllm.stat_logger_plugins; LLM does not.
    Remove when: LLMEngine loads these entry points too.
    """
    from vllm.v1.metrics.loggers import StatLoggerManager

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            call = signature.bind(self, *args, **kwargs)
            factories = list(call.arguments.get("custom_stat_loggers") or [])
            if logger_cls not in factories:
                factories.append(logger_cls)
            call.arguments["custom_stat_loggers"] = factories
            original(*call.args, **call.kwargs)

        return __init__

    wrap(StatLoggerManager, "__init__", make)


def add_to_metrics(snapshot: Callable[[Any], list[Any]]) -> None:
    """Add what ``snapshot(engine)`` returns to ``LLM.get_metrics()``.

    Reason: get_metrics_snapshot returns metrics whose name starts with "vllm:" only, and vLLM
    unregisters foreign metrics of that name.
    Remove when: get_metrics() returns the metrics of stat logger plugins.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_metrics(self: Any, *args: Any, **kwargs: Any) -> Any:
            return [*original(self, *args, **kwargs), *snapshot(self)]

        return get_metrics

    wrap(LLMEngine, "get_metrics", make)
