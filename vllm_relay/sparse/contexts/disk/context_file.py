# SPDX-License-Identifier: Apache-2.0
"""A stored context in a file: the tokens of a prompt, and of every kv head its keys, values and
index."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from vllm_relay.sparse.contexts.context_fingerprint import (
    CHAIN_HASH_BYTES,
    CHAIN_TOKENS,
    CONTEXT_FORMAT,
    ContextFingerprint,
    ForeignContextError,
    token_chain,
)
from vllm_relay.sparse.contexts.context_store import HeadStates
from vllm_relay.sparse.contexts.tokens import as_tokens
from vllm_relay.sparse.files.buffer_pool import BufferPool
from vllm_relay.sparse.files.damage import IndexDamagedError
from vllm_relay.sparse.files.section_file import SectionFile, SectionReader, SectionWriter
from vllm_relay.sparse.index.elements import STORAGE, Elements, check_finite
from vllm_relay.sparse.index.key_index import KeyIndex
from vllm_relay.sparse.index.sparse_layer import MEAN_TOKENS, value_means

CONTENT = "context"
CONTEXT_SUFFIX = ".relayctx"
# a context that was deleted while others continue it
LINK_SUFFIX = ".relaylink"
# training queries lie beside the context: only a longer context that begins with it needs them
QUERIES_SUFFIX = ".relayqueries"


_CONTEXT_ID = re.compile(r"[0-9a-f]{32}")


class ParentFile(NamedTuple):
    """The first `num_tokens` tokens of a context, whose states are in another file."""

    context_id: str
    num_tokens: int


class ContextFile:
    """An open context. For any number of threads; what it hands out stays valid after `close`.

    Attributes:
        path: of the file.
        fingerprint: of the model that computed it.
        num_tokens: of the context.
        parent: whose first tokens it continues; None: all are its own.
        file: the section file below.
    """

    def __init__(self, file: SectionFile, fingerprint: ContextFingerprint) -> None:
        self.file = file
        self.path = file.path
        self.fingerprint = fingerprint
        self.num_tokens: int = file.header["num_tokens"]
        parent = file.header.get("parent")
        self.parent = None if parent is None else ParentFile(**parent)

    @property
    def own_begin(self) -> int:
        """The first token whose states are in this file."""
        return 0 if self.parent is None else self.parent.num_tokens

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        expected: ContextFingerprint | None = None,
        mmap: bool = True,
        verify: Literal["lazy", "now"] = "lazy",
        pool: BufferPool | None = None,
    ) -> ContextFile:
        """
        Args:
            expected: of the model that is to attend it; None takes any.
            mmap, verify, pool: as for `SectionFile.open`.

        Raises:
            ForeignContextError: another fingerprint; names each field that differs.
            IndexDamagedError: not a context, or damaged.
        """
        file = SectionFile.open(path, mmap=mmap, verify=verify, pool=pool)
        if file.header.get("content") != CONTENT:
            raise IndexDamagedError(
                f"{path}: holds {file.header.get('content')!r}, expected a {CONTENT}"
            )
        stored: Any = file.header.get("fingerprint")
        version = stored.get("context_format") if isinstance(stored, dict) else None
        if version != CONTEXT_FORMAT:
            raise IndexDamagedError(
                f"{path}: context format {version!r}, this vllm-relay reads {CONTEXT_FORMAT}"
            )
        try:
            if set(stored) != {each.name for each in fields(ContextFingerprint)}:
                raise ValueError(f"fields {', '.join(map(str, stored))}")
            fingerprint = ContextFingerprint(**stored)
        except ValueError as error:
            raise IndexDamagedError(f"{path}: fingerprint: {error}") from None
        differences = fingerprint.differences(expected) if expected is not None else []
        if differences:
            raise ForeignContextError(f"{path}: {'; '.join(differences)}")
        _check_layout(file, fingerprint)
        return cls(file, fingerprint)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [num_tokens]."""
        return self.file["tokens"]

    @property
    def token_hashes(self) -> np.ndarray:
        """uint8 [num_tokens // 16, 16]; `token_chain` of the tokens."""
        return self.file["token_hashes"]

    def rows(self, layer: int, kv_head: int, part: str) -> SectionReader:
        """The "keys", "values" or "value_means" of its own tokens, [n, size]; bits as in
        `Elements`."""
        return self.file.rows(f"{self._place(layer, kv_head)}/{part}")

    @property
    def index_kinds(self) -> dict[str, int]:
        """How many heads have an index of each kind."""
        kinds = [entry["kind"] for entry in self.file.header["indexes"].values()]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

    @property
    def plans(self) -> dict[str, Any]:
        """What was written as the plan of an index, by `layers/L/kv_heads/H`."""
        entries = self.file.header["indexes"].items()
        return {place: entry["plan"] for place, entry in entries if "plan" in entry}

    def plan(self, layer: int, kv_head: int) -> Any:
        """Of one head, as JSON; None if it has none."""
        return self.plans.get(self._place(layer, kv_head))

    def index(self, layer: int, kv_head: int) -> KeyIndex:
        """The head's index, on the arrays of the file. What a search reads row by row is verified
        when it is read, the rest now; the index is not checked.

        Raises:
            IndexDamagedError: arrays or settings are damaged, or do not fit together.
            KeyError: the head has none.
            ValueError: of a kind whose class is not loaded.
        """
        place = self._place(layer, kv_head)
        entry = self.file.header["indexes"].get(place)
        if entry is None:
            raise KeyError(f"{self.path}: {place} has no index")
        kind = index_type(entry["kind"])
        arrays, guards = self.file.arrays(entry["arrays"], kind.read_by_row)
        try:
            return kind.from_arrays(dict(entry["settings"]), arrays, guards)
        except IndexDamagedError as error:
            raise IndexDamagedError(f"{self.path}: {place}: {error}") from error

    def indexes_own_keys(self, layer: int, kv_head: int) -> bool:
        """Whether the head's index is one of the keys that the context has of it."""
        place = self._place(layer, kv_head)
        arrays = self.file.header["indexes"][place]["arrays"]
        return arrays.get("keys") == f"{place}/keys"

    def verify(self) -> None:
        """Reads every byte, and computes the hashes of the tokens again. Raises IndexDamagedError:
        lists what is damaged."""
        self.file.verify()
        if self.tokens.min() < 0:
            raise IndexDamagedError(f"{self.path}: tokens hold the negative id {self.tokens.min()}")
        if not np.array_equal(token_chain(self.tokens, self.fingerprint), self.token_hashes):
            raise IndexDamagedError(f"{self.path}: token_hashes are not those of the tokens")

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> ContextFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _place(self, layer: int, kv_head: int) -> str:
        return place_of(self.fingerprint, layer, kv_head)


