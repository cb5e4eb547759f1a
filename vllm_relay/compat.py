# SPDX-License-Identifier: Apache-2.0
"""Every change vllm-relay makes to vLLM: one function each, its reason, and when it can go.

All functions are idempotent, and the replaced functions pass on arguments they do not know.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm_relay.compat_wrap import wrap


def pickle_backend_by_restoring(member: Any, restore: Callable[[], Any]) -> None:
    """Unpickle the dynamic enum member ``member`` by calling ``restore()``.

    Reason: an enum member pickles by value, and a spawned process unpickles VllmConfig before it
    loads plugins: "'...RelayBackend' is not a valid AttentionBackendEnum".
    Remove when: vLLM loads general plugins before it unpickles in a spawned process.
    """
    # both picklers look __reduce_ex__ up on the object, so an instance attribute is enough
    member.__reduce_ex__ = lambda protocol: (restore, ())


def let_platform_select(
    platform_cls: type, path_for_layer: Mapping[str, Callable[[Any, Any], str]]
) -> None:
    """Make a platform return ``path_for_layer[name](backend, selector_config)`` for the layers that
    are to run on the backend ``name``; it raises where the backend cannot serve the layer.

    Reason: CpuPlatform.get_attn_backend_cls falls back to CPU_ATTN, or an MLA backend, for any
    backend it does not know, with no more than a log line. CudaPlatform takes the one class that is
    registered, and which of vLLM's own backends prompts are left to depends on the layer.
    Remove when: platforms honour registered backends, and a backend may choose its class by layer.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_attn_backend_cls(
            cls: type, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
        ) -> str:
            find_path = path_for_layer.get(getattr(selected_backend, "name", ""))
            if find_path is None:
                return original(cls, selected_backend, attn_selector_config, *args, **kwargs)
            return find_path(selected_backend, attn_selector_config)

        return get_attn_backend_cls

    wrap(platform_cls, "get_attn_backend_cls", make)


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

    wrap(platform_cls, "check_and_update_config", make)


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

    from vllm_relay import compat_modules

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_scheduler_cls(self: Any, *args: Any, **kwargs: Any) -> Any:
            _patch_scheduler()
            _add_relay_command()
            _load_contexts_of_new_engines()
            compat_modules.hash_modules_apart()
            return original(self, *args, **kwargs)

        return get_scheduler_cls

    wrap(SchedulerConfig, "get_scheduler_cls", make)


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
                if step.long_contexts is not None and self.relay_long_contexts is not None:
                    self.relay_long_contexts.update_contexts(step.long_contexts.reports)
                    self.relay_long_contexts.restart(self, step.long_contexts.lost)
            return original(self, scheduler_output, model_runner_output, *args, **kwargs)

        return update_from_output

    def make_make_stats(original: Callable[..., Any]) -> Callable[..., Any]:
        def make_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
            scheduler_stats = original(self, *args, **kwargs)
            relay_stats = getattr(self, "relay_stats", None)
            if scheduler_stats is not None and relay_stats is not None:
                long_contexts, relay_stats.long_contexts = relay_stats.long_contexts, None
                scheduler_stats.relay = relay_stats.to_dict()
                if long_contexts is not None and self.relay_long_contexts is not None:
                    scheduler_stats.relay |= self.relay_long_contexts.numbers(long_contexts)
                self.relay_stats = None
            return scheduler_stats

        return make_stats

    wrap(Scheduler, "update_from_output", make_update)
    wrap(Scheduler, "make_stats", make_make_stats)
    _keep_long_contexts_beside(Scheduler)


