# SPDX-License-Identifier: Apache-2.0
"""The contexts of a worker: indexed by a thread, stored, found again, deleted."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.long_context.host.test_sequence_context import (
    HEAD_SIZE,
    KV_HEADS,
    LAYERS,
    NUM_STORED_TOKENS,
    NUM_TOKENS,
    TOKENS,
    computed,
)
from tests.support.waiting import WAIT_S, wait_for
from vllm_relay.config import RelayConfig
from vllm_relay.long_context.host.host_sequence import HostSequence
from vllm_relay.long_context.host.index_builders import start_builders
from vllm_relay.long_context.host.worker_contexts import WorkerContexts, db_options
from vllm_relay.long_context.orders import ContextReport, KeptContext
from vllm_relay.sparse.contexts.context_fingerprint import ContextFingerprint
from vllm_relay.sparse.contexts.context_store import context_id_of
from vllm_relay.sparse.contexts.disk.context_file import CONTEXT_SUFFIX, QUERIES_SUFFIX, ContextFile
from vllm_relay.sparse.index.query_types import Dipr
from vllm_relay.sparse.plan.options import DBOptions

FINGERPRINT = ContextFingerprint(
    model="tiny",
    model_hash="0",
    num_layers=len(LAYERS),
    num_kv_heads=KV_HEADS,
    head_size=HEAD_SIZE,
    dtype="float32",
    rope={},
)


def open_contexts(path: Path | None) -> WorkerContexts:
    return WorkerContexts(path, FINGERPRINT, LAYERS, DBOptions(threads=1), start_builders(1))


@pytest.fixture(params=["memory", "folder"])
def contexts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WorkerContexts]:
    opened = open_contexts(tmp_path if request.param == "folder" else None)
    yield opened
    opened.close()


def kept(num_tokens: int) -> KeptContext:
    return KeptContext(context_id_of(TOKENS[:num_tokens]), TOKENS[:num_tokens].tolist())


def keep(contexts: WorkerContexts, num_tokens: int = NUM_STORED_TOKENS) -> str:
    context = kept(num_tokens)
    assert contexts.keep(context, computed(0, num_tokens, torch.float32), None)
    return context.context_id


def wait(contexts: WorkerContexts) -> list[ContextReport]:
    """Until the indexes are built; the reports that came with it."""
    wait_for(lambda: not contexts.num_queued)
    return contexts.take_changes()


def damage_keys(folder: Path) -> None:
    """One bit of the keys of the last head."""
    [path] = folder.glob(f"*{CONTEXT_SUFFIX}")
    with ContextFile.open(path) as file:
        section = file.file.sections[f"layers/{len(LAYERS) - 1}/kv_heads/{KV_HEADS - 1}/keys"]
    content = bytearray(path.read_bytes())
    content[section.offset_bytes] ^= 1
    path.write_bytes(content)


def test_a_context_is_there_at_once_and_stored_later(
    contexts: WorkerContexts, slow: threading.Event, tmp_path: Path
) -> None:
    context_id = keep(contexts)
    fresh = contexts.get(context_id)
    assert fresh is not None
    [(report, tokens)] = contexts.reports()
    assert (report.context_id, report.num_tokens) == (context_id, NUM_STORED_TOKENS)
    assert (report.state, report.file_bytes) == ("indexing", 0) and report.memory_bytes > 0
    np.testing.assert_array_equal(tokens, TOKENS[:NUM_STORED_TOKENS])
    assert contexts.take_changes() == []
    slow.set()
    [changed] = wait(contexts)
    assert contexts.take_changes() == []
    stored = contexts.get(context_id)
    assert stored is not None and stored is not fresh
    for layer in range(len(LAYERS)):
        for head in range(KV_HEADS):
            ours, theirs = (
                each.rows(layer, head, 0, NUM_STORED_TOKENS) for each in (stored, fresh)
            )
            np.testing.assert_array_equal(ours[0].data, theirs[0].data)
            np.testing.assert_array_equal(ours[1].data, theirs[1].data)
    files = list(tmp_path.iterdir())
    if files:
        assert (changed.state, changed.memory_bytes) == ("stored", 0)
        assert sorted(each.suffix for each in files) == [CONTEXT_SUFFIX, QUERIES_SUFFIX]
        assert changed.file_bytes == sum(each.stat().st_size for each in files)
    else:
        assert (changed.state, changed.file_bytes) == ("memory", 0)


def test_a_folder_is_found_again(tmp_path: Path) -> None:
    first = open_contexts(tmp_path)
    context_id = keep(first)
    wait(first)
    first.close()
    second = open_contexts(tmp_path)
    [(report, _)] = second.reports()
    assert (report.context_id, report.state) == (context_id, "stored")
    assert second.get(context_id) is not None
    assert second.get("another") is None


def test_without_training_queries_a_context_has_one_file(tmp_path: Path) -> None:
    first = open_contexts(tmp_path)
    keep(first)
    wait(first)
    [queries] = tmp_path.glob(f"*{QUERIES_SUFFIX}")
    queries.unlink()
    [(report, _)] = first.reports()
    [file] = tmp_path.iterdir()
    assert report.file_bytes == file.stat().st_size


def test_a_context_that_is_deleted_while_it_is_indexed_leaves_nothing(
    contexts: WorkerContexts, slow: threading.Event, tmp_path: Path
) -> None:
    context_id = keep(contexts)
    contexts.delete(context_id)
    assert contexts.get(context_id) is None and contexts.reports() == []
    slow.set()
    wait(contexts)
    assert contexts.get(context_id) is None and contexts.reports() == []
    assert list(tmp_path.iterdir()) == []


def test_a_deleted_context_stays_whole_for_who_reads_it(
    contexts: WorkerContexts, tmp_path: Path
) -> None:
    context_id = keep(contexts)
    wait(contexts)
    held = contexts.get(context_id)
    assert held is not None
    contexts.delete(context_id)
    contexts.delete(context_id)
    assert contexts.get(context_id) is None and list(tmp_path.iterdir()) == []
    keys, _ = held.rows(1, 1, 0, NUM_STORED_TOKENS)
    wanted = computed(0, NUM_STORED_TOKENS, torch.float32).layers["second"].keys[1]
    np.testing.assert_array_equal(keys.data, wanted[:NUM_STORED_TOKENS])


def test_a_context_can_be_kept_again_after_it_was_deleted(contexts: WorkerContexts) -> None:
    context_id = keep(contexts)
    wait(contexts)
    contexts.delete(context_id)
    keep(contexts)
    wait(contexts)
    assert [report.context_id for report, _ in contexts.reports()] == [context_id]


def test_what_cannot_be_stored_stays_in_memory_with_the_reason(
    contexts: WorkerContexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(contexts._store, "add", fail)
    context_id = keep(contexts)
    [changed] = wait(contexts)
    assert (changed.state, changed.problem) == ("memory", "OSError: no space left on device")
    assert changed.memory_bytes > 0 and contexts.get(context_id) is not None
    contexts.delete(context_id)
    assert contexts.reports() == []


def test_a_request_that_reused_a_context_becomes_a_longer_one(contexts: WorkerContexts) -> None:
    reused = contexts.get(keep(contexts))
    wait(contexts)
    own = computed(150, NUM_TOKENS, torch.float32)
    assert contexts.keep(kept(NUM_TOKENS), own, reused)
    wait(contexts)
    found = contexts.get(kept(NUM_TOKENS).context_id)
    assert found is not None and found.num_tokens == NUM_TOKENS
    wanted = computed(0, NUM_TOKENS, torch.float32).layers["second"]
    keys, values = found.rows(1, 0, 0, NUM_TOKENS)
    np.testing.assert_array_equal(keys.data, wanted.keys[0])
    np.testing.assert_array_equal(values.data, wanted.values[0])
    train = found.train_queries(1, 0)
    assert train is not None and abs(train.shape[0] - 0.4 * NUM_TOKENS) < 2


def test_what_reused_a_damaged_context_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_contexts(tmp_path)
    keep(first)
    wait(first)
    first.close()
    damage_keys(tmp_path)
    contexts = open_contexts(tmp_path)
    [(report, _)] = contexts.reports()
    own = computed(150, NUM_TOKENS, torch.float32)
    damaged = contexts.get(report.context_id)
    # found when its rows are taken over, in the background
    assert contexts.keep(kept(NUM_TOKENS), own, damaged)
    [changed] = wait(contexts)
    assert changed.problem is not None
    assert "is not kept: layer 1, kv head 1: " in changed.problem and "CRC-32C" in changed.problem
    assert "is not kept" in caplog.text and "CRC-32C" in caplog.text
    # nor is the damaged one used any more
    assert [each.context_id for each, _ in contexts.reports()] == [kept(NUM_TOKENS).context_id]
    assert contexts.get(kept(NUM_TOKENS).context_id) is None
    # and what is known to be damaged is continued by nobody
    assert not contexts.keep(kept(NUM_TOKENS - 1), own, damaged)
    assert contexts.num_queued == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"index": "flat", "given_query": Dipr(alpha=2e-4, estimate=True)}),
        ({"alpha": 0.5}, {"index": "flat", "given_query": Dipr(alpha=0.5, estimate=True)}),
        (
            {"alpha": 0.5, "estimate_unread": False},
            {"index": "auto", "given_query": Dipr(alpha=0.5)},
        ),
        ({"max_error": 0.1}, {"index": "auto", "given_query": None, "max_error": 0.1}),
        ({"alpha": 0}, {"index": "flat", "given_query": None}),
        (
            {"max_dropped_mass": 0.1},
            {"index": "flat", "given_query": Dipr(alpha=2e-4), "max_dropped_mass": 0.1},
        ),
        (
            {"max_dropped_mass": 0.1, "max_error": 0.2},
            {"index": "auto", "given_query": None, "max_dropped_mass": 0.1, "max_error": 0.2},
        ),
    ],
    ids=lambda each: "-".join(each),
)
def test_what_is_asked_of_stored_contexts(given: dict[str, Any], expected: dict[str, Any]) -> None:
    options = db_options(RelayConfig(**given))
    assert {name: getattr(options, name) for name in expected} == expected


def broken(kind: str, number: float) -> HostSequence:
    sequence = computed(0, NUM_STORED_TOKENS, torch.float32)
    getattr(sequence.layers["second"], kind)[1, 150, 3] = number
    return sequence


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_states_that_are_no_numbers_are_not_kept(
    contexts: WorkerContexts, kind: str, number: float, tmp_path: Path
) -> None:
    given = kept(NUM_STORED_TOKENS)
    assert contexts.keep(given, broken(kind, number), None)
    [changed] = wait(contexts)
    if (kind, number) == ("values", 3e38):
        assert changed.problem is None
        return
    assert changed.problem is not None and "is not kept: layer 1, kv head 1: " in changed.problem
    assert (changed.context_id, changed.memory_bytes, changed.file_bytes) == (
        given.context_id,
        0,
        0,
    )
    assert contexts.get(given.context_id) is None and list(tmp_path.iterdir()) == []
    keep(contexts)  # another request of the same tokens
    [changed] = wait(contexts)
    assert changed.problem is None and contexts.get(given.context_id) is not None
    contexts.keep(given, broken(kind, number), None)
    contexts.delete(given.context_id)
    wait(contexts)
    assert contexts.reports() == []


@pytest.mark.parametrize("error", [PermissionError(1, "no"), OSError(30, "read-only")])
def test_a_file_that_cannot_be_deleted_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    contexts = open_contexts(tmp_path)
    context_id = keep(contexts)
    wait(contexts)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        problem = contexts.delete(context_id)
        assert problem == f"cannot be deleted: {error}"
        [(report, _)] = contexts.reports()
        assert (report.context_id, report.state, report.problem) == (context_id, "stored", problem)
        assert contexts.get(context_id) is not None
    assert contexts.delete(context_id) is None
    assert contexts.reports() == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
def test_a_full_disk_leaves_the_context_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    contexts = open_contexts(tmp_path)

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        context_id = keep(contexts)
        [changed] = wait(contexts)
    assert changed.state == "memory" and "No space left" in str(changed.problem)
    assert contexts.get(context_id) is not None and list(tmp_path.iterdir()) == []


def test_a_thread_that_cannot_delete_goes_on(
    contexts: WorkerContexts, slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError("busy")

    monkeypatch.setattr(contexts._store, "delete", fail)
    context_id = keep(contexts)
    [future] = [each.future for each in contexts._building]
    assert future is not None
    assert contexts.delete(context_id) == "cannot be deleted: busy"
    slow.set()
    wait(contexts)
    assert future.exception(WAIT_S) is None