def write_context(
    path: str | Path,
    fingerprint: ContextFingerprint,
    tokens: Any,
    heads: Iterable[HeadStates],
    *,
    parent: ParentFile | None = None,
) -> None:
    """Writes a context, atomically: the file is there whole or not at all.

    Args:
        tokens: token ids [n], n >= 1; those of the parent included.
        heads: of each layer all kv heads, in order; taken one by one, so a generator keeps one of
            them in memory. They have the tokens behind the parent's. Training queries are left out.
        parent: of which `tokens` has the first ones.

    Raises:
        ValueError: a head does not fit the fingerprint, or their number does not; names it.
        OSError: the folder cannot be written.
    """
    token_ids = as_tokens("tokens", tokens).astype(np.int32)
    indexes: dict[str, dict[str, Any]] = {}
    header: dict[str, Any] = {
        "content": CONTENT,
        "fingerprint": asdict(fingerprint),
        "num_tokens": len(token_ids),
    }
    num_own_tokens = len(token_ids)
    if parent is not None:
        header["parent"] = parent._asdict()
        num_own_tokens -= parent.num_tokens
    places = list(places_of(fingerprint))
    num_heads = 0
    with SectionWriter(path, header) as writer:
        writer.add("tokens", token_ids)
        writer.add("token_hashes", token_chain(token_ids, fingerprint))
        for num_heads, head in enumerate(heads, 1):
            if num_heads > len(places):
                break
            place = places[num_heads - 1]
            keys = _checked(f"{place}/keys", head.keys, fingerprint, num_own_tokens)
            values = _checked(f"{place}/values", head.values, fingerprint, num_own_tokens)
            if keys.shape[1] != fingerprint.head_size:
                raise ValueError(
                    f"{place}/keys: {list(keys.shape)}, expected a head size of "
                    f"{fingerprint.head_size}"
                )
            writer.add(f"{place}/keys", keys.data, page_class="keys")
            writer.add(f"{place}/values", values.data, page_class="values")
            writer.add(f"{place}/value_means", value_means(values, threads=1).data)
            indexes[place] = _write_index(writer, place, head.index, keys.data)
            if head.plan is not None:
                indexes[place]["plan"] = head.plan.to_json()
        if num_heads != len(places):
            raise ValueError(f"{num_heads} heads were given, expected {len(places)}")
        writer.header["indexes"] = indexes


def _write_index(
    writer: SectionWriter, place: str, index: KeyIndex, keys: np.ndarray
) -> dict[str, Any]:
    """What the header says of it. Keys that are those of the head are not written again."""
    settings, arrays = index.to_arrays()
    sections = {}
    for name, array in arrays.items():
        if array.dtype == keys.dtype and np.array_equal(array, keys):
            sections[name] = f"{place}/keys"
        else:
            sections[name] = f"{place}/index/{name}"
            writer.add(sections[name], array)
    return {"kind": index.kind, "settings": settings, "arrays": sections}


