# SPDX-License-Identifier: Apache-2.0
"""`context_disk_gib`: contexts that were used least recently leave the folder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.long_context.context_engine import Engine, tokens
from vllm_relay.long_context.client import keep_context, list_contexts
from vllm_relay.long_context.orders import DELETED, ContextReport

BUDGET_BYTES = 1000


def engine_of(num_ranks: int = 1) -> Engine:
    return Engine(
        context_dir="contexts",
        context_disk_gib=(BUDGET_BYTES + 0.5) / (1 << 30),
        num_ranks=num_ranks,
    )


class Contexts:
    """Kept in an engine under names; files have the size they are given."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._prompts: dict[str, list[int]] = {}
        self._ids: dict[str, str] = {}

    def keep(self, name: str, file_bytes: int | None = None) -> None:
        """The workers build its index, if its file has a size; the scheduler is not told yet."""
        first = 1000 * len(self._prompts)
        self._prompts.setdefault(name, tokens(60, first))
        self._ids[name] = keep_context(self.engine, self._prompts[name]).context_id
        if file_bytes is not None:
            self.build_indexes(file_bytes)

    def build_indexes(self, file_bytes: int) -> None:
        """Of those that wait for it."""
        for worker in self.engine.core.workers:
            worker.build_indexes(file_bytes)

    def use(self, name: str) -> int:
        """Returns how many tokens were there already."""
        self.engine.core.blocks.manager.reset_prefix_cache()
        return self.engine.ask([*self._prompts[name], 5, 6])

    def listed(self) -> str:
        return self._names(each.context_id for each in list_contexts(self.engine))

    def stored(self, rank: int = 0) -> str:
        return self._names(self.engine.core.workers[rank].contexts)

    def _names(self, ids: Any) -> str:
        names = {context_id: name for name, context_id in self._ids.items()}
        return "".join(sorted(names[each] for each in ids))


@pytest.fixture(params=["listed", "step"])
def tell(request: pytest.FixtureRequest) -> Any:
    """How the scheduler learns of files: by a command, or with the output of a step."""

    def tell_by_step(contexts: Contexts) -> None:
        core = contexts.engine.core
        reports = [report for report, _ in core.workers[0].contexts.values()]
        core.long_contexts.contexts.update(reports)
        core.step_fn()

    return Contexts.listed if request.param == "listed" else tell_by_step


def test_what_fits_stays(tell: Any) -> None:
    contexts = Contexts(engine_of())
    for name in "abc":
        contexts.keep(name, BUDGET_BYTES // 4)
    contexts.keep("d", BUDGET_BYTES // 4)
    tell(contexts)
    assert contexts.stored() == contexts.listed() == "abcd"


def test_without_a_limit_all_stay(tell: Any) -> None:
    contexts = Contexts(Engine(context_dir="contexts"))
    for name in "abc":
        contexts.keep(name, 1 << 40)
    tell(contexts)
    assert contexts.stored() == contexts.listed() == "abc"


def test_the_one_used_least_recently_leaves(tell: Any) -> None:
    contexts = Contexts(engine_of())
    for name in "abc":
        contexts.keep(name, 300)
    assert contexts.use("a") == 60
    contexts.keep("d", 300)
    tell(contexts)
    assert contexts.stored() == contexts.listed() == "acd"
    assert contexts.use("b") == 0
    assert contexts.use("c") == 60
    contexts.keep("e", 300)
    tell(contexts)
    assert contexts.stored() == contexts.listed() == "cde"


def test_several_leave_for_a_large_one(tell: Any) -> None:
    contexts = Contexts(engine_of())
    for name in "abcd":
        contexts.keep(name, 250)
    contexts.use("b")
    contexts.keep("e", 600)
    tell(contexts)
    assert contexts.stored() == contexts.listed() == "be"


def test_one_that_is_larger_than_the_folder_leaves_alone(tell: Any) -> None:
    contexts = Contexts(engine_of())
    for name in "ab":
        contexts.keep(name, 400)
    contexts.keep("c", BUDGET_BYTES + 1)
    tell(contexts)
    assert contexts.stored() == contexts.listed() == "ab"
    assert contexts.use("c") == 0 and contexts.use("a") == 60


def test_one_whose_index_is_not_built_has_no_file_that_could_leave(tell: Any) -> None:
    contexts = Contexts(engine_of())
    contexts.keep("a", 600)
    contexts.keep("b", 300)
    contexts.use("a")
    contexts.keep("c")
    contexts.use("b")
    tell(contexts)
    assert contexts.stored() == contexts.listed() == "abc"
    contexts.build_indexes(300)
    tell(contexts)
    assert contexts.stored() == contexts.listed() == "bc"


def test_asking_again_evicts_no_more() -> None:
    contexts = Contexts(engine_of())
    for name in "abcd":
        contexts.keep(name, 300)
    for _ in range(3):
        assert contexts.listed() == "bcd"
    assert contexts.stored() == "bcd"


def test_what_a_step_evicted_does_not_come_back_before_the_workers_know() -> None:
    contexts = Contexts(engine_of())
    for name in "abcd":
        contexts.keep(name, 300)
    core = contexts.engine.core
    core.long_contexts.contexts.update([report for report, _ in core.workers[0].contexts.values()])
    assert contexts.stored() == "abcd"
    assert contexts.listed() == contexts.stored() == "bcd"
    core.step_fn()
    assert contexts.listed() == contexts.stored() == "bcd"


def test_a_full_folder_is_found() -> None:
    earlier = Contexts(Engine(context_dir="contexts"))
    for name in "abcd":
        earlier.keep(name, 300)
    engine = engine_of()
    engine.core.workers[0].contexts |= earlier.engine.core.workers[0].contexts
    earlier.engine = engine
    assert earlier.listed() == "bcd"  # the newest, which workers name last
    assert earlier.stored() == "bcd"


def test_files_of_all_ranks_count(tell: Any) -> None:
    contexts = Contexts(engine_of(num_ranks=2))
    for name in "abc":
        contexts.keep(name, 200)
    tell(contexts)
    assert contexts.listed() == "bc"
    assert contexts.stored(0) == contexts.stored(1) == "bc"


def test_an_evicted_context_can_be_kept_again() -> None:
    contexts = Contexts(engine_of())
    for name in "ab":
        contexts.keep(name, 600)
    assert contexts.listed() == "b"
    contexts.keep("a", 600)
    assert contexts.listed() == contexts.stored() == "a"
    assert len(contexts.engine.prompts) == 3


def test_files_of_links_that_were_deleted_before_the_start_count(tell: Any) -> None:
    contexts = Contexts(engine_of())
    for name in "abc":
        contexts.keep(name, 300)
    [worker] = contexts.engine.core.workers
    first = next(iter(worker.contexts))
    report, tokens = worker.contexts[first]
    worker.contexts[first] = replace(report, parent_id="link"), tokens
    link = ContextReport("link", 30, DELETED, 0, 250)
    worker.contexts["link"] = link, tokens[:30]
    contexts._ids["link"] = "link"
    tell(contexts)
    # with what continues it, it leaves the folder
    assert contexts.listed() == "bc"
    assert "link" not in contexts.engine.core.long_contexts.contexts.catalog
