# SPDX-License-Identifier: Apache-2.0
"""Writes a context into a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_relay.sparse.contexts.context_fingerprint import (
    ContextFingerprint,
    as_token_ids,
    token_chain,
)
from vllm_relay.sparse.contexts.disk.context_file import CONTENT, ParentFile, place_of, places_of
from vllm_relay.sparse.files.section_file import SectionWriter
from vllm_relay.sparse.index.elements import Elements, as_elements
from vllm_relay.sparse.index.key_index import KeyIndex
from vllm_relay.sparse.index.value_means import value_means


@dataclass(frozen=True)
class ContextHead:
    """What one kv head of one layer keeps of the n tokens of a context that are its own.

    Attributes:
        keys: [n, head_size], values: [n, value size]; of the dtype of the fingerprint.
        index: of these keys or of some of them; None where attention is dense.
        plan: what is to be asked of the index, as JSON can hold it.
    """

    layer: int
    kv_head: int
    keys: Any
    values: Any
    index: KeyIndex | None = None
    plan: dict[str, Any] | None = None


def write_context(
    path: str | Path,
    fingerprint: ContextFingerprint,
    tokens: Any,
    heads: Iterable[ContextHead],
    *,
    parent: ParentFile | None = None,
    page_bytes: int | None = None,
) -> None:
    """Writes a context, atomically: the file is there whole or not at all.

    Args:
        tokens: token ids [n], n >= 1; those of the parent included.
        heads: each head of each layer once, in any order; taken one by one, so a generator keeps
            one of them in memory. They have the tokens behind the parent's.
        parent: of which `tokens` has the first ones.
        page_bytes: as for `SectionWriter`.

    Raises:
        ValueError: a head is missing, there twice, or does not fit the fingerprint; names it.
        OSError: the folder cannot be written.
    """
    token_ids = as_token_ids(tokens)
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
    with SectionWriter(path, header, page_bytes=page_bytes) as writer:
        writer.add("tokens", token_ids)
        writer.add("token_hashes", token_chain(token_ids, fingerprint))
        written = set()
        for head in heads:
            place = place_of(fingerprint, head.layer, head.kv_head)
            if place in written:
                raise ValueError(f"{place}: given twice")
            written.add(place)
            keys = _elements(f"{place}/keys", head.keys, fingerprint, num_own_tokens)
            values = _elements(f"{place}/values", head.values, fingerprint, num_own_tokens)
            if keys.shape[1] != fingerprint.head_size:
                raise ValueError(
                    f"{place}/keys: {list(keys.shape)}, expected a head size of "
                    f"{fingerprint.head_size}"
                )
            writer.add(f"{place}/keys", keys.data, page_class="keys")
            writer.add(f"{place}/values", values.data, page_class="values")
            means = value_means(values, threads=1)
            writer.add(f"{place}/value_means", means.data, page_class="index")
            if head.index is not None:
                indexes[place] = _write_index(writer, place, head.index, keys.data)
                if head.plan is not None:
                    indexes[place]["plan"] = head.plan
        num_heads = fingerprint.num_layers * fingerprint.num_kv_heads
        if len(written) != num_heads:
            missing = next(p for p in places_of(fingerprint) if p not in written)
            raise ValueError(
                f"{len(written)} heads were given, expected {num_heads}; {missing} is missing"
            )
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
            writer.add(sections[name], array, page_class="index")
    return {"kind": index.kind, "settings": settings, "arrays": sections}


def _elements(name: str, array: Any, fingerprint: ContextFingerprint, num_tokens: int) -> Elements:
    elements = as_elements(name, array)
    if elements.dtype != fingerprint.dtype:
        raise ValueError(f"{name}: {elements.dtype}, expected {fingerprint.dtype}")
    if len(elements.shape) != 2 or elements.shape[0] != num_tokens:
        raise ValueError(f"{name}: {list(elements.shape)}, expected [{num_tokens}, size]")
    return elements
