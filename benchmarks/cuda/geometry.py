# SPDX-License-Identifier: Apache-2.0
"""Shapes of attention layers, what they read and multiply, and how fast a GPU could do that."""

from dataclasses import dataclass

import torch

from benchmarks.attention.batches import Batch
from vllm_relay.attention_backends.cuda.config import LayerShape

LAUNCH_US = 6.0
"""What two launches may cost beyond the limit of a batch."""


@dataclass(frozen=True)
class Geometry:
    """The attention of a model, and its KV cache."""

    num_heads: int
    num_kv_heads: int
    head_size: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @property
    def layer(self) -> LayerShape:
        return LayerShape(self.num_heads, self.num_kv_heads, self.head_size, self.kv_dtype.itemsize)

    @property
    def is_fp8(self) -> bool:
        return self.kv_dtype.itemsize == 1

    @property
    def heads(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}"

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.kv_dtype)]
        kv = f", KV {names[1]}" if names[0] != names[1] else ""
        return f"{self.heads} x {self.head_size}, blocks of {self.block_size}, {names[0]}{kv}"

    def kv_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Of a KV cache; keys come first in the last dimension, then values."""
        return num_blocks, self.num_kv_heads, self.block_size, 2 * self.head_size

    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_size * self.kv_dtype.itemsize

    def bytes_moved(self, batch: Batch, *, shared_once: bool) -> float:
        """Keys and values once, or once per request that reads them; queries and outputs."""
        tokens = batch.kv_tokens_unique if shared_once else batch.kv_tokens
        rows = 2 * batch.num_query_tokens * self.num_heads * self.head_size * self.dtype.itemsize
        return float(tokens) * self.kv_bytes_per_token() + rows

    def flops(self, batch: Batch) -> float:
        """Of scores and outputs; what a kernel multiplies beyond that is its own affair."""
        return 4.0 * self.num_heads * self.head_size * batch.attended_pairs()


@dataclass(frozen=True)
class Features:
    """What a model adds to plain attention."""

    sliding_window: int | None = None
    alibi: bool = False
    soft_cap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        parts = [
            f"window {self.sliding_window}" if self.sliding_window else "",
            "ALiBi" if self.alibi else "",
            f"soft cap {self.soft_cap:g}" if self.soft_cap else "",
            "sinks" if self.sinks else "",
        ]
        return ", ".join(filter(None, parts)) or "plain"


PLAIN = Features()


@dataclass(frozen=True)
class Ceilings:
    """What this GPU was seen to do at best."""

    bytes_per_s: float
    """Of a copy, reads and writes counted."""
    flops_per_s: float
    """Of a large bf16 matrix product."""


@dataclass(frozen=True)
class Limit:
    """No kernel that reads what is shared once is faster."""

    memory_us: float
    compute_us: float

    @classmethod
    def of(cls, geometry: Geometry, batch: Batch, ceilings: Ceilings) -> "Limit":
        moved = geometry.bytes_moved(batch, shared_once=True)
        return cls(
            moved / ceilings.bytes_per_s * 1e6, geometry.flops(batch) / ceilings.flops_per_s * 1e6
        )

    @property
    def us(self) -> float:
        return max(self.memory_us, self.compute_us)

    @property
    def is_memory_bound(self) -> bool:
        return self.memory_us >= self.compute_us

    @property
    def bound_by(self) -> str:
        return "memory" if self.is_memory_bound else "compute"
