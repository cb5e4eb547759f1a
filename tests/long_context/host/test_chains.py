# SPDX-License-Identifier: Apache-2.0
"""Contexts that continue others: what they share is stored once, and answers are those of the same
context stored alone."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.long_context.host.test_sequence_context import (
    HEAD_SIZE,
    KV_HEADS,
    LAYERS,
    NUM_TOKENS,
    computed,
)
from tests.long_context.host.test_worker_contexts import (
    FINGERPRINT,
    kept,
    open_contexts,
    wait,
)
from vllm_relay.long_context.host import worker_contexts
from vllm_relay.long_context.host.host_attention import HostPart, Retrieval, attend_retrieved
from vllm_relay.long_context.host.host_sequence import HostLayer, SequencePlace
from vllm_relay.long_context.host.index_builders import start_builders
from vllm_relay.long_context.host.worker_contexts import WorkerContexts, own_begin
from vllm_relay.long_context.orders import DELETED
from vllm_relay.long_context.window import Residency
from vllm_relay.sparse.contexts.context_store import HeadStates, StoredContext
from vllm_relay.sparse.contexts.contexts_command import run_delete, run_list, run_verify
from vllm_relay.sparse.contexts.disk.context_file import (
    CONTEXT_SUFFIX,
    LINK_SUFFIX,
    ContextFile,
    ParentFile,
    _check_layout,
    write_context,
)
from vllm_relay.sparse.contexts.disk.disk_context_store import DiskContextStore
from vllm_relay.sparse.contexts.partial_attention import attention_state
from vllm_relay.sparse.contexts.retrieval import SessionStats, parts_of, retrieve
from vllm_relay.sparse.files.damage import IndexDamagedError
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.query_types import Dipr
from vllm_relay.sparse.plan.options import DBOptions

TURNS = [(0, 203), (203, 300), (290, 411), (411, NUM_TOKENS)]
"""What each reuses, and where it ends; the third takes less of the second than it has."""


@pytest.fixture(autouse=True)
def short_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_contexts, "MIN_LINK_TOKENS", 20)


@pytest.fixture(params=["memory", "folder"])
def contexts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WorkerContexts]:
    opened = open_contexts(tmp_path if request.param == "folder" else None)
    yield opened
    opened.close()


def keep_turn(contexts: WorkerContexts, reused: str | None, begin: int, end: int) -> str:
    context = kept(end)
    parent = None if reused is None else contexts.get(reused)
    assert contexts.keep(context, computed(begin, end, torch.float32), parent)
    return context.context_id


def keep_chat(contexts: WorkerContexts) -> list[str]:
    ids: list[str] = []
    for begin, end in TURNS:
        ids.append(keep_turn(contexts, ids[-1] if ids else None, begin, end))
    return ids


def get(contexts: WorkerContexts, context_id: str) -> StoredContext:
    found = contexts.get(context_id)
    assert found is not None
    return found


def assert_whole(found: StoredContext, num_tokens: int = NUM_TOKENS) -> None:
    wanted = computed(0, num_tokens, torch.float32)
    for number, name in enumerate(LAYERS):
        for head in range(KV_HEADS):
            keys, values = found.rows(number, head, 0, num_tokens)
            np.testing.assert_array_equal(keys.data, wanted.layers[name].keys[head, :num_tokens])
            np.testing.assert_array_equal(
                values.data, wanted.layers[name].values[head, :num_tokens]
            )


def attention(context: StoredContext, alpha: float, *, estimate: bool = False) -> torch.Tensor:
    """Of one token behind all tokens of a context, in the second layer."""
    place = SequencePlace(NUM_TOKENS, 10, 32, 0, NUM_TOKENS)
    own = HostLayer(place, KV_HEADS, HEAD_SIZE, torch.float32)
    generator = torch.Generator().manual_seed(5)
    own.write(NUM_TOKENS, *torch.randn(2, 1, KV_HEADS, HEAD_SIZE, generator=generator))
    part = HostPart(own, context, 1, Residency(0, NUM_TOKENS), NUM_TOKENS + 1)
    query = 2 * torch.randn(1, 3 * KV_HEADS, HEAD_SIZE, generator=generator)
    output, lse = torch.zeros_like(query), torch.full(query.shape[:2], -torch.inf)
    scale = HEAD_SIZE**-0.5
    asked = Dipr(alpha=alpha, scale=scale, estimate=estimate)
    retrieval = Retrieval(asked, DBOptions(query=Dipr(alpha=alpha, estimate=estimate)), scale)
    attend_retrieved([part], [0], query, output, lse, retrieval, SessionStats())
    return torch.cat([output, lse[..., None]], -1)


def test_each_turn_stores_what_it_adds(contexts: WorkerContexts) -> None:
    ids = keep_chat(contexts)
    fresh = [get(contexts, each) for each in ids]
    wait(contexts)
    stored = [get(contexts, each) for each in ids]
    for chain in (fresh, stored):
        assert [each.own_begin for each in chain] == [0, 203, 290, 411]
        assert [each.parent_id for each in chain] == [None, *ids[:-1]]
        for each, (_, end) in zip(chain, TURNS, strict=True):
            assert_whole(each, end)
    for begin, link in zip((0, 203, 290, 411), stored[-1].links(NUM_TOKENS), strict=True):
        assert link.begin == begin and link.context is stored[(0, 203, 290, 411).index(begin)]
    reports = {report.context_id: report for report, _ in contexts.reports()}
    assert [reports[each].parent_id for each in ids] == [None, *ids[:-1]]


@pytest.mark.parametrize("state", ["fresh", "stored"])
def test_a_chain_answers_as_the_same_context_stored_alone(
    tmp_path: Path, state: str, slow: threading.Event
) -> None:
    options = DBOptions(threads=1, index="flat")
    contexts, alone = (
        WorkerContexts(tmp_path / name, FINGERPRINT, LAYERS, options, start_builders(1))
        for name in ("chain", "alone")
    )
    chain = get(contexts, keep_chat(contexts)[-1])
    whole = get(alone, keep_turn(alone, None, 0, NUM_TOKENS))
    if state == "stored":  # else no thread may build an index between two answers
        slow.set()
        wait(contexts)
        wait(alone)
        chain, whole = get(contexts, chain.id), get(alone, chain.id)
    assert len(chain.links(NUM_TOKENS)) == len(TURNS)
    exact = attention(whole, 1e-37)
    torch.testing.assert_close(attention(chain, 1e-37), exact, atol=1e-5, rtol=0)
    for alpha, estimate in [(0.01, False), (0.1, True)]:
        tolerance = 2 * (attention(whole, alpha, estimate=estimate) - exact).abs().max().item()
        found = attention(chain, alpha, estimate=estimate)
        torch.testing.assert_close(found, exact, atol=max(tolerance, 1e-5), rtol=0)
    slow.set()
    contexts.close()
    alone.close()


@pytest.mark.parametrize("limit", [None, 1 << 20], ids=["mapped", "pool"])
def test_a_session_reads_a_chain(tmp_path: Path, limit: int | None) -> None:
    """Of a part in the middle of it, all that is asked for."""
    contexts = open_contexts(tmp_path)
    ids = keep_chat(contexts)
    wait(contexts)
    contexts.close()
    store = DiskContextStore(tmp_path, FINGERPRINT, limit)
    [chain] = [each for each in store.contexts() if each.id == ids[-1]]
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(KV_HEADS, 3, HEAD_SIZE, generator=generator)
    top = torch.full(query.shape[:2], -torch.inf)
    options, stats = DBOptions(query=Dipr(alpha=1e-37)), SessionStats()
    for begin, end in [(40, NUM_TOKENS), (210, 280), (300, 300)]:
        parts = parts_of(chain, 1, begin, end)
        output, lse = retrieve(parts, query, top, scale=0.2, options=options, stats=stats)
        layer = computed(0, NUM_TOKENS, torch.float32).layers["second"]
        expected = attention_state(query, *layer.rows(begin, end), 0.2)
        torch.testing.assert_close(output, expected[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(lse, expected[1], atol=1e-5, rtol=0)


def test_a_folder_of_chains_is_found_again(tmp_path: Path) -> None:
    first = open_contexts(tmp_path)
    ids = keep_chat(first)
    wait(first)
    first.close()
    again = open_contexts(tmp_path)
    found = get(again, ids[-1])
    assert [each.context.id for each in found.links(NUM_TOKENS)] == ids
    assert_whole(found)


@pytest.mark.parametrize("restarts", [False, True])
def test_what_a_deleted_context_shares_stays_as_long_as_others_need_it(
    tmp_path: Path, restarts: bool
) -> None:
    contexts = open_contexts(tmp_path)
    ids = keep_chat(contexts)
    wait(contexts)
    for each in (ids[1], ids[0]):
        assert contexts.delete(each) is None
    if restarts:
        contexts.close()
        contexts = open_contexts(tmp_path)
    states = {report.context_id: report.state for report, _ in contexts.reports()}
    assert states == dict.fromkeys(ids[:2], DELETED) | dict.fromkeys(ids[2:], "stored")
    assert {each.stem for each in tmp_path.glob(f"*{LINK_SUFFIX}")} == set(ids[:2])
    assert_whole(get(contexts, ids[-1]))
    contexts.delete(ids[3])
    assert_whole(get(contexts, ids[2]), 411)
    contexts.delete(ids[2])
    assert list(tmp_path.iterdir()) == []


def test_a_deleted_context_that_others_continue_can_be_kept_again(contexts: WorkerContexts) -> None:
    ids = keep_chat(contexts)
    wait(contexts)
    contexts.delete(ids[1])
    assert contexts.get(ids[1]) is None
    keep_turn(contexts, ids[3], 290, 300)  # behind one that continues the deleted one
    wait(contexts)
    for each, (_, end) in zip(ids, TURNS, strict=True):
        assert_whole(get(contexts, each), end)


def test_a_link_that_nothing_continues_is_deleted_when_the_folder_is_opened(tmp_path: Path) -> None:
    """As a process leaves it that is killed before."""
    contexts = open_contexts(tmp_path)
    ids = keep_chat(contexts)
    wait(contexts)
    contexts.close()
    for each in (0, 1):
        path = tmp_path / f"{ids[each]}{CONTEXT_SUFFIX}"
        path.rename(path.with_suffix(LINK_SUFFIX))
    for each in (2, 3):
        (tmp_path / f"{ids[each]}{CONTEXT_SUFFIX}").unlink()
    open_contexts(tmp_path).close()
    assert not [*tmp_path.glob(f"*{LINK_SUFFIX}"), *tmp_path.glob(f"*{CONTEXT_SUFFIX}")]


def test_what_is_deleted_before_a_turn_is_stored_is_stored_with_it(
    contexts: WorkerContexts,
    slow: threading.Event,
    tmp_path: Path,
) -> None:
    ids = [keep_turn(contexts, None, 0, 203)]
    ids.append(keep_turn(contexts, ids[0], 203, 300))
    contexts.delete(ids[0])
    slow.set()
    wait(contexts)
    assert_whole(get(contexts, ids[1]), 300)
    assert contexts.get(ids[0]) is None
    assert len(list(tmp_path.glob(f"*{CONTEXT_SUFFIX}"))) <= 1
    assert not list(tmp_path.glob(f"*{LINK_SUFFIX}"))


def damaged_link(folder: Path) -> tuple[list[str], Path]:
    """A chat, closed, with one bit of the second link's values changed; its ids, and the file."""
    contexts = open_contexts(folder)
    ids = keep_chat(contexts)
    wait(contexts)
    contexts.close()
    path = folder / f"{ids[1]}{CONTEXT_SUFFIX}"
    with ContextFile.open(path) as file:
        section = file.file.sections["layers/1/kv_heads/0/values"]
    content = bytearray(path.read_bytes())
    content[section.offset_bytes + 3] ^= 1
    path.write_bytes(content)
    return ids, path


