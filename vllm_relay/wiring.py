# SPDX-License-Identifier: Apache-2.0
"""Which of our functions the changes of vLLM call, in each kind of process.

- Every process: backends are told which tokens are hidden (`plugin.register`).
- Front ends: requests are checked (`plugin.register`); the rest when a configuration selects it
  (`plugin.check_new_config`): prompts that are computed first, routes, metrics, how they end.
- Engine cores: commands, statistics, names of blocks, what stands beside the scheduler, before
  there is one. Those of stock vLLM too: nothing may fail there that it does not need, so what can
  is imported when it is called.
- Workers: what backends ask for when their first layers are set up.

What a process does not need is not imported in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_relay.vllm_changes import (
    block_pool,
    engine_core,
    engine_start,
    requests,
    scheduler,
    server,
    shutdown,
    statistics,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_relay.attention_backends.step_rows import RowSource
    from vllm_relay.long_context.scheduling.scheduler import LongContextScheduler

LONG_CONTEXTS = "relay_long_contexts"
"""The attribute of schedulers with a `LongContextScheduler`, or None."""
FEED = "relay_page"
"""The attribute of schedulers whose blocks are recorded with their `Feed`."""

OPEN_CONNECTIONS_WAIT_S = 1
"""How long a server that ends waits for connections, once its engine has ended."""


def hide_tokens_of_modules() -> None:
    """Backends are told by prompt modules which tokens are hidden."""
    from vllm_relay.attention_backends.step_rows import use_rows_of

    def make_source(vllm_config: VllmConfig) -> RowSource | None:
        from vllm_relay.modules.engine import worker

        return worker.set_up(vllm_config)

    use_rows_of(make_source)


def check_modular_requests() -> None:
    """Front ends refuse requests with modules that their engine would not compute exactly, and
    leave the padding between modules out of what they count."""

    def check(vllm_config: VllmConfig, request: Any) -> None:
        from vllm_relay.modules.engine.requests import check_request

        check_request(vllm_config, request)

    def seen_tokens(sampling_params: Any, token_ids: list[int]) -> list[int] | None:
        from vllm_relay.modules.prompt.plan import plan_of

        plan = plan_of(sampling_params)
        return None if plan is None else plan.seen_tokens(token_ids)

    from vllm_relay.modules.prompt.plan import MISSED

    requests.check_requests(check)
    requests.carry_to_outputs(MISSED)
    requests.tell_tokens_without_padding(seen_tokens)


def prepare_engine_cores() -> None:
    """What engine cores need, when one starts in this process."""
    scheduler.call_before_scheduler(_prepare_engine_core)


def _prepare_engine_core() -> None:
    from vllm_relay.long_context.orders import ORDERS_ATTRIBUTE
    from vllm_relay.modules.prompt.block_hashes import module_block_hasher
    from vllm_relay.statistics_log import end_log_of

    statistics.carry_through_scheduler(_take_over_stats, _numbers)
    scheduler.keep_beside_scheduler(LONG_CONTEXTS, _make_long_contexts, ORDERS_ATTRIBUTE)
    block_pool.call_with_new_schedulers(_record_blocks)
    engine_core.add_command(_run_command)
    engine_core.call_before_requests(
        _load_contexts, after_reset=lambda core: _load_contexts(core, again=True)
    )
    engine_core.hash_blocks_by(module_block_hasher)
    engine_core.call_before_end(lambda core: end_log_of(core.scheduler))


def _run_command(core: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from vllm_relay.commands import engine
    from vllm_relay.long_context.commands import COMMANDS as CONTEXT_COMMANDS
    from vllm_relay.page.commands import COMMANDS as PAGE_COMMANDS
    from vllm_relay.prefix_cache.pins.commands import COMMANDS as PREFIX_COMMANDS

    commands = {**PREFIX_COMMANDS, **CONTEXT_COMMANDS, **PAGE_COMMANDS}
    return engine.run(commands, core, name, arguments)


def _record_blocks(of_scheduler: Any) -> None:
    from vllm_relay.config import RelayConfig

    if RelayConfig.from_vllm_config(of_scheduler.vllm_config).page:
        from vllm_relay.page.recording import record

        setattr(of_scheduler, FEED, record(of_scheduler))


def _make_long_contexts(of_scheduler: Any) -> LongContextScheduler | None:
    from vllm_relay.limits import sparse_is_selected

    if not sparse_is_selected(of_scheduler.vllm_config):
        return None
    from vllm_relay.long_context.scheduling.scheduler import LongContextScheduler

    return LongContextScheduler(of_scheduler)


def _take_over_stats(of_scheduler: Any, step: Any) -> None:
    from vllm_relay.statistics_log import log_of

    log_of(of_scheduler).add(replace(step, long_contexts=None))
    long_contexts = getattr(of_scheduler, LONG_CONTEXTS)
    if step.long_contexts is not None and long_contexts is not None:
        long_contexts.contexts.update(step.long_contexts.reports)
        long_contexts.restart(of_scheduler, step.long_contexts.lost)
    if (feed := getattr(of_scheduler, FEED, None)) is not None:
        feed.on_step(step)


def _numbers(of_scheduler: Any, stats: Any) -> dict[str, Any]:
    counted, stats.long_contexts = stats.long_contexts, None
    numbers = stats.to_dict()
    long_contexts = getattr(of_scheduler, LONG_CONTEXTS)
    if counted is not None and long_contexts is not None:
        numbers |= long_contexts.numbers(counted)
    return numbers


def _load_contexts(core: Any, *, again: bool = False) -> None:
    if getattr(core.scheduler, LONG_CONTEXTS, None) is not None:
        from vllm_relay.long_context.commands import load_contexts

        load_contexts(core, again=again)


def prepare_new_engines() -> None:
    """Engines pin the configured system prompts, and compute the configured contexts."""
    from vllm_relay.config import scheduler_is_selected
    from vllm_relay.limits import sparse_is_selected
    from vllm_relay.long_context.client import preload_contexts, preload_contexts_async
    from vllm_relay.prefix_cache.pins.system_prompts import (
        pin_system_prompts,
        pin_system_prompts_async,
    )

    def prepare(engine: Any) -> None:
        if scheduler_is_selected(engine.vllm_config):
            pin_system_prompts(engine)
        if sparse_is_selected(engine.vllm_config):
            preload_contexts(engine)

    async def prepare_async(engine: Any) -> None:
        if scheduler_is_selected(engine.vllm_config):
            await pin_system_prompts_async(engine)
        if sparse_is_selected(engine.vllm_config):
            await preload_contexts_async(engine)

    engine_start.prepare_new_engines(prepare, prepare_async)


def serve_endpoints() -> None:
    """Servers that generate have the routes under /relay, and take the field `relay`."""
    server.serve_endpoints(_make_endpoints)


def _make_endpoints() -> Sequence[Any]:
    from vllm_relay.serving.contexts import ContextEndpoints, check_keeping
    from vllm_relay.serving.fresh_metrics import FreshMetrics
    from vllm_relay.serving.modular_requests import (
        add_usage,
        apply_modular_prompt,
        note_of,
        with_usage,
    )
    from vllm_relay.serving.page import PageEndpoints
    from vllm_relay.serving.pins import PinEndpoints
    from vllm_relay.serving.schemas import SchemaEndpoints

    def tokens_of(renderer: Any, request: Any) -> list[int] | None:
        check_keeping(renderer, request)
        return apply_modular_prompt(renderer, request)

    server.render_prompts_by(tokens_of)
    server.add_to_usage(note_of, add_usage, with_usage)
    return [
        PinEndpoints(),
        ContextEndpoints(),
        SchemaEndpoints(),
        PageEndpoints(),
        FreshMetrics(_refresh_metrics),
    ]


async def _refresh_metrics(engine: Any) -> None:
    from vllm_relay.metrics import refresh_async

    await refresh_async(engine)


def publish_metrics() -> None:
    """Front ends publish the metrics relay:*."""
    from vllm_relay.metrics import RelayStatLogger, refresh, snapshot

    def metrics_of(engine: Any) -> list[Any]:
        refresh(engine)
        return snapshot()

    statistics.add_stat_logger(RelayStatLogger)
    statistics.add_to_metrics(metrics_of)


def end_open_requests() -> None:
    """Servers that are told to end do so, and answer what is open with an error."""
    shutdown.end_open_requests(OPEN_CONNECTIONS_WAIT_S)
