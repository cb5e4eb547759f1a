# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sparse import stored_contexts
from tests.sparse.faults import KINDS, damaged
from tests.sparse.stored_contexts import FINGERPRINT, TOKENS, ArraysIndex, head, heads
from vllm_relay.sparse.contexts.context_store import HeadStates
from vllm_relay.sparse.contexts.disk.context_file import (
    ContextFile,
    ForeignContextError,
    index_type,
    token_chain,
    write_context,
)
from vllm_relay.sparse.files.buffer_pool import BufferPool
from vllm_relay.sparse.files.section_file import SectionWriter, write_sections
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.index.key_index import IndexDamagedError

PLACES = [(layer, kv_head) for layer in range(2) for kv_head in range(3)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return stored_contexts.write(tmp_path / "a.relayctx")


def assert_same(found: Elements, expected: Elements) -> None:
    assert found.dtype == expected.dtype
    assert np.array_equal(found.data, expected.data)


def states_of(context: ContextFile, layer: int, kv_head: int) -> list[Elements]:
    """Keys and values."""
    rows = context.rows(layer, kv_head, "keys"), context.rows(layer, kv_head, "values")
    return [Elements(each.whole(), context.fingerprint.dtype) for each in rows]


@pytest.mark.parametrize("mode", [{}, {"mmap": False}, {"pool": BufferPool(1 << 20)}])
def test_round_trip(path: Path, mode: dict[str, Any]) -> None:
    with ContextFile.open(path, expected=FINGERPRINT, verify="now", **mode) as context:
        context.verify()
        assert context.fingerprint == FINGERPRINT
        assert context.num_tokens == len(TOKENS)
        assert context.index_kinds == {"arrays of tests": 3}
        tokens = context.tokens
        assert tokens.dtype == np.int32
        assert np.array_equal(context.token_hashes, token_chain(TOKENS, FINGERPRINT))
        found = [states_of(context, *place) for place in PLACES]
        indexes = {place: context.index(*place) for place in PLACES if place[0]}
        rows = [(context.rows(*place, "keys"), context.rows(*place, "values")) for place in PLACES]
    assert np.array_equal(tokens, TOKENS)
    ids = [999, 4, 4]
    for place, (keys, values), (key_rows, value_rows) in zip(PLACES, found, rows, strict=True):
        expected = head(*place)
        assert_same(keys, expected.keys)
        assert_same(values, expected.values)
        assert np.array_equal(key_rows.take(ids), expected.keys.data[ids])
        assert np.array_equal(value_rows.take(ids), expected.values.data[ids])
    assert sorted(indexes) == PLACES[3:]
    for place, index in indexes.items():
        assert isinstance(index, ArraysIndex)
        assert_same(index.keys, head(*place).keys)
        assert np.array_equal(index.links, head(*place).index.links)


def test_keys_of_an_index_are_stored_once(path: Path) -> None:
    with ContextFile.open(path) as context:
        names = [name for name in context.file.names if name.startswith("layers/1/kv_heads/2/")]
        assert names == [
            "layers/1/kv_heads/2/keys",
            "layers/1/kv_heads/2/values",
            "layers/1/kv_heads/2/value_means",
            "layers/1/kv_heads/2/index/links",
        ]
        assert context.file.sections[names[0]].page_class == "keys"
        assert context.file.sections[names[1]].page_class == "values"
        index = context.index(1, 2)
        assert np.shares_memory(index.keys.data, context.rows(1, 2, "keys").whole())


def test_indexes_of_other_keys_keep_their_own(tmp_path: Path) -> None:
    def with_fewer_keys(given: HeadStates) -> HeadStates:
        keys = given.keys.rows(4, 900)
        return replace(given, index=ArraysIndex(keys, np.zeros((896, 5), np.int32)))

    write_context(tmp_path / "a", FINGERPRINT, TOKENS, map(with_fewer_keys, heads()))
    with ContextFile.open(tmp_path / "a") as context:
        assert_same(context.index(1, 1).keys, head(1, 1).keys.rows(4, 900))


def test_one_head_is_kept_in_memory_at_a_time(tmp_path: Path) -> None:
    """Each head is on the disk before the next one is asked for."""

    def watched() -> Any:
        written = 0
        for given in heads():
            (unfinished,) = tmp_path.glob(".relay-*")
            assert unfinished.stat().st_size > written
            written = unfinished.stat().st_size
            yield given

    write_context(tmp_path / "a", FINGERPRINT, TOKENS, watched())


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"model_hash": "9"},
        {"num_layers": 4},
        {"num_kv_heads": 1},
        {"head_size": 16},
        {"dtype": "float16"},
        {"rope": {"theta": 10000.0, "scaling": {"factor": 4}}},
    ],
)
def test_contexts_of_other_models_are_refused(path: Path, changes: dict[str, Any]) -> None:
    (name, value), *_ = changes.items()
    with pytest.raises(ForeignContextError) as caught:
        ContextFile.open(path, expected=replace(FINGERPRINT, **changes))
    found = f"{name} is {getattr(FINGERPRINT, name)!r}, expected {value!r}"
    assert str(path) in str(caught.value)
    if name != "rope":
        assert found in str(caught.value)
    else:
        assert "rope is" in str(caught.value) and "'factor': 4" in str(caught.value)


