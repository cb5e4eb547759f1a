# SPDX-License-Identifier: Apache-2.0
"""What is checked: shapes, features and batches."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.attention.batches import Batch, random_batch, shared_prefix
from benchmarks.cuda.geometry import PLAIN, Features, Geometry
from benchmarks.cuda.limits import planner_limits
from vllm_relay.attention_backends.cuda.plans.planner import PlannerLimits

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
MAX_QUERY_LEN = 6
"""`random_batch` lets requests check up to so many query tokens."""

SHARED = 1.1
"""KV tokens over unique ones, of batches that are to share something."""


@dataclass(frozen=True)
class Case:
    geometry: Geometry
    features: Features = PLAIN
    key_factor: float = 1.0
    """Large keys make weights that differ by many orders of magnitude."""

    def __str__(self) -> str:
        large = f", keys x {self.key_factor:g}" if self.key_factor != 1 else ""
        return f"{self.geometry}: {self.features}{large}"

    @property
    def rms_tolerance(self) -> float:
        """Several times what rounding weights and outputs to this type does."""
        return {BF16: 1e-2, FP16: 2e-3, FP32: 1e-4}[self.geometry.dtype]

    @property
    def lse_tolerance(self) -> float:
        return {BF16: 1e-2, FP16: 2e-3, FP32: 1e-4}[self.geometry.dtype]


LLAMA = Geometry(32, 8)
CASES = [
    Case(LLAMA),
    Case(LLAMA, key_factor=4.0),
    Case(Geometry(32, 8, 64, 32, FP16, FP16)),
    Case(Geometry(32, 32, 80)),
    Case(Geometry(28, 4, 96)),
    Case(Geometry(8, 1, 256)),
    Case(Geometry(64, 8, 128, 64)),
    Case(Geometry(8, 2, 128, 16, FP32, FP32)),
    Case(Geometry(6, 6, 64, 16, FP32, FP32), Features(soft_cap=20.0)),
    Case(LLAMA, Features(sliding_window=777)),
    Case(LLAMA, Features(alibi=True)),
    Case(Geometry(16, 8, 256), Features(sliding_window=512, soft_cap=50.0)),
    Case(Geometry(64, 8, 64), Features(sliding_window=128, sinks=True)),
    Case(Geometry(64, 8, 64), Features(sinks=True)),
    Case(Geometry(32, 8, kv_dtype=FP8)),
    Case(Geometry(40, 8, 64, 32, FP16, FP8)),
    Case(Geometry(8, 2, kv_dtype=FP8), Features(300, True, 30.0, True)),
    Case(Geometry(24, 8, 96, 16, FP16, FP16), Features(1000, True, 30.0, True)),
]
TINY_CASES = [
    Case(Geometry(4, 2, 32)),
    Case(Geometry(2, 1, 16, 32, FP32, FP32), Features(40, True, 20.0, True)),
    Case(Geometry(2, 2, 24, kv_dtype=FP8)),
]


def check_limits(size: str) -> PlannerLimits:
    """For all batches that are checked; `size` is that of the run."""
    tiny = size == "tiny"
    requests = 8 if tiny else 64
    return planner_limits(
        requests=requests,
        tokens=requests * MAX_QUERY_LEN,
        seq_len=2048 if tiny else 14336,
    )


def batch_sizes(size: str, geometry: Geometry) -> dict[str, Any]:
    """For `random_forest`, within those limits."""
    if size == "tiny":
        return {"num_blocks": 300, "max_seq_len": 300, "max_kv_tokens": 1000}
    num_blocks = 40_000 // geometry.block_size
    return {"num_blocks": num_blocks, "max_seq_len": 12_000, "max_kv_tokens": 200_000}


def fixed_batch(block_size: int) -> Batch:
    """Longer than a section, and shared up to a place that divides neither section nor segment."""
    return shared_prefix(5, 4096 + 512 + 128, 100, block_size)


def random_forest(
    rng: np.random.Generator,
    *,
    block_size: int,
    max_requests: int,
    max_seq_len: int,
    num_blocks: int,
    max_kv_tokens: int,
    max_query_len: int = MAX_QUERY_LEN,
    shares: bool = False,
    kind: str | None = None,
) -> Batch:
    """A random batch of decoding requests, some with several query tokens each, in random trees;
    drawn anew until it fits and, with `shares`, saves at least a little."""
    while True:
        batch = random_batch(
            rng,
            num_blocks=num_blocks,
            max_kv_tokens=max_kv_tokens,
            block_size=block_size,
            kind=kind,
        )
        if (
            batch.num_requests <= max_requests
            and int(batch.seq_lens.max()) <= max_seq_len
            and int(np.diff(batch.query_start_loc).max()) <= max_query_len
            and (batch.kv_tokens > SHARED * batch.kv_tokens_unique or not shares)
        ):
            return batch