def test_damage_of_a_deleted_link_leaves_what_it_continues_alone(tmp_path: Path) -> None:
    """Its file has another name since, than the one that a page's error tells."""
    ids, _ = damaged_link(tmp_path)
    contexts = open_contexts(tmp_path)
    chain = get(contexts, ids[3])
    assert contexts.delete(ids[1]) is None
    with pytest.raises(IndexDamagedError):
        attention(chain, 1e-37)
    assert [report.context_id for report, _ in contexts.reports()] == [ids[0]]


def test_a_context_that_was_deleted_and_kept_again_has_its_queries(tmp_path: Path) -> None:
    contexts = open_contexts(tmp_path)
    ids = keep_chat(contexts)
    wait(contexts)
    queries = {each.name for each in tmp_path.iterdir()} - {f"{i}{CONTEXT_SUFFIX}" for i in ids}
    contexts.delete(ids[0])
    keep_turn(contexts, None, 0, TURNS[0][1])
    wait(contexts)
    files = {each.name for each in tmp_path.iterdir()}
    assert files == queries | {f"{i}{CONTEXT_SUFFIX}" for i in ids}


def test_damage_of_a_link_is_told_with_its_file_and_ends_what_continues_it(tmp_path: Path) -> None:
    ids, path = damaged_link(tmp_path)
    contexts = open_contexts(tmp_path)
    chain = get(contexts, ids[3])
    with pytest.raises(IndexDamagedError, match=str(path)):
        attention(chain, 1e-37)
    assert [report.context_id for report, _ in contexts.reports()] == [ids[0]]
    assert not contexts.keep(kept(450), computed(430, 450, torch.float32), chain)
    again = open_contexts(tmp_path)
    path.unlink()
    assert [report.context_id for report, _ in open_contexts(tmp_path).reports()] == [ids[0]]
    again.close()