def wrong_key_dtype(given: HeadStates) -> HeadStates:
    return replace(given, keys=Elements(given.keys.to_float32(), "float32"))


def wrong_head_size(given: HeadStates) -> HeadStates:
    return replace(given, keys=Elements(given.keys.data[:, :7], "bfloat16"))


def wrong_length(given: HeadStates) -> HeadStates:
    return replace(given, values=given.values.rows(0, 999))


def not_a_number(given: HeadStates) -> HeadStates:
    data = given.values.data.copy()
    data[3, 1] = 0x7FC0
    return replace(given, values=Elements(data, "bfloat16"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (wrong_key_dtype, "kv_heads/2/keys: float32, expected bfloat16"),
        (wrong_head_size, r"kv_heads/2/keys: \[1000, 7\], expected a head size of 8"),
        (wrong_length, r"kv_heads/2/values: \[999, 4\], expected \[1000, size\]"),
        (not_a_number, r"kv_heads/2/values: NaN or infinity at \[3, 1\]"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[HeadStates], HeadStates], reason: str
) -> None:
    given = [*heads()][:-1] + [change(head(1, 2))]
    with pytest.raises(ValueError, match=reason):
        write_context(tmp_path / "a", FINGERPRINT, TOKENS, given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [0, 5, 7])
def test_heads_that_are_missing_or_too_many_are_refused(tmp_path: Path, number: int) -> None:
    given = [*heads(), head(1, 2)][:number]
    with pytest.raises(ValueError, match=f"{number} heads .* expected 6"):
        write_context(tmp_path / "a", FINGERPRINT, TOKENS, given)
    assert not list(tmp_path.iterdir())


def test_accessors_refuse_what_is_not_there(path: Path) -> None:
    context = ContextFile.open(path)
    for place in ((2, 0), (0, 3), (-1, 0)):
        with pytest.raises(ValueError, match="the model has 2 layers of 3 kv heads"):
            context.rows(*place, "keys")
    with pytest.raises(KeyError, match="layers/0/kv_heads/1 has no index"):
        context.index(0, 1)


def changed_context(path: Path, change: Callable[[dict, dict], None]) -> None:
    """The context with another header or other sections, and checksums that fit."""
    with ContextFile.open(path) as context:
        header = context.file.header
        arrays = {name: context.file[name] for name in context.file.names}
    change(header, arrays)
    write_sections(path, header, arrays)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda header, arrays: header.update(content="key index"), "holds 'key index'"),
        (lambda header, arrays: header["fingerprint"].update(context_format=1), "format 1"),
        (lambda header, arrays: header["fingerprint"].update(extra=2), "fingerprint: fields"),
        (lambda header, arrays: header["fingerprint"].pop("rope"), "fingerprint: fields"),
        (lambda header, arrays: header["fingerprint"].update(num_layers=-1), "num_layers is -1"),
        (lambda header, arrays: header["fingerprint"].update(num_layers=2**30), "expected more"),
        (lambda header, arrays: header["fingerprint"].update(head_size=9), "section .*keys"),
        (lambda header, arrays: header.update(fingerprint=3), "format None"),
        (lambda header, arrays: header.update(num_tokens=True), "num_tokens is True"),
        (lambda header, arrays: header.update(num_tokens=999), "section 'tokens'"),
        (lambda header, arrays: arrays.pop("tokens"), "section 'tokens': found None"),
        (lambda header, arrays: arrays.pop("layers/1/kv_heads/0/values"), "found None"),
        (lambda header, arrays: arrays.update(token_hashes=np.zeros(3)), "'token_hashes'"),
        (lambda header, arrays: header.pop("indexes"), "indexes of heads"),
        (lambda header, arrays: header["indexes"].update(x={}), "indexes of heads"),
        (
            lambda header, arrays: header["indexes"]["layers/1/kv_heads/0"].update(kind=3),
            "its index is not described",
        ),
        (
            lambda header, arrays: arrays.pop("layers/1/kv_heads/0/index/links"),
            "its index is not described",
        ),
    ],
)
def test_files_that_are_no_whole_context_are_refused(
    path: Path, change: Callable[[dict, dict], None], reason: str
) -> None:
    changed_context(path, change)
    with pytest.raises(IndexDamagedError, match=f"{path}: .*{reason}"):
        ContextFile.open(path)


