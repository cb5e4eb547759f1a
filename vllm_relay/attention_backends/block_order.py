# SPDX-License-Identifier: Apache-2.0
"""The KV blocks of one KV cache group's requests, and an order in which those that begin alike are
neighbours.

The order is kept from step to step. A request that begins is sorted in, and what is said of the
others stays true: so a step in which one request begins costs one search, not a sort of all.

Numpy in, numpy out; the order itself is `csrc/attention/block_order.h`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_relay import _C
from vllm_relay.attention_backends.forest import BEGIN_TOKENS, END_TOKENS, Forest, build_forest


class BlockOrder:
    """Rows of a block table that grow behind, and may be taken by others."""

    def __init__(self) -> None:
        self._order = _C.BlockOrder()

    def begin(self, row: int, block_ids: Sequence[int]) -> None:
        """A request that has these blocks takes a free row."""
        self._order.begin(row, block_ids)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """The request of a row has these blocks behind those it had."""
        self._order.append(row, block_ids)

    def end(self, row: int) -> None:
        """A row is free again."""
        self._order.end(row)

    def table(self, rows: np.ndarray) -> np.ndarray:
        """int32 [rows, blocks], zeros behind those of a request; a row of -1 has none."""
        return self._order.block_table(rows)

    def num_blocks(self, rows: np.ndarray) -> np.ndarray:
        """int64 [rows], 0 where a row is -1."""
        return self._order.num_blocks(rows)

    def forest(self, rows: np.ndarray, shareable_tokens: np.ndarray, block_size: int) -> Forest:
        """As `build_forest` of these rows.

        Args:
            rows: int64 [requests], all different, or -1 for requests that share nothing.
            shareable_tokens: int [requests]: how many leading tokens a request may share.
            block_size: tokens per block.
        """
        limits = np.minimum(shareable_tokens // block_size, self.num_blocks(rows))
        order, nodes, has_nulls = self._order.forest(rows, limits)
        if has_nulls:
            return build_forest(self.table(rows), limits * block_size, block_size)
        ranges = nodes[:, BEGIN_TOKENS : END_TOKENS + 1]
        ranges *= block_size
        return Forest(order, nodes)
