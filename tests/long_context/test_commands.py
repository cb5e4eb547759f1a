# SPDX-License-Identifier: Apache-2.0
"""What the engine core answers about contexts, with several workers and a running engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.long_context.context_engine import GRANULE_BYTES, Engine, EngineCore, tokens
from vllm_relay.commands.engine import result_of, run
from vllm_relay.commands.errors import CommandError
from vllm_relay.long_context import commands
from vllm_relay.long_context.client import keep_context
from vllm_relay.long_context.commands import COMMANDS
from vllm_relay.sparse.contexts.context_store import context_id_of


def listed(core: EngineCore) -> list[dict[str, Any]]:
    return result_of(run(COMMANDS, core, "contexts", {}))


def ids(core: EngineCore) -> list[str]:
    return [each["context_id"] for each in listed(core)]


def keep(engine: Engine, num_tokens: int) -> str:
    context_id = keep_context(engine, tokens(num_tokens)).context_id
    for worker in engine.core.workers:
        worker.build_indexes()
    return context_id


def test_answers_and_errors_are_of_plain_types() -> None:
    engine = Engine()
    keep(engine, 60)
    answers = [
        run(COMMANDS, engine.core, "contexts", {}),
        run(COMMANDS, engine.core, "declare_context", {"token_ids": tokens(60)}),
        run(COMMANDS, engine.core, "declare_context", {"token_ids": tokens(9)}),
        run(COMMANDS, engine.core, "delete_context", {"context_id": "a"}),
    ]
    assert json.loads(json.dumps(answers)) == answers
    assert answers[1] == {"result": {"id": context_id_of(tokens(60)), "is_known": True}}
    with pytest.raises(CommandError, match="a prompt of 9 tokens") as caught:
        result_of(answers[2])
    assert caught.value.status == 400
    assert answers[3]["error"]["status"] == 404


def test_a_scheduler_without_contexts() -> None:
    core = Engine().core
    core.scheduler.relay_long_contexts = None
    for name, arguments in [
        ("contexts", {}),
        ("declare_context", {"token_ids": tokens(60)}),
        ("delete_context", {"context_id": "a"}),
    ]:
        assert run(COMMANDS, core, name, arguments)["error"]["status"] == 501


def test_a_context_that_could_not_be_written_is_tried_again() -> None:
    engine = Engine(context_dir="contexts")
    keep_context(engine, tokens(60))
    [worker] = engine.core.workers
    worker.fail_to_write()
    assert listed(engine.core)[0]["problem"] == "OSError: no space"
    assert keep_context(engine, tokens(60)).problem is None
    worker.build_indexes()
    assert [each["state"] for each in listed(engine.core)] == ["stored"]


def test_a_context_whose_file_was_removed_is_computed_again() -> None:
    engine = Engine(context_dir="contexts")
    keep(engine, 60)
    [worker] = engine.core.workers
    worker.contexts.clear()
    keep_context(engine, tokens(60))
    assert len(worker.contexts) == len(listed(engine.core)) == 1


def test_contexts_of_the_folder_are_found_before_the_first_request() -> None:
    earlier = Engine(context_dir="contexts")
    context_id = keep(earlier, 60)
    engine = Engine(context_dir="contexts")
    engine.core.workers[0].contexts |= earlier.core.workers[0].contexts
    assert engine.ask([*tokens(55), 900]) == 0
    commands.load_contexts(engine.core)
    engine.core.blocks.manager.reset_prefix_cache()
    assert engine.ask([*tokens(55), 900]) == 55
    assert ids(engine.core) == [context_id]


def test_tokens_are_sent_once() -> None:
    """Of 131,072 tokens they are a megabyte for each context and rank."""
    earlier = Engine(context_dir="contexts")
    found = [keep(earlier, 60), keep(earlier, 70)]
    assert ids(earlier.core) == found and earlier.core.sent_tokens == []
    engine = Engine(context_dir="contexts")
    engine.core.workers[0].contexts |= earlier.core.workers[0].contexts
    for _ in range(3):
        assert ids(engine.core) == found
    assert sorted(engine.core.sent_tokens) == sorted(found)


def test_the_folder_is_read_once_and_after_a_reset() -> None:
    engine = Engine()
    context_id = keep(engine, 60)
    [worker] = engine.core.workers
    commands.load_contexts(engine.core)
    assert worker.num_opened == 1
    worker.contexts.clear()
    commands.load_contexts(engine.core)
    assert context_id in engine.core.long_contexts.contexts.catalog
    commands.load_contexts(engine.core, again=True)
    assert worker.num_opened == 2
    assert context_id not in engine.core.long_contexts.contexts.catalog


def test_a_context_that_a_rank_has_not_is_left_out() -> None:
    earlier = Engine(num_ranks=3, context_dir="contexts")
    whole, partial = keep(earlier, 60), keep(earlier, 70)
    for missing in range(3):
        engine = Engine(num_ranks=3, context_dir="contexts")
        for number, (worker, found) in enumerate(
            zip(engine.core.workers, earlier.core.workers, strict=True)
        ):
            worker.contexts |= found.contexts
            if number == missing:
                del worker.contexts[partial]
        assert ids(engine.core) == [whole]
        assert engine.ask([*tokens(69), 900]) == 60
        assert keep(engine, 70) == partial  # computed and kept again, in all ranks
        assert ids(engine.core) == [whole, partial]
        assert all(partial in worker.contexts for worker in engine.core.workers)


def test_ranks_that_share_nothing_have_no_context() -> None:
    engine = Engine(num_ranks=2)
    first, second = keep(engine, 60), keep(engine, 70)
    for worker, missing in zip(engine.core.workers, (first, second), strict=True):
        del worker.contexts[missing]
    assert ids(engine.core) == []


def test_memory_of_all_ranks_is_reserved() -> None:
    engine = Engine(num_ranks=2)
    memory = engine.core.long_contexts.memory
    keep(engine, 60)
    [context] = listed(engine.core)
    assert context["memory_bytes"] == GRANULE_BYTES
    assert memory.context_bytes == 2 * GRANULE_BYTES
    run(COMMANDS, engine.core, "delete_context", {"context_id": context["context_id"]})
    assert memory.context_bytes == 0
    assert [worker.contexts for worker in engine.core.workers] == [{}, {}]


def test_a_running_engine_is_not_stepped() -> None:
    """The workers are told with its next step; until then the scheduler answers for them."""
    engine = Engine()
    engine.core.is_busy = True
    context = keep_context(engine, tokens(60))
    assert (context.state, context.memory_bytes) == ("indexing", GRANULE_BYTES)
    assert engine.core.workers[0].contexts == {}
    assert ids(engine.core) == [context.context_id]
    engine.core.step_fn()
    assert ids(engine.core) == [context.context_id]
    assert list(engine.core.workers[0].contexts) == [context.context_id]


def test_a_context_that_is_deleted_before_the_workers_know_of_it_stays_deleted() -> None:
    engine = Engine()
    engine.core.is_busy = True
    context_id = keep_context(engine, tokens(60)).context_id
    assert run(COMMANDS, engine.core, "delete_context", {"context_id": context_id}) == {
        "result": None
    }
    assert ids(engine.core) == []
    engine.core.step_fn()
    assert ids(engine.core) == [] and engine.core.workers[0].contexts == {}


@pytest.mark.parametrize(
    ("status", "is_kept"),
    [
        (RequestStatus.FINISHED_STOPPED, True),
        (RequestStatus.FINISHED_LENGTH_CAPPED, True),
        (RequestStatus.FINISHED_ABORTED, False),
        (RequestStatus.FINISHED_ERROR, False),
    ],
)
def test_only_requests_that_came_to_their_end_are_kept(
    status: RequestStatus, is_kept: bool
) -> None:
    engine = Engine()
    engine.status = status
    if is_kept:
        keep_context(engine, tokens(60))
    else:
        with pytest.raises(CommandError, match="try again"):
            keep_context(engine, tokens(60))
    assert len(ids(engine.core)) == is_kept
