# SPDX-License-Identifier: Apache-2.0
"""Blocks of adjacent tokens, of which a query reads those whose representatives it likes best."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_relay import _C
from vllm_relay.sparse.files.damage import require
from vllm_relay.sparse.index.compiled_index import CodedKeys, CompiledIndex
from vllm_relay.sparse.index.default_width import learned_width
from vllm_relay.sparse.index.key_codes import BLOCK_KEYS, blocks_in_order, row_bytes
from vllm_relay.sparse.index.query_types import QueryType

REPRESENTATIVES = ("bounds", "mean")
MAX_BLOCK_TOKENS = 4096


class BlockIndex(CompiledIndex):
    """Eight-bit codes in token order; `width` of a query is how many blocks it reads.

    Args:
        block_tokens: adjacent tokens of a block; a multiple of 16.
        representative: what a query chooses blocks by. "bounds": the largest and the smallest code
            of each dimension, from which the largest product that a key between them could have
            follows; no key of the block has a larger one. "mean": the mean of the codes.
        exact: read blocks, best bound first, until no key of an unread one can be an answer.
            Answers are those of `FlatIndex`, whatever the width. Takes bounds.

    Raises:
        ValueError: an argument is unusable; names it.

    Source: Quest (2406.10774) for the bounds; blocks of adjacent tokens with representatives are
        the memory units of InfLLM (2402.04617), where these are the keys of a block that the tokens
        after them score highest.
    """

    kind = "blocks"
    own_settings = ("block_tokens", "representative", "exact", "default_width")
    own_arrays = ("blocks", "representatives")
    read_by_row = frozenset({"keys", "blocks"})

    def __init__(
        self, block_tokens: int = 32, representative: str = "mean", *, exact: bool = False
    ) -> None:
        if (
            type(block_tokens) is not int
            or not 0 < block_tokens <= MAX_BLOCK_TOKENS
            or block_tokens % BLOCK_KEYS
        ):
            raise ValueError(
                f"block_tokens is {block_tokens!r}, expected a multiple of {BLOCK_KEYS} up to "
                f"{MAX_BLOCK_TOKENS}"
            )
        if representative not in REPRESENTATIVES:
            raise ValueError(
                f"representative is {representative!r}, expected one of "
                f"{', '.join(REPRESENTATIVES)}"
            )
        if type(exact) is not bool or (exact and representative != "bounds"):
            raise ValueError(
                f"exact is {exact!r} with representative {representative!r}, expected True with "
                "bounds only, or False"
            )
        self.block_tokens, self.representative, self.exact = block_tokens, representative, exact

    @property
    def num_blocks(self) -> int:
        return -(-self.num_keys // self.block_tokens)

    def _build(self, coded: CodedKeys, train_queries: Any, seed: int, threads: int) -> None:
        keys, codes, rows = coded
        self._set(keys, codes, self._arrays_of(rows, codes.outside))
        self.default_width = max(1, self.num_blocks // 6)
        if not self.exact and train_queries is not None:
            self.default_width = learned_width(self, train_queries, seed, self.num_blocks)

    def _new_searcher(self) -> Any:
        return _C.index.BlockSearcher(
            "auto", self._key_set("blocks"), self._codes.outside, self._arrays["representatives"],
            self.block_tokens,
        )  # fmt: skip

    def width_of(self, query: QueryType) -> int:
        """0 where as many blocks are read as it takes."""
        return 0 if self.exact else super().width_of(query)

    def _arrays_of(self, rows: np.ndarray, outside: np.ndarray) -> dict[str, np.ndarray]:
        """Codes, and uint8 [2, blocks of sixteen, bytes], largest and smallest codes, or [1, ...],
        means."""
        reductions: list[Any] = [_means]
        if self.representative == "bounds":
            reductions = [np.maximum.reduceat, np.minimum.reduceat]
        found = [blocks_in_order(self._reduce(each, rows, outside)) for each in reductions]
        return {"blocks": blocks_in_order(rows), "representatives": np.stack(found)}

    def _reduce(self, reduce: Any, rows: np.ndarray, outside: np.ndarray) -> np.ndarray:
        """uint8 [num_blocks, row_bytes], over the keys of each block that have a code."""
        found = reduce(rows, np.arange(0, len(rows), self.block_tokens), axis=0)
        for block in np.unique(outside // self.block_tokens):
            begin = block * self.block_tokens
            members = np.arange(begin, min(len(rows), begin + self.block_tokens))
            inside = rows[np.setdiff1d(members, outside)]
            found[block] = reduce(inside, [0], axis=0)[0] if len(inside) else 128
        return found

    def _has_codes(self, rows: np.ndarray) -> bool:
        wanted = self._arrays_of(rows, self._codes.outside)
        has_blocks, has_representatives = (
            np.array_equal(wanted[name], self._arrays[name]) for name in self.own_arrays
        )
        require(
            has_representatives or not has_blocks,
            "block index: its representatives are not those of its blocks",
        )
        return has_blocks

    @classmethod
    def _unbuilt(cls, settings: dict[str, Any]) -> BlockIndex:
        return cls(settings["block_tokens"], settings["representative"], exact=settings["exact"])

    def _fits(self, settings: dict[str, Any], arrays: dict[str, np.ndarray]) -> bool:
        width, (blocks, representatives) = settings["default_width"], arrays.values()
        num_representatives = 2 if self.representative == "bounds" else 1
        block_bytes = BLOCK_KEYS * row_bytes(self.head_size)
        shapes = (
            (-(-self.num_keys // BLOCK_KEYS), block_bytes),
            (num_representatives, -(-self.num_blocks // BLOCK_KEYS), block_bytes),
        )
        return (
            (blocks.shape, representatives.shape) == shapes
            and blocks.dtype == representatives.dtype == np.uint8
            and type(width) is int
            and 1 <= width <= self.num_blocks
        )


def _means(rows: np.ndarray, begins: Any, axis: int) -> np.ndarray:
    """As `ufunc.reduceat`."""
    sums = np.add.reduceat(rows, begins, axis=axis, dtype=np.uint32)
    counts = np.diff(np.append(begins, len(rows))).astype(np.uint32)[:, None]
    return ((sums + counts // 2) // counts).astype(np.uint8)
