# SPDX-License-Identifier: Apache-2.0
"""Contexts in a folder: found again, shared, and left out where they are damaged or foreign."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.sparse.brute_force_index import BruteForceIndex
from tests.sparse.stored_contexts import drop_indexes
from tests.sparse.tiny_models import (
    VOCAB_SIZE,
    generate,
    logits,
    random_tokens,
    small_db,
    stored,
    tiny_model,
)
from vllm_relay.sparse import DB, Dipr, IndexDamagedError
from vllm_relay.sparse.contexts.disk import disk_context
from vllm_relay.sparse.contexts.disk.context_file import CONTEXT_SUFFIX, QUERIES_SUFFIX
from vllm_relay.sparse.files.buffer_pool import BufferPoolFullError
from vllm_relay.sparse.files.section_file import write_sections

CONTEXT = random_tokens(60)
PROMPT = torch.cat([CONTEXT[:, :50], random_tokens(4, seed=1)], 1)


def _db(path: Path, model: Any = None, **options: Any) -> DB:
    return DB(path, small_db(**options).options, model=model or tiny_model("llama"))


def _file(path: Path) -> Path:
    (file,) = path.glob(f"*{CONTEXT_SUFFIX}")
    return file


@pytest.mark.parametrize("memory_limit_bytes", [None, 1 << 20])
def test_a_context_is_found_again(tmp_path: Path, memory_limit_bytes: int | None) -> None:
    model = tiny_model("llama")
    with _db(tmp_path / "contexts") as db:
        context_id = stored(db, model, CONTEXT)
    with _db(tmp_path / "contexts", memory_limit_bytes=memory_limit_bytes) as db:
        assert [(c.id, c.num_tokens) for c in db.contexts()] == [(context_id, 60)]
        session, remaining = db.create_session(PROMPT)
        assert session.prefix_len == 50
        output = generate(model, PROMPT, past_key_values=session)
        assert output.tolist() == generate(tiny_model("llama", "sdpa"), PROMPT).tolist()
        assert session.stats.searches > 0


@pytest.mark.parametrize("memory_limit_bytes", [None, 1 << 20])
@pytest.mark.parametrize("index", ["auto", "flat", "blocks", "coarse", "graph"])
def test_indexes_of_every_kind_come_back_as_they_were(
    tmp_path: Path, index: str, memory_limit_bytes: int | None
) -> None:
    model = tiny_model("llama")
    options: dict[str, Any] = {"index": index, "index_factory": None, "query": Dipr(alpha=0.1)}
    in_memory = small_db(**options)
    long_context = random_tokens(300)
    prompt = torch.cat([long_context[:, :250], random_tokens(4, seed=1)], 1)
    outputs = []
    for db in (in_memory, _db(tmp_path, **options)):
        stored(db, model, long_context)
        if db is not in_memory:
            db = _db(tmp_path, **options, memory_limit_bytes=memory_limit_bytes)
        session, remaining = db.create_session(prompt)
        logits(model, remaining, session)
        steps = [logits(model, torch.tensor([[token]]), session) for token in (1, 2, 3)]
        outputs.append(torch.cat(steps))
        assert 0 < session.stats.retrieved_tokens < session.stats.searched_tokens
    assert torch.equal(*outputs)


def test_a_context_that_is_too_large_for_the_limit_is_left_out_by_itself(tmp_path: Path) -> None:
    model = tiny_model("llama")
    db = _db(tmp_path, index="flat", index_factory=None)
    stored(db, model, random_tokens(900, seed=3))
    small_id = stored(db, model, CONTEXT)
    limit = 900 * 4 - 1  # less than the token ids alone, more than all of one head of the other
    with _db(tmp_path, index="flat", index_factory=None, memory_limit_bytes=8192) as db:
        assert [context.id for context in db.contexts()] == [small_id]
        session, remaining = db.create_session(PROMPT)
        logits(model, remaining, session)
        logits(model, torch.tensor([[1]]), session)
        assert session.stats.searches > 0
        (reason,) = db.skipped.values()
        least = int(re.search(r"memory_limit_bytes is 8192, expected at least (\d+)", reason)[1])
        files = sorted(tmp_path.iterdir())
        with pytest.raises(ValueError, match="memory_limit_bytes is 8192, expected at least"):
            stored(db, model, random_tokens(800, seed=4))
        assert sorted(tmp_path.iterdir()) == files
    db = _db(tmp_path, index="flat", index_factory=None, memory_limit_bytes=least)
    assert len(db.contexts()) == 2
    session, remaining = db.create_session(random_tokens(900, seed=3))
    assert logits(model, remaining, session).shape == (1, VOCAB_SIZE)
    db = _db(tmp_path, index="flat", index_factory=None, memory_limit_bytes=limit)
    assert len(db.contexts()) + len(db.skipped) == 2


def test_a_read_that_finds_no_room_names_the_limit(tmp_path: Path) -> None:
    stored(_db(tmp_path), tiny_model("llama"), CONTEXT)
    db = _db(tmp_path, memory_limit_bytes=1 << 20)
    (context,) = db._store.contexts()
    held = db._store._pool.lease("other", 0, (1 << 20) - 100, "keys", lambda buffer: None)
    with pytest.raises(BufferPoolFullError, match="memory_limit_bytes"):
        context.rows(0, 0, 0, 60)
    assert db.skipped == {} and len(_db(tmp_path).contexts()) == 1
    del held
    context.rows(0, 0, 0, 60)


def _answer(folder: Path) -> tuple[int, list[list[int]]]:
    """How much of the prompt is found, and what follows it."""
    session, _ = _db(folder).create_session(PROMPT)
    found = session.prefix_len
    return found, generate(tiny_model("llama"), PROMPT, past_key_values=session).tolist()


def test_another_process_finds_it(tmp_path: Path) -> None:
    stored(_db(tmp_path), tiny_model("llama"), CONTEXT)
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as processes:
        found = processes.submit(_answer, tmp_path).result()
    assert found == (50, generate(tiny_model("llama", "sdpa"), PROMPT).tolist())


def test_a_context_that_another_process_stored_or_deleted_is_noticed(tmp_path: Path) -> None:
    mine, theirs = _db(tmp_path), _db(tmp_path)
    context_id = stored(theirs, tiny_model("llama"), CONTEXT)
    assert mine.create_session(PROMPT)[0].prefix_len == 50
    theirs.delete(context_id)
    assert mine.create_session(PROMPT)[0].prefix_len == 0
    assert mine.contexts() == []


def test_lookups_read_neither_keys_nor_values(tmp_path: Path) -> None:
    stored(_db(tmp_path), tiny_model("llama"), CONTEXT)
    db = _db(tmp_path, memory_limit_bytes=1 << 20)
    session, _ = db.create_session(PROMPT)
    pool = db._store._pool
    before = pool.stats.read_bytes
    assert before < 2 * PROMPT.numel() * 8
    logits(tiny_model("llama"), PROMPT[:, 50:], session)
    # 2 layers of 2 kv heads with keys and values
    assert pool.stats.read_bytes - before >= 2 * 2 * 2 * 50 * 16 * 4


def test_a_deleted_context_serves_its_sessions_to_the_end(tmp_path: Path) -> None:
    model = tiny_model("llama")
    db = _db(tmp_path)
    context_id = stored(db, model, CONTEXT)
    session, _ = db.create_session(PROMPT)
    db.delete(context_id)
    assert list(tmp_path.iterdir()) == []
    output = generate(model, PROMPT, past_key_values=session)
    assert output.tolist() == generate(tiny_model("llama", "sdpa"), PROMPT).tolist()
    session.close()
    gc.collect()
    assert db.used_bytes == 0


def _other_model(change: str) -> Any:
    if change == "another family":
        return tiny_model("qwen3")
    if change == "other weights":
        torch.manual_seed(1)
        config = tiny_model("llama").config
        return type(tiny_model("llama"))(config).eval()
    config = type(tiny_model("llama").config).from_dict(tiny_model("llama").config.to_dict())
    if change == "another rope":
        config.rope_parameters = {"rope_type": "default", "rope_theta": 123.0}
    torch.manual_seed(0)
    model = type(tiny_model("llama"))(config).eval()
    return model.bfloat16() if change == "another dtype" else model


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("another family", "model is 'llama', expected 'qwen3'"),
        ("other weights", "model_hash"),
        ("another rope", "rope is"),
        ("another dtype", "dtype is 'float32', expected 'bfloat16'"),
    ],
)
def test_a_context_of_another_model_is_left_out(
    tmp_path: Path, change: str, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    stored(_db(tmp_path), tiny_model("llama"), CONTEXT)
    db = _db(tmp_path, _other_model(change))
    assert db.create_session(PROMPT)[0].prefix_len == 0
    assert field in db.skipped[str(_file(tmp_path))]
    assert field in caplog.text


def _damage(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "place", ["header", "truncated", "empty", "other content", "folder", "link to itself"]
)
def test_a_file_that_cannot_be_opened_is_left_out(tmp_path: Path, place: str) -> None:
    stored(_db(tmp_path), tiny_model("llama"), CONTEXT)
    file = _file(tmp_path)
    if place == "header":
        _damage(file, 3)
    elif place == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif place == "empty":
        file.write_bytes(b"")
    elif place == "other content":
        file.write_bytes(file.with_suffix(QUERIES_SUFFIX).read_bytes())
    else:
        file.unlink()
        file.mkdir() if place == "folder" else file.symlink_to(file)
    db = _db(tmp_path)
    assert db.create_session(PROMPT)[0].prefix_len == 0
    assert list(db.skipped) == [str(file)]


def test_copies_of_a_file_are_deleted_with_it(tmp_path: Path) -> None:
    db = _db(tmp_path)
    stored(db, tiny_model("llama"), CONTEXT)
    file = _file(tmp_path)
    copy = file.with_stem("copy")
    copy.write_bytes(file.read_bytes())
    assert len(db.contexts()) == 2
    db.delete(db.contexts()[0].id)
    assert db.contexts() == [] and not file.exists() and not copy.exists()


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    db = _db(tmp_path / "folder")
    shutil.rmtree(tmp_path / "folder")
    stored(db, tiny_model("llama"), CONTEXT)
    assert len(_db(tmp_path / "folder").contexts()) == 1


@pytest.mark.parametrize("is_open", [False, True])
def test_a_damaged_file_that_was_replaced_or_deleted_is_forgotten(
    tmp_path: Path, is_open: bool
) -> None:
    model = tiny_model("llama")
    stored(_db(tmp_path), model, CONTEXT)
    file = _file(tmp_path)
    content = file.read_bytes()
    if is_open:
        keys = _db(tmp_path)._store.contexts()[0].rows(0, 0, 0, 60)[0].data
        _damage(file, content.index(np.ascontiguousarray(keys).tobytes()))
    else:
        _damage(file, 3)
    db = _db(tmp_path)
    if is_open:
        with pytest.raises(IndexDamagedError):
            db._store.contexts()[0].rows(0, 0, 0, 60)
    assert db.contexts() == [] and list(db.skipped) == [str(file)]
    assert db.contexts() == [] and list(db.skipped) == [str(file)]
    whole = tmp_path / "whole"
    whole.write_bytes(content)
    whole.replace(file)
    assert db.create_session(PROMPT)[0].prefix_len == 50
    assert db.skipped == {}
    _damage(file, 3)
    other = _db(tmp_path)
    assert list(other.skipped) == [str(file)]
    file.unlink()
    assert other.skipped == {}


def test_a_file_replaced_before_its_damage_showed_is_not_left_out(tmp_path: Path) -> None:
    stored(_db(tmp_path), tiny_model("llama"), CONTEXT)
    file = _file(tmp_path)
    content = file.read_bytes()
    keys = _db(tmp_path)._store.contexts()[0].rows(0, 0, 0, 60)[0].data
    _damage(file, content.index(np.ascontiguousarray(keys).tobytes()))
    db = _db(tmp_path)
    (context,) = db._store.contexts()
    (tmp_path / "whole").write_bytes(content)
    (tmp_path / "whole").replace(file)
    with pytest.raises(IndexDamagedError):
        context.rows(0, 0, 0, 60)
    assert db.skipped == {}
    assert db.create_session(PROMPT)[0].prefix_len == 50


def test_a_context_whose_index_is_unknown_or_missing_is_left_out(tmp_path: Path) -> None:
    class Unheard(BruteForceIndex):
        kind = "unheard"

    stored(_db(tmp_path, index_factory=lambda layer: Unheard()), tiny_model("llama"), CONTEXT)
    file = _file(tmp_path)
    Unheard.kind = "brute force"
    db = _db(tmp_path)
    assert db.create_session(PROMPT)[0].prefix_len == 0
    assert "an index of kind 'unheard'" in db.skipped[str(file)]
    file.unlink()
    stored(_db(tmp_path), tiny_model("llama"), CONTEXT)
    drop_indexes(file, ["layers/1/kv_heads/0"])
    db = _db(tmp_path)
    assert db.create_session(PROMPT)[0].prefix_len == 0
    assert "without an index" in db.skipped[str(file)]


@pytest.mark.parametrize("memory_limit_bytes", [None, 1 << 20])
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("num_remaining", [1, 4])
def test_damage_that_is_found_later_is_never_attended(
    tmp_path: Path, memory_limit_bytes: int | None, part: str, num_remaining: int
) -> None:
    model = tiny_model("llama")
    db = _db(tmp_path)
    stored(db, model, CONTEXT)
    keys, values = db._store.contexts()[0].rows(1, 0, 0, 60)
    damaged = (keys if part == "keys" else values).data
    file = _file(tmp_path)
    offset = file.read_bytes().index(np.ascontiguousarray(damaged).tobytes())
    _damage(file, offset + 30 * 16 * 4)
    db = _db(tmp_path, memory_limit_bytes=memory_limit_bytes)
    prompt = PROMPT[:, : 50 + num_remaining]
    session, remaining = db.create_session(prompt)
    assert session.prefix_len == 50
    with pytest.raises(IndexDamagedError, match=f"layers/1/kv_heads/0/{part}"):
        logits(model, remaining, session)
    # recomputed from now on, and stored again
    assert "layers/1" in db.skipped[str(file)]
    session, remaining = db.create_session(prompt)
    assert session.prefix_len == 0
    output = logits(model, remaining, session)
    torch.testing.assert_close(output, logits(tiny_model("llama", "sdpa"), prompt))
    stored(db, model, CONTEXT)
    assert db.skipped == {}
    assert db.create_session(prompt)[0].prefix_len == 50


@pytest.mark.parametrize("memory_limit_bytes", [None, 1 << 20])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_rows_are_verified_where_they_are_read(
    tmp_path: Path, memory_limit_bytes: int | None, part: str
) -> None:
    torch.manual_seed(0)
    states = [tuple(torch.randn(2, 1, 2, 1000, 16)) for _ in range(2)]
    _db(tmp_path).import_(range(1000), states)
    damaged = states[1][("keys", "values").index(part)][0, 1].numpy()
    file = _file(tmp_path)
    _damage(file, file.read_bytes().index(damaged.tobytes()) + 500 * 16 * 4)
    context = _db(tmp_path, memory_limit_bytes=memory_limit_bytes)._store.contexts()[0]
    ids = [np.array([3, 999], np.int32), np.array([3], np.int32)]
    *found, places = context.gather(1, 1, ids)
    for elements, whole in zip(found, states[1], strict=True):
        for chosen, place in zip(ids, places, strict=True):
            assert np.array_equal(elements.data[place], whole[0, 1].numpy()[chosen])
    context.rows(1, 1, 0, 100)
    for read in (
        lambda: context.gather(1, 1, [ids[0], np.array([500], np.int32)]),
        lambda: context.rows(1, 1, 0, 600),
    ):
        with pytest.raises(IndexDamagedError, match=f"layers/1/kv_heads/1/{part}"):
            read()


def test_training_queries_are_kept_beside_a_context(tmp_path: Path) -> None:
    model = tiny_model("llama")
    in_memory = small_db(train_queries_per_key=0.5)
    for db in (in_memory, _db(tmp_path, train_queries_per_key=0.5)):
        stored(db, model, CONTEXT)
        if db is not in_memory:
            db = _db(tmp_path, train_queries_per_key=0.5)
        stored(db, model, PROMPT)
        queries = db._store.contexts()[-1].train_queries(1, 1)
        assert queries is not None and queries.shape == (27, 16)
        if db is in_memory:
            wanted = queries.data
    assert np.array_equal(queries.data, wanted)


def _left_without_context(path: Path) -> list[Path]:
    return [
        each
        for each in path.glob(f"*{QUERIES_SUFFIX}")
        if not each.with_suffix(CONTEXT_SUFFIX).exists()
    ]


def test_training_queries_are_never_there_without_their_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no moment at which the process may be killed: nobody would ever remove them."""
    moments = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            moments.append(_left_without_context(tmp_path))
            original(*args, **kwargs)
            moments.append(_left_without_context(tmp_path))

        monkeypatch.setattr(owner, name, watched)

    watch(os, "replace")
    watch(Path, "unlink")
    with _db(tmp_path, train_queries_per_key=0.5) as db:
        context_id = stored(db, tiny_model("llama"), CONTEXT)
        assert list(tmp_path.glob(f"*{QUERIES_SUFFIX}"))
        db.delete(context_id)
    assert len(moments) == 2 * (2 + 2) and not any(moments)
    assert not list(tmp_path.iterdir())


