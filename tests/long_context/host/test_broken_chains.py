# SPDX-License-Identifier: Apache-2.0
"""Chains of which a link is damaged or deleted: what is told of them, and who still reads them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.long_context.host.test_chains import (
    attention,
    damaged_link,
    get,
    keep_chat,
    keep_turn,
)
from tests.long_context.host.test_sequence_context import LAYERS, computed
from tests.long_context.host.test_worker_contexts import (
    FINGERPRINT,
    kept,
    open_contexts,
    wait,
)
from vllm_relay.long_context.host import worker_contexts
from vllm_relay.long_context.host.index_builders import start_builders
from vllm_relay.long_context.host.worker import LongContextWorker, LongRequest
from vllm_relay.long_context.host.worker_contexts import WorkerContexts
from vllm_relay.sparse.contexts.disk.context_file import CONTEXT_SUFFIX
from vllm_relay.sparse.files.damage import IndexDamagedError
from vllm_relay.sparse.plan.options import DBOptions


@pytest.fixture(autouse=True)
def short_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_contexts, "MIN_LINK_TOKENS", 20)


def test_files_of_deleted_links_count_after_a_restart(tmp_path: Path) -> None:
    contexts = open_contexts(tmp_path)
    ids = keep_chat(contexts)
    wait(contexts)
    for each in ids[:2]:
        assert contexts.delete(each) is None
    for opened in (contexts, open_contexts(tmp_path)):
        reports = {report.context_id: report for report, _ in opened.reports()}
        assert [reports[each].state for each in ids] == ["deleted"] * 2 + ["stored"] * 2
        assert [reports[each].parent_id for each in ids] == [None, *ids[:-1]]
        num_bytes = sum(report.file_bytes for report in reports.values())
        assert num_bytes == sum(each.stat().st_size for each in tmp_path.iterdir())
        assert opened.get(ids[0]) is None
        opened.close()


def test_damage_of_what_a_context_in_memory_continues_is_remembered(
    tmp_path: Path, slow: threading.Event
) -> None:
    """The context that is read is not in a file yet: what it continues is."""
    slow.set()
    ids, path = damaged_link(tmp_path)
    slow.clear()
    contexts = open_contexts(tmp_path)
    parent = get(contexts, ids[3])
    fresh = get(contexts, keep_turn(contexts, ids[3], 460, 480))
    with pytest.raises(IndexDamagedError, match=str(path)):
        attention(fresh, 1e-37)
    assert parent.damage is not None and fresh.damage is not None
    assert get(contexts, ids[0]).damage is None
    slow.set()
    wait(contexts)
    contexts.close()


def test_a_context_that_cannot_be_read_leaves_the_worker_at_once(
    tmp_path: Path, slow: threading.Event
) -> None:
    """Not only when a thread comes to build its indexes."""
    slow.set()
    ids, _ = damaged_link(tmp_path)
    slow.clear()
    contexts = open_contexts(tmp_path)
    parent = get(contexts, ids[3])
    context_id = keep_turn(contexts, ids[3], 460, 480)
    fresh = get(contexts, context_id)
    with pytest.raises(IndexDamagedError):
        attention(fresh, 1e-37)
    worker = LongContextWorker(contexts=contexts)
    request = LongRequest("request", 490, 1, context=fresh)
    worker.lose(request, context_id, "is damaged")
    assert contexts.get(context_id) is None
    reports = {report.context_id: report for report, _ in contexts.reports()}
    assert reports.keys() == {ids[0], context_id}
    refused = reports[context_id]
    assert refused.problem is not None and "is damaged" in refused.problem
    assert (refused.memory_bytes, refused.file_bytes) == (0, 0)
    del parent, fresh, request
    slow.set()
    wait(contexts)
    assert not (tmp_path / f"{context_id}{CONTEXT_SUFFIX}").exists()
    contexts.close()


def test_a_context_is_seen_in_every_moment_of_its_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread ends after it has stored it: between the two it must not seem deleted."""
    options = DBOptions(threads=1, index="flat")
    contexts = WorkerContexts(tmp_path, FINGERPRINT, LAYERS, options, start_builders(1))
    seen: list[Any] = []
    build = contexts._build

    def watched(*args: Any) -> None:
        build(*args)
        seen.append((contexts.get(context.context_id), contexts.reports()))

    monkeypatch.setattr(contexts, "_build", watched)
    context = kept(203)
    assert contexts.keep(context, computed(0, 203, torch.float32), None)
    wait(contexts)
    [(found, [(report, _)])] = seen
    assert found is not None and report.state == "stored"
    contexts.close()
