# SPDX-License-Identifier: Apache-2.0
"""What a front end can ask the engine core about contexts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_relay.commands.errors import CommandError
from vllm_relay.long_context.orders import DELETED, ContextReport
from vllm_relay.long_context.scheduling.kept_contexts import KeptContexts
from vllm_relay.sparse.contexts.context_store import context_id_of

if TYPE_CHECKING:
    from vllm_relay.long_context.host.worker_contexts import WorkerContexts

HOW_TO_SELECT = "start vLLM with --attention-backend relay_sparse"


def load_contexts(engine_core: Any, *, again: bool = False) -> None:
    """Tell the scheduler which contexts all workers have; done once.

    Args:
        again: read their folder again: the weights may have changed, and with them whose contexts
            are the model's.
    """
    contexts = engine_core.scheduler.relay_long_contexts.contexts
    if again or not contexts.has_loaded:
        _update(engine_core, reopen=again)


def _update(engine_core: Any, *, reopen: bool = False) -> list[Any]:
    """The reports of the first worker, about the contexts that all workers have, and of those that
    they are told of with the next step."""
    scheduler = engine_core.scheduler
    if not scheduler.get_num_unfinished_requests() and scheduler.has_finished_requests():
        engine_core.step_fn()  # an empty step, which tells the workers what has ended
    contexts = scheduler.relay_long_contexts.contexts
    _delete_evicted(engine_core)
    rpc = engine_core.model_executor.collective_rpc
    first, *others = rpc(_reports_of_worker, args=(reopen,))
    ids = [{each.context_id for each in rank if each.state != DELETED} for rank in others]
    reports = [
        each
        for each in first
        if each.state == DELETED or all(each.context_id in known for known in ids)
    ]
    common = [each.context_id for each in reports if each.state != DELETED]
    # tokens are long: those that the scheduler has already are not sent
    unknown = [each for each in common if each not in contexts.catalog]
    tokens, *_ = rpc(_tokens_in_worker, args=(unknown,)) if unknown else [{}]
    contexts.load(common, tokens)
    contexts.update(reports)
    _delete_evicted(engine_core)
    pending = contexts.pending()
    told_of = {report.context_id for report in pending}
    left = [e for e in reports if e.state != DELETED and e.context_id in contexts.catalog]
    return [*(each for each in left if each.context_id not in told_of), *pending]


def _delete_evicted(engine_core: Any) -> None:
    """What has left the catalog leaves the workers, else their reports would bring it back."""
    for context_id in engine_core.scheduler.relay_long_contexts.contexts.take_evicted():
        engine_core.model_executor.collective_rpc(_delete_in_worker, args=(context_id,))


def _declare(engine_core: Any, token_ids: list[int]) -> dict[str, Any]:
    """Whether a prompt can become a context, and whether it is one."""
    contexts = _contexts(engine_core)
    tokens = np.asarray(token_ids, np.int64)
    context_id = context_id_of(tokens)
    if context_id in contexts.catalog:
        found = [each for each in _update(engine_core) if each.context_id == context_id]
        if found and (found[0].problem is None or found[0].state == "stored"):
            contexts.declare(context_id)
            return {"id": context_id, "is_known": True}
        if found:  # it could not be written: it is tried again
            _delete(engine_core, context_id)
    refused = contexts.refuse(len(tokens))
    if refused is not None:
        raise CommandError(*refused)
    contexts.declare(context_id)
    return {"id": context_id, "is_known": False}


def _list(engine_core: Any) -> list[dict[str, Any]]:
    """What every context is and takes, in the first worker."""
    _contexts(engine_core)
    return [asdict(report) for report in _update(engine_core)]


def _delete(engine_core: Any, context_id: str) -> None:
    contexts = _contexts(engine_core)
    if context_id not in contexts.catalog:
        raise CommandError(
            404, f"there is no context {context_id!r}: GET /relay/contexts lists those there are"
        )
    problems = engine_core.model_executor.collective_rpc(_delete_in_worker, args=(context_id,))
    if not all(problems):  # else all ranks have it as before: it is used, and can be deleted later
        contexts.delete(context_id)
    if problem := next(filter(None, problems), None):
        raise CommandError(500, f"context {context_id!r} {problem}")


COMMANDS: dict[str, Callable[..., Any]] = {
    "declare_context": _declare,
    "contexts": _list,
    "delete_context": _delete,
    "serve_clients": lambda engine_core, keeps: (
        engine_core.scheduler.relay_long_contexts.contexts.serve_clients(keeps)
    ),
    "context_gauges": lambda engine_core: engine_core.scheduler.relay_long_contexts.gauges(),
}


def _contexts(engine_core: Any) -> KeptContexts:
    long_contexts = getattr(engine_core.scheduler, "relay_long_contexts", None)
    if long_contexts is None:
        raise CommandError(501, f"contexts are kept by RELAY_SPARSE only: {HOW_TO_SELECT}")
    load_contexts(engine_core)
    return long_contexts.contexts


def _reports_of_worker(worker: Any, reopen: bool) -> list[ContextReport]:
    return [report for report, _ in _contexts_of_worker(worker, reopen).reports()]


def _tokens_in_worker(worker: Any, context_ids: Sequence[str]) -> dict[str, np.ndarray]:
    """Of those contexts that are still there."""
    reports = _contexts_of_worker(worker).reports()
    return {each.context_id: tokens for each, tokens in reports if each.context_id in context_ids}


def _delete_in_worker(worker: Any, context_id: str) -> str | None:
    return _contexts_of_worker(worker).delete(context_id)


def _contexts_of_worker(worker: Any, reopen: bool = False) -> WorkerContexts:
    from vllm_relay.long_context.host.worker import make_worker

    long_contexts = make_worker(worker.vllm_config)
    if reopen:
        long_contexts.close_contexts()
    return long_contexts.open_contexts(worker)