def _keep_long_contexts_beside(scheduler_cls: type) -> None:
    """Give schedulers of RELAY_SPARSE a LongContextScheduler, and send its orders to the workers.

    Reason: which tokens of a request the host has decides where it starts, what a preemption costs
    and who is admitted, and a KV connector would bring tokens back to the device for that.
    Remove when: KV cache managers of plug-ins can count tokens as computed that have no blocks,
    are told of preemptions, and SchedulerOutput carries data of plug-ins.
    """
    from vllm_relay.limits import sparse_is_selected
    from vllm_relay.long_context.orders import ATTRIBUTE

    def make_init(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self.relay_long_contexts = None
            if sparse_is_selected(self.vllm_config):
                from vllm_relay.long_context.scheduler import LongContextScheduler

                self.relay_long_contexts = LongContextScheduler(self)

        return __init__

    def make_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
        def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
            scheduler_output = original(self, *args, **kwargs)
            if self.relay_long_contexts is not None:
                orders = self.relay_long_contexts.take_orders()
                if orders:
                    setattr(scheduler_output, ATTRIBUTE, orders)
            return scheduler_output

        return schedule

    def make_free(original: Callable[..., Any]) -> Callable[..., Any]:
        def _free_request_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            if self.relay_long_contexts is not None:
                self.relay_long_contexts.before_free(request)
            return original(self, request, *args, **kwargs)

        return _free_request_blocks

    def make_reset(original: Callable[..., Any]) -> Callable[..., Any]:
        def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
            done = original(self, *args, **kwargs)
            if self.relay_long_contexts is not None:
                self.relay_long_contexts.forget_preempted()
            return done

        return reset_prefix_cache

    wrap(scheduler_cls, "__init__", make_init)
    wrap(scheduler_cls, "schedule", make_schedule)
    wrap(scheduler_cls, "_free_request_blocks", make_free)
    wrap(scheduler_cls, "reset_prefix_cache", make_reset)


def report_admissions(kv_cache_manager: Any, on_admitted: Callable[[Any, int], None]) -> None:
    """Call ``on_admitted(request, hit_tokens)`` when a request has been admitted.

    Reason: KVCacheManager sums hits up over all requests of a step, so it does not say which
    prefixes are hit, and counts nothing where statistics are disabled.
    Remove when: vLLM's prefix cache statistics name prefixes.
    """

    original = kv_cache_manager.record_prefix_cache_stats

    def record_prefix_cache_stats(request: Any, num_hits: int, *args: Any, **kwargs: Any) -> Any:
        if kv_cache_manager.prefix_cache_lookup_enabled(request):
            on_admitted(request, num_hits)
        return original(request, num_hits, *args, **kwargs)

    kv_cache_manager.record_prefix_cache_stats = record_prefix_cache_stats


def _add_relay_command() -> None:
    """Give EngineCore the method ``relay_command(name, arguments)``, for call_utility.

    Reason: collective_rpc reaches workers only, and a plugin has no other call to the scheduler.
    Called when EngineCore asks for its scheduler class: other processes never import it.
    Remove when: EngineCore lets schedulers answer utility calls.
    """
    from vllm.v1.engine.core import EngineCore

    from vllm_relay.prefix_cache import commands

    def relay_command(self: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        from vllm_relay.long_context import commands as context_commands

        if name in context_commands.COMMANDS:
            return context_commands.run(self, name, arguments)
        return commands.run(self.scheduler, name, arguments)

    EngineCore.relay_command = relay_command


def _load_contexts_of_new_engines() -> None:
    """Tell the scheduler of an engine core which contexts its workers find in their folder, before
    its first request and when the prefix cache was reset.

    Reason: the scheduler has no way to the workers.
    Called when EngineCore asks for its scheduler class: other processes never import it.
    Remove when: schedulers of plug-ins can call workers.
    """
    from vllm.v1.engine.core import EngineCore

    def make_add_request(original: Callable[..., Any]) -> Callable[..., Any]:
        def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
            _load_contexts(self)
            return original(self, *args, **kwargs)

        return add_request

    def make_reset(original: Callable[..., Any]) -> Callable[..., Any]:
        def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
            done = original(self, *args, **kwargs)
            _load_contexts(self, again=True)
            return done

        return reset_prefix_cache

    wrap(EngineCore, "add_request", make_add_request)
    wrap(EngineCore, "reset_prefix_cache", make_reset)


def _load_contexts(engine_core: Any, *, again: bool = False) -> None:
    if getattr(engine_core.scheduler, "relay_long_contexts", None) is not None:
        from vllm_relay.long_context import commands

        commands.load_contexts(engine_core, again=again)


def prepare_new_engines() -> None:
    """Pin the configured system prompts and compute the configured contexts when an LLMEngine has
    started, and before the first request of an AsyncLLM.

    Reason: there is no hook between the start of an engine and its first request, and LLM loads
    plugins when it is too late to wrap it. A server does it earlier, in its endpoint plugins.
    Remove when: vLLM calls plugins when an engine has started.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm_relay.config import scheduler_is_selected
    from vllm_relay.limits import sparse_is_selected
    from vllm_relay.long_context.preload import preload_contexts, preload_contexts_async
    from vllm_relay.prefix_cache.system_prompts import pin_system_prompts, pin_system_prompts_async

    def make_init(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            try:
                if scheduler_is_selected(self.vllm_config):
                    pin_system_prompts(self)
                if sparse_is_selected(self.vllm_config):
                    preload_contexts(self)
            except BaseException:
                self.engine_core.shutdown()
                raise

        return __init__

    def make_add_request(original: Callable[..., Any]) -> Callable[..., Any]:
        async def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if scheduler_is_selected(self.vllm_config):
                    await pin_system_prompts_async(self)
                if sparse_is_selected(self.vllm_config):
                    await preload_contexts_async(self)
            except ValueError as error:  # whose message AsyncLLM.generate would drop
                raise VLLMValidationError(str(error)) from error
            return await original(self, *args, **kwargs)

        return add_request

    wrap(LLMEngine, "__init__", make_init)
    wrap(AsyncLLM, "add_request", make_add_request)


def serve_relay_endpoints() -> None:
    """Add relay's endpoint plugins to every server, and their routes to those the API key guards.

    Reason: vLLM loads endpoint plugins only if VLLM_PLUGINS names them, which would make a server
    start without its routes, its system prompts and its contexts. Its API key guards a fixed list
    of prefixes, and who may not generate may not fill the KV cache either.
    Remove when: endpoint plugins can be selected by the configuration and ask for the API key.
    """
    from vllm import plugins

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_endpoint_plugins(supported_tasks: Any = None, *args: Any, **kwargs: Any) -> Any:
            from vllm_relay import compat_modules
            from vllm_relay.long_context.http import ContextEndpoints
            from vllm_relay.modules.http import SchemaEndpoints
            from vllm_relay.prefix_cache.http import PinEndpoints

            loaded = original(supported_tasks, *args, **kwargs)
            if "generate" in (supported_tasks or ()):
                _guard_by_api_key("/relay")
                loaded = [*loaded, PinEndpoints(), ContextEndpoints(), SchemaEndpoints()]
                compat_modules.render_modular_prompts()
                compat_modules.tell_usage_by_module()
            return loaded

        return load_endpoint_plugins

    wrap(plugins, "load_endpoint_plugins", make)


def _guard_by_api_key(prefix: str) -> None:
    """See serve_relay_endpoints."""
    from vllm.entrypoints.serve.middleware import authenticate

    if prefix not in authenticate.GUARDED_PREFIX:
        authenticate.GUARDED_PREFIX = (*authenticate.GUARDED_PREFIX, prefix)


def attach_stats_to_worker_output() -> None:
    """Send the statistics of a step with the worker's ModelRunnerOutput, as ``relay_stats``.

    Reason: as for carry_stats_through_scheduler. Called in a worker process only, when its first
    RELAY layers are set up.
    Remove when: ModelRunnerOutput carries statistics of plugins.
    """
    from vllm.v1.outputs import (
        EMPTY_MODEL_RUNNER_OUTPUT,
        AsyncModelRunnerOutput,
        ModelRunnerOutput,
    )
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_relay.stats import recorder

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


def call_before_each_step(name: str, on_step: Callable[[Any, Any], None]) -> None:
    """Call ``on_step(worker, scheduler_output)`` before a worker executes a step.

    Reason: an attention backend is told the block table of a step, not whose rows these are.
    Called in a worker process only, when its first layers are set up.
    Remove when: attention metadata builders are given the step's requests.

    Args:
        name: of who is told; once is enough.
    """
    from vllm.v1.worker.gpu_worker import Worker

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            on_step(self, scheduler_output)
            return original(self, scheduler_output, *args, **kwargs)

        return execute_model

    wrap(Worker, "execute_model", make, mark=f"_steps_are_reported_to_{name}")


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

    wrap(StatLoggerManager, "__init__", make)


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

    wrap(LLMEngine, "get_metrics", make)


@contextlib.contextmanager
def free_block_queue(make_queue: Callable[[list[Any]], Any]) -> Iterator[None]:
    """Let the block pools built in this context keep their free blocks in ``make_queue(blocks)``.

    Reason: BlockPool builds its FreeKVCacheBlockQueue itself, and which block is evicted is decided
    there.
    Remove when: vLLM has a registry of eviction policies for the prefix cache.
    """
    from vllm.v1.core import block_pool

    original = block_pool.FreeKVCacheBlockQueue
    block_pool.FreeKVCacheBlockQueue = make_queue
    try:
        yield
    finally:
        block_pool.FreeKVCacheBlockQueue = original


def mark_offline_engines() -> None:
    """Make ``is_offline`` true for the configurations of ``LLM``.

    Reason: the order of requests is free only where all are there from the beginning, and neither
    the configuration nor the engine core knows whether LLM or a server is in front of it.
    Remove when: VllmConfig tells its usage context.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_engine_config(
            self: Any, usage_context: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            vllm_config = original(self, usage_context, *args, **kwargs)
            if usage_context == UsageContext.LLM_CLASS:
                vllm_config.scheduler_config.relay_is_offline = True
            return vllm_config

        return create_engine_config

    wrap(EngineArgs, "create_engine_config", make)


def is_offline(vllm_config: Any) -> bool:
    """Whether the engine of this configuration belongs to an ``LLM``."""
    return getattr(vllm_config.scheduler_config, "relay_is_offline", False)
