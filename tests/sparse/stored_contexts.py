# SPDX-License-Identifier: Apache-2.0
"""A small context, and an index that has an array besides its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.sparse.brute_force_index import BruteForceIndex
from vllm_relay._C import PageGuard
from vllm_relay.sparse.contexts.context_fingerprint import ContextFingerprint
from vllm_relay.sparse.contexts.context_store import HeadStates
from vllm_relay.sparse.contexts.disk.context_file import ContextFile, write_context
from vllm_relay.sparse.files.section_file import SectionWriter
from vllm_relay.sparse.index.elements import Elements, from_float32
from vllm_relay.sparse.index.key_index import NO_GUARDS, IndexDamagedError

FINGERPRINT = ContextFingerprint(
    model="tiny",
    model_hash="0123",
    num_layers=2,
    num_kv_heads=3,
    head_size=8,
    dtype="bfloat16",
    rope={"theta": 10000.0, "scaling": {"factor": 2}},
)
TOKENS = (np.arange(1000) * 7919 % 32_000).astype(np.int64)


class ArraysIndex(BruteForceIndex):
    kind = "arrays of tests"

    def __init__(self, keys: Elements, links: np.ndarray) -> None:
        super().__init__()
        self._keys = keys
        self.links = links

    def to_arrays(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        settings, arrays = super().to_arrays()
        return settings, {**arrays, "links": self.links}

    @classmethod
    def from_arrays(
        cls,
        settings: dict[str, Any],
        arrays: dict[str, np.ndarray],
        guards: Mapping[str, PageGuard] = NO_GUARDS,
    ) -> ArraysIndex:
        if len(arrays["links"]) != len(arrays["keys"]):
            raise IndexDamagedError("links do not fit")
        return cls(Elements(arrays["keys"], settings["dtype"]), arrays["links"])


def head(layer: int, kv_head: int, num_tokens: int = len(TOKENS)) -> HeadStates:
    rng = np.random.default_rng([layer, kv_head])
    keys = from_float32(rng.standard_normal((num_tokens, 8)), "bfloat16")
    values = from_float32(rng.standard_normal((num_tokens, 4)), "bfloat16")
    links = rng.integers(0, num_tokens, (num_tokens, 5), dtype=np.int32)
    return HeadStates(keys, values, ArraysIndex(keys, links))


def heads() -> Iterator[HeadStates]:
    for layer in range(FINGERPRINT.num_layers):
        for kv_head in range(FINGERPRINT.num_kv_heads):
            yield head(layer, kv_head)


def write(path: Path) -> Path:
    """Layer 0 is dense."""
    write_context(path, FINGERPRINT, TOKENS, heads())
    drop_indexes(path, [f"layers/0/kv_heads/{kv_head}" for kv_head in range(3)])
    return path


def drop_indexes(path: Path, places: list[str]) -> None:
    """Writes a context again without the indexes of some heads."""
    with ContextFile.open(path, mmap=False) as context:
        header, sections = context.file.header, context.file.sections
        indexes = {name: each for name, each in header["indexes"].items() if name not in places}
        with SectionWriter(path, {**header, "indexes": indexes}) as writer:
            for name, section in sections.items():
                if not any(name.startswith(f"{place}/index/") for place in places):
                    writer.add(name, context.file[name], page_class=section.page_class)