def test_many_turns_make_few_links_and_store_little_twice() -> None:
    turn_tokens = 300
    ends: list[int] = []
    num_stored_tokens = 0
    for turn in range(1, 400):
        end = turn * turn_tokens
        begin = own_begin(ends, end)
        assert begin in (0, *ends)
        ends = [*(each for each in ends if each <= begin), end]
        num_stored_tokens += end - begin
        assert len(ends) <= worker_contexts.MAX_LINKS
        if turn <= worker_contexts.MAX_LINKS:
            assert num_stored_tokens == end
    assert num_stored_tokens < 4 * ends[-1]


def test_short_links_are_taken_over() -> None:
    assert own_begin([100, 119, 130], 200) == 100
    assert own_begin([100], 200) == 100
    assert own_begin([], 200) == 0


def run(command: Callable[..., int], path: Path, **options: Any) -> tuple[int, Any]:
    """Exit status and reports."""
    output = io.StringIO()
    status = command(path, as_json=True, console=Console(file=output, soft_wrap=True), **options)
    return status, json.loads(output.getvalue())


def test_the_command_shows_verifies_and_deletes_links(tmp_path: Path) -> None:
    contexts = open_contexts(tmp_path)
    ids = keep_chat(contexts)
    wait(contexts)
    contexts.close()
    paths = [tmp_path / f"{each}{CONTEXT_SUFFIX}" for each in ids]
    status, reports = run(run_list, tmp_path)
    parents = {Path(each["path"]).stem: each["parent"] for each in reports}
    assert status == 0 and parents == {
        ids[0]: None,
        ids[1]: {"context_id": ids[0], "num_tokens": 203},
        ids[2]: {"context_id": ids[1], "num_tokens": 290},
        ids[3]: {"context_id": ids[2], "num_tokens": 411},
    }
    shown = io.StringIO()
    assert run_list(tmp_path, console=Console(file=shown, soft_wrap=True)) == 0
    assert f"203 tokens of {ids[0]}" in shown.getvalue()

    def delete(path: Path) -> None:
        assert run(run_delete, path, confirm=lambda question: True)[0] == 0

    delete(paths[1])
    link = paths[1].with_suffix(LINK_SUFFIX)
    assert link.exists() and not paths[1].exists()
    assert run(run_verify, tmp_path)[0] == 0
    content = link.read_bytes()
    link.write_bytes(content[:-5000] + b"!" + content[-4999:])
    status, reports = run(run_verify, tmp_path)
    wrong = {Path(each["path"]).stem: each["error"] for each in reports if each["error"]}
    assert status == 1 and wrong.keys() == {ids[2], ids[3]}
    assert all(str(link) in each for each in wrong.values())
    link.unlink()
    status, reports = run(run_verify, tmp_path)
    assert status == 1 and all(ids[1] in each["error"] for each in reports if each["error"])
    link.write_bytes(content)
    delete(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "parent",
    [
        "none",
        {"context_id": "../" * 10 + "ab", "num_tokens": 5},
        {"context_id": "a" * 32, "num_tokens": 0},
        {"context_id": "a" * 32, "num_tokens": 300},
        {"context_id": "a" * 32, "num_tokens": True},
        {"context_id": "a" * 32},
    ],
    ids=str,
)
def test_a_header_that_names_no_parent_is_refused(tmp_path: Path, parent: Any) -> None:
    contexts = open_contexts(tmp_path)
    keep_chat(contexts)
    wait(contexts)
    [path] = [
        each for each in tmp_path.glob(f"*{CONTEXT_SUFFIX}") if each.stem == kept(300).context_id
    ]
    with ContextFile.open(path) as file:
        file.file.header["parent"] = parent
        with pytest.raises(IndexDamagedError, match="parent is"):
            _check_layout(file.file, file.fingerprint)


def test_a_cycle_of_files_is_refused(tmp_path: Path) -> None:
    """Each says that it continues the other."""
    first, second = kept(60), kept(80)
    rows = Elements(np.zeros((40, HEAD_SIZE), np.float32), "float32")
    heads = [HeadStates(rows, rows, FlatIndex().build(rows))] * (len(LAYERS) * KV_HEADS)
    for ours, other, begin in ((first, second, 20), (second, first, 40)):
        path = tmp_path / f"{ours.context_id}{CONTEXT_SUFFIX}"
        parent = ParentFile(other.context_id, begin)
        write_context(path, FINGERPRINT, ours.tokens, heads, parent=parent)
    contexts = open_contexts(tmp_path)
    assert contexts.reports() == []
    status, reports = run(run_verify, tmp_path)
    assert status == 1 and all("its own tokens are" in each["error"] for each in reports)