def test_indexes_of_unknown_kinds_are_refused(path: Path) -> None:
    def change(header: dict, arrays: dict) -> None:
        header["indexes"]["layers/1/kv_heads/0"]["kind"] = "of tomorrow"

    changed_context(path, change)
    with pytest.raises(ValueError, match="'of tomorrow', expected one of .*arrays of tests"):
        ContextFile.open(path).index(1, 0)


def test_verify_computes_the_hashes_again(path: Path) -> None:
    def change(header: dict, arrays: dict) -> None:
        arrays["tokens"] = arrays["tokens"][::-1].copy()

    changed_context(path, change)
    with pytest.raises(IndexDamagedError, match="token_hashes"):
        ContextFile.open(path).verify()


def test_short_contexts_have_no_hashes(tmp_path: Path) -> None:
    fingerprint = replace(FINGERPRINT, num_layers=1, num_kv_heads=1)
    write_context(tmp_path / "a", fingerprint, [3, 1, 4], [head(0, 0, 3)])
    with ContextFile.open(tmp_path / "a", verify="now") as context:
        assert context.token_hashes.shape == (0, 16)
        assert context.tokens.tolist() == [3, 1, 4]


def test_foreign_section_files_are_refused(tmp_path: Path) -> None:
    with SectionWriter(tmp_path / "a", {}) as writer:
        writer.add("tokens", np.arange(3))
    with pytest.raises(IndexDamagedError, match="holds None, expected a context"):
        ContextFile.open(tmp_path / "a")


def test_damaged_contexts_give_the_arrays_or_an_error(path: Path) -> None:
    content = path.read_bytes()
    with ContextFile.open(path) as context:
        sections = [context.file.sections[f"layers/{i}/kv_heads/0/keys"] for i in range(2)]
        ranges = [(each.offset_bytes, each.offset_bytes + each.num_bytes) for each in sections]
    refused = 0
    for number in range(90):
        rng = np.random.default_rng(number)
        path.write_bytes(damaged(content, bytes(len(content)), ranges, KINDS[number % 9], rng))
        try:
            with ContextFile.open(path, expected=FINGERPRINT) as context:
                assert np.array_equal(context.tokens, TOKENS)
                for place in PLACES:
                    keys, values = states_of(context, *place)
                    assert_same(keys, head(*place).keys)
                    assert_same(values, head(*place).values)
                    if place[0]:
                        index = context.index(*place)
                        assert np.array_equal(index.links, head(*place).index.links)
        except IndexDamagedError:
            refused += 1
    assert refused > 45


def test_what_several_kinds_of_indexes_have_in_common_is_no_kind() -> None:
    for kind in ("", "none"):
        with pytest.raises(ValueError, match="expected one of"):
            index_type(kind)
