# SPDX-License-Identifier: Apache-2.0
"""Contexts that requests ask for: whether they are kept, how many, and whose leave for them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from vllm.v1.request import RequestStatus

from tests.long_context.context_engine import Engine, tokens
from vllm_relay.long_context.client import keep_context, list_contexts, serve_clients_async
from vllm_relay.long_context.orders import KEEP_ARG
from vllm_relay.sparse.contexts.context_store import context_id_of

TOKENS = 60


def prompt(number: int) -> list[int]:
    return tokens(TOKENS, 1000 * number)


def ask(engine: Engine, number: int) -> str:
    """A request that asks to be kept; the id of what it becomes if it is."""
    params = SimpleNamespace(
        max_tokens=1, extra_args={KEEP_ARG: 1}, skip_reading_prefix_cache=False
    )
    engine.core.run(prompt(number), params, RequestStatus.FINISHED_STOPPED)
    for worker in (engine.core, *engine.core.workers):
        worker.step_fn() if worker is engine.core else worker.build_indexes()
    return context_id_of(prompt(number))


def own(engine: Engine, number: int) -> str:
    """A context of the operator; its id."""
    return keep_context(engine, prompt(number)).context_id


def kept(engine: Engine) -> set[str]:
    found = {each.context_id for each in list_contexts(engine)}
    assert found == set(engine.core.workers[0].contexts)
    return found


def serve(engine: Engine, *, keeps: bool = True) -> None:
    asyncio.run(serve_clients_async(engine, keeps=keeps))


def test_off_keeps_no_request_but_what_the_operator_asks_for() -> None:
    engine = Engine(client_contexts="off")
    ask(engine, 1)
    assert kept(engine) == set()
    assert kept(engine) | {own(engine, 2)} == kept(engine)
    ask(engine, 3)
    assert len(kept(engine)) == 1


def test_a_server_that_is_guarded_keeps_no_request() -> None:
    engine = Engine()
    before = ask(engine, 1)
    serve(engine, keeps=False)
    ask(engine, 2)
    assert kept(engine) == {before}


def test_the_oldest_of_clients_leaves_for_a_new_one() -> None:
    engine = Engine(max_client_context_tokens=2 * TOKENS + 10)
    of_operator = own(engine, 9)
    first, second = ask(engine, 1), ask(engine, 2)
    assert kept(engine) == {of_operator, first, second}
    engine.core.blocks.manager.reset_prefix_cache()
    engine.ask([*prompt(1), 7])
    third = ask(engine, 3)
    assert kept(engine) == {of_operator, first, third}


def test_one_that_is_larger_than_all_may_be_is_not_kept() -> None:
    engine = Engine(max_client_context_tokens=TOKENS - 1)
    ask(engine, 1)
    assert kept(engine) == set()


def test_a_server_has_a_quota_and_an_engine_in_process_has_none() -> None:
    alone, serving = Engine(host_granules=20), Engine(host_granules=20)
    serve(serving)
    assert alone.core.long_contexts.contexts._quota.max_tokens is None
    assert serving.core.long_contexts.contexts._quota.max_tokens == 10 * 1024
    given = Engine(max_client_context_tokens=77)
    serve(given)
    assert given.core.long_contexts.contexts._quota.max_tokens == 77


def test_clients_never_drive_out_what_the_operator_keeps_in_memory() -> None:
    engine = Engine(host_granules=4)  # one of them for the longest request
    serve(engine)
    operators = {own(engine, 1), own(engine, 2)}
    first = ask(engine, 3)
    assert kept(engine) == operators | {first}
    assert kept(engine) == operators | {first}
    second = ask(engine, 4)
    assert kept(engine) == operators | {second}
    others = Engine(host_granules=3)
    serve(others)
    operators = {own(others, 1), own(others, 2)}
    ask(others, 3)
    assert kept(others) == operators


def test_a_full_folder_is_left_by_those_of_clients_first() -> None:
    engine = Engine(context_dir="contexts", context_disk_gib=1000.5 / (1 << 30))
    operators = own(engine, 1)
    engine.core.workers[0].build_indexes(400)
    clients = ask_in_folder(engine, 2, 500)
    assert kept(engine) == {operators, clients}
    later = ask_in_folder(engine, 3, 500)
    assert kept(engine) == {operators, later}
    ask_in_folder(engine, 4, 700)
    assert kept(engine) == {operators}


def ask_in_folder(engine: Engine, number: int, file_bytes: int) -> str:
    params = SimpleNamespace(
        max_tokens=1, extra_args={KEEP_ARG: 1}, skip_reading_prefix_cache=False
    )
    engine.core.run(prompt(number), params, RequestStatus.FINISHED_STOPPED)
    engine.core.step_fn()
    engine.core.workers[0].build_indexes(file_bytes)
    return context_id_of(prompt(number))


def test_what_the_operator_asks_for_too_is_the_operators() -> None:
    engine = Engine(max_client_context_tokens=TOKENS)
    clients = ask(engine, 1)
    assert own(engine, 1) == clients
    second = ask(engine, 2)
    assert kept(engine) == {clients, second}


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED])
def test_what_was_declared_and_not_kept_can_be_asked_for_again(status: RequestStatus) -> None:
    engine = Engine(client_contexts="off")
    engine.status = status
    with pytest.raises(Exception, match="try again"):
        own(engine, 1)
    engine.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert kept(engine) == set()
    assert kept(engine) | {own(engine, 1)} == kept(engine)