def _checked(
    name: str, elements: Elements, fingerprint: ContextFingerprint, num_tokens: int
) -> Elements:
    if elements.dtype != fingerprint.dtype:
        raise ValueError(f"{name}: {elements.dtype}, expected {fingerprint.dtype}")
    if len(elements.shape) != 2 or elements.shape[0] != num_tokens:
        raise ValueError(f"{name}: {list(elements.shape)}, expected [{num_tokens}, size]")
    check_finite(name, elements)
    return elements


def index_type(kind: str) -> type[KeyIndex]:
    """The class of a kind of index, among those that are imported."""
    known: dict[str, type[KeyIndex]] = {}
    waiting = list(KeyIndex.__subclasses__())
    while waiting:
        subclass = waiting.pop()
        waiting.extend(subclass.__subclasses__())
        if hasattr(subclass, "kind"):  # others are what several kinds have in common
            known.setdefault(subclass.kind, subclass)
    if kind not in known:
        raise ValueError(
            f"an index of kind {kind!r}, expected one of {', '.join(sorted(known)) or 'none'}: "
            "import the module that defines it first"
        )
    return known[kind]


def place_of(fingerprint: ContextFingerprint, layer: int, kv_head: int) -> str:
    if not 0 <= layer < fingerprint.num_layers or not 0 <= kv_head < fingerprint.num_kv_heads:
        raise ValueError(
            f"layer {layer}, kv head {kv_head}: the model has {fingerprint.num_layers} layers of "
            f"{fingerprint.num_kv_heads} kv heads"
        )
    return f"layers/{layer}/kv_heads/{kv_head}"


def places_of(fingerprint: ContextFingerprint) -> Iterable[str]:
    for layer in range(fingerprint.num_layers):
        for kv_head in range(fingerprint.num_kv_heads):
            yield place_of(fingerprint, layer, kv_head)


def _num_parent_tokens(file: SectionFile, num_tokens: int) -> int:
    """Raises IndexDamagedError: what the header says of a parent is no such thing."""
    parent = file.header.get("parent")
    if parent is None:
        return 0
    if (
        not isinstance(parent, dict)
        or set(parent) != set(ParentFile._fields)
        or type(parent["num_tokens"]) is not int
        or not 0 < parent["num_tokens"] < num_tokens
        or not isinstance(parent["context_id"], str)
        or not _CONTEXT_ID.fullmatch(parent["context_id"])
    ):
        raise IndexDamagedError(
            f"{file.path}: parent is {parent!r}, expected a context_id and 1 to {num_tokens - 1} "
            "num_tokens"
        )
    return parent["num_tokens"]


def _check_layout(file: SectionFile, fingerprint: ContextFingerprint) -> None:
    """Every section that the accessors name is there and has its shape and dtype."""

    def check(name: str, dtype: np.dtype, *shape: int | None) -> None:
        section = file.sections.get(name)
        if (
            section is None
            or section.dtype != dtype
            or len(section.shape) != len(shape)
            or any(b is not None and a != b for a, b in zip(section.shape, shape, strict=True))
        ):
            found = None if section is None else (section.dtype.name, *section.shape)
            raise IndexDamagedError(
                f"{file.path}: section {name!r}: found {found}, expected {dtype.name} {list(shape)}"
            )

    num_tokens = file.header.get("num_tokens")
    if type(num_tokens) is not int or num_tokens < 1:
        raise IndexDamagedError(f"{file.path}: num_tokens is {num_tokens!r}, expected at least 1")
    num_own_tokens = num_tokens - _num_parent_tokens(file, num_tokens)
    num_heads = fingerprint.num_layers * fingerprint.num_kv_heads
    if num_heads > len(file.sections):
        raise IndexDamagedError(
            f"{file.path}: {len(file.sections)} sections, expected more for {num_heads} kv heads"
        )
    check("tokens", np.dtype(np.int32), num_tokens)
    check("token_hashes", np.dtype(np.uint8), num_tokens // CHAIN_TOKENS, CHAIN_HASH_BYTES)
    storage = np.dtype(STORAGE[fingerprint.dtype])
    places = set(places_of(fingerprint))
    size = None  # of values: the same for all
    for place in places:
        check(f"{place}/keys", storage, num_own_tokens, fingerprint.head_size)
        check(f"{place}/values", storage, num_own_tokens, size)
        size = max(1, file.sections[f"{place}/values"].shape[1])
        check(f"{place}/value_means", storage, -(-num_own_tokens // MEAN_TOKENS), size)
    indexes = file.header.get("indexes")
    if not isinstance(indexes, dict) or not places.issuperset(indexes):
        raise IndexDamagedError(f"{file.path}: indexes of heads that it has not")
    for place, entry in indexes.items():
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("kind"), str)
            or not isinstance(entry.get("settings"), dict)
            or not isinstance(entry.get("arrays"), dict)
            or not all(
                isinstance(name, str) and name in file.sections for name in entry["arrays"].values()
            )
        ):
            raise IndexDamagedError(f"{file.path}: {place}: its index is not described as expected")