def test_a_context_without_room_for_its_training_queries_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path, *_: Any) -> None:
        raise OSError(f"{path}: no space left")

    monkeypatch.setattr(disk_context, "write_sections", fail)
    with _db(tmp_path, train_queries_per_key=0.5) as db:
        context_id = stored(db, tiny_model("llama"), CONTEXT)
        assert [context.id for context in db.contexts()] == [context_id]
    assert "training queries left out" in caplog.text and "no space left" in caplog.text


def test_lost_training_queries_do_no_harm(tmp_path: Path) -> None:
    model = tiny_model("llama")
    stored(_db(tmp_path), model, CONTEXT)
    for queries in tmp_path.glob(f"*{QUERIES_SUFFIX}"):
        queries.write_bytes(b"damaged")
    db = _db(tmp_path)
    stored(db, model, PROMPT)
    assert len(db.contexts()) == 2


@pytest.mark.parametrize(
    "queries",
    [np.zeros((5, 16), np.uint16), np.zeros((5, 8), np.float32), np.zeros(16, np.float32)],
    ids=["another dtype", "another size", "no rows"],
)
def test_training_queries_that_do_not_fit_the_keys_are_left_out(
    tmp_path: Path, queries: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    stored(_db(tmp_path), model, CONTEXT)
    arrays = {
        f"layers/{layer}/kv_heads/{head}/queries": queries
        for layer in range(2)
        for head in range(2)
    }
    write_sections(_file(tmp_path).with_suffix(QUERIES_SUFFIX), {}, arrays)
    db = _db(tmp_path)
    assert db._store.contexts()[0].train_queries(1, 1) is None
    assert "training queries left out" in caplog.text and "expected float32 [m, 16]" in caplog.text
    stored(db, model, PROMPT)
    assert len(db.contexts()) == 2


def test_a_folder_needs_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give model="):
        DB(tmp_path)


def test_an_empty_path_is_not_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="empty path"):
        DB("", model=tiny_model("llama"))
    DB(".", model=tiny_model("llama"))


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        _db(tmp_path / "file")
