# SPDX-License-Identifier: Apache-2.0
"""What reading a range of KV tokens costs, for the decisions of a step's plan.

A kernel works on tiles of rows: every tile passes over the keys and values once, from the cache of
the core that another tile has filled, or, for the first, from memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class KernelCost:
    """Costs per KV token of one kv head and 128 dims, in nanoseconds of one core.

    Only their ratios matter. They follow from what was measured of each part: the rate at which a
    core reads memory that its own cache does not hold, and the rate of its products.
    """

    tile_rows: int
    stream_ns: float
    """Bringing one token's keys and values to the core."""
    tile_ns: float
    """Per tile, whatever its rows."""
    row_ns: float
    """Per row."""
    start_tokens: float
    """Starting a range costs as much as this many tokens of it would, compute and memory both."""
    weight_ns: float = 0.0
    """Per row, turning a score into a weight apart from the products."""
    widen_ns: float = 0.0
    """Turning one token of an fp8 cache into the dtype of the queries, for all rows that read it
    together."""
    once_ns: float = 0.0
    """Per token, beside the products and whatever the rows: `widen_ns` over an fp8 cache."""
    merge_ns: float = 20.0
    """Per row of a segment that was computed apart, adding its state to those before it."""
    state_ns: float = 0.0
    """Per row of a range, where the states of all ranges wait in memory, not in a core's cache:
    writing and reading it."""

    def over_fp8(self) -> KernelCost:
        """Over a KV cache in fp8, of half the bytes."""
        return replace(self, stream_ns=self.stream_ns / 2, once_ns=self.widen_ns)

    def token_ns(self, rows: np.ndarray) -> np.ndarray:
        """Cost per token of a range that `rows` rows read together; elementwise."""
        tiles = -(-rows // self.tile_rows)
        computing_ns = tiles * self.tile_ns + rows * self.row_ns + self.once_ns
        return np.maximum(computing_ns, self.stream_ns)

    @property
    def balanced_rows(self) -> int:
        """Rows whose products take about as long as bringing what they read together."""
        return max(self.tile_rows, int(self.stream_ns / self.token_ns(np.array(2048)) * 2048))

    def product_ns(self, rows: np.ndarray, share: np.ndarray | float = 1.0) -> np.ndarray:
        """Cost per token of multiplying keys alone, or a share of the dims of the values alone;
        elementwise."""
        tiles = -(-rows // self.tile_rows)
        per_row_ns = max(self.row_ns - self.weight_ns, 0.0)
        computing_ns = tiles * self.tile_ns + rows * per_row_ns + self.once_ns
        return share * np.maximum(computing_ns, self.stream_ns) / 2

    def start_ns(self, rows: np.ndarray) -> np.ndarray:
        """Cost of a range whatever its tokens; elementwise."""
        tiles = -(-rows // self.tile_rows)
        started_ns = (tiles * self.tile_ns + self.stream_ns) * self.start_tokens
        return started_ns + rows * self.state_ns

    def range_ns(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Cost of ranges of `tokens` tokens read together by `rows` rows; elementwise."""
        return self.token_ns(rows) * tokens + self.start_ns(rows)


_AMX = KernelCost(32, 30.0, tile_ns=13.0, row_ns=0.05, start_tokens=16, weight_ns=0.2, widen_ns=7.0)
_AVX512 = KernelCost(6, 16.0, tile_ns=1.5, row_ns=2.2, start_tokens=8, weight_ns=0.12, widen_ns=7.0)
_NEON = KernelCost(6, 16.0, tile_ns=3.0, row_ns=5.0, start_tokens=8, weight_ns=0.5, widen_ns=11.0)
_AVX512_BF16 = replace(_AVX512, tile_ns=1.0, row_ns=1.6, weight_ns=0.15)
KERNEL_COSTS = {
    "amx_bf16": _AMX,
    "avx512_bf16": _AVX512_BF16,
    "avx512_bf16_rounded": replace(_AVX512_BF16, row_ns=1.1),
    "avx512": _AVX512,
    "amx_bf16_emulated": _AMX,
    "avx2": KernelCost(
        4, 16.0, tile_ns=4.0, row_ns=4.0, start_tokens=8, weight_ns=0.43, widen_ns=11.0
    ),
    "neon_bf16": replace(_NEON, tile_ns=1.5, row_ns=4.0),
    "neon": _NEON,
    "portable": KernelCost(
        2, 16.0, tile_ns=8.0, row_ns=10.0, start_tokens=4, weight_ns=5.0, widen_ns=20.0
    ),
}
