# SPDX-License-Identifier: Apache-2.0
"""Batches, queries, keys and values on a device, and relay's kernels as they are called on them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.attention.batches import Batch
from benchmarks.cuda.geometry import PLAIN, Features, Geometry
from benchmarks.cuda.limits import table_width
from vllm_relay.attention_backends.cuda.config import KernelConfig, KernelSetup
from vllm_relay.attention_backends.cuda.launch import relay_attention
from vllm_relay.attention_backends.cuda.plans.planner import PlannerLimits, StepPlanner
from vllm_relay.attention_backends.forest import Forest, build_forest
from vllm_relay.attention_backends.groups import forest_for

FP8_SCALES = (0.75, 1.25)
"""Of keys and of values."""


@dataclass(eq=False)
class DeviceBatch:
    """The tables of a batch on a device, as wide as the planner's limits allow."""

    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int
    host: Batch | None = None

    @classmethod
    def upload(
        cls, batch: Batch, limits: PlannerLimits, device: str, max_query_len: int | None = None
    ) -> "DeviceBatch":
        """`max_query_len` is an upper bound, exact unless given."""
        width = table_width(limits, batch.block_size)
        rows, columns = batch.block_table.shape
        if columns > width or rows > limits.max_requests:
            raise ValueError(
                f"a batch of {rows} requests with {columns} blocks does not fit limits of "
                f"{limits.max_requests} and {width}"
            )
        table = torch.zeros((rows, width), dtype=torch.int32, device=device)
        table[:, :columns] = torch.from_numpy(batch.block_table).to(device)
        return cls(
            block_table=table,
            query_start_loc=torch.from_numpy(batch.query_start_loc).to(device),
            seq_lens=torch.from_numpy(batch.seq_lens).to(device),
            max_query_len=max_query_len or int(np.diff(batch.query_start_loc).max()),
            max_seq_len=int(batch.seq_lens.max()),
            host=batch,
        )

    @classmethod
    def unfilled(
        cls, limits: PlannerLimits, block_size: int, max_query_len: int, device: str = "meta"
    ) -> "DeviceBatch":
        """Tables of a full batch whose numbers are to be filled in, or never read."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        requests = limits.max_requests
        return cls(
            block_table=zeros(requests, table_width(limits, block_size)),
            query_start_loc=zeros(requests + 1),
            seq_lens=zeros(requests),
            max_query_len=max_query_len,
            max_seq_len=limits.max_seq_len,
        )

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]


@dataclass(eq=False)
class Inputs:
    """What one layer's attention reads."""

    batch: DeviceBatch
    geometry: Geometry
    features: Features
    query: torch.Tensor
    """[tokens, num_heads, head_size]"""
    kv_cache: torch.Tensor
    """[num_blocks, num_kv_heads, block_size, 2 * head_size], keys first."""
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    alibi_slopes: torch.Tensor | None = field(default=None, kw_only=True)
    sinks: torch.Tensor | None = field(default=None, kw_only=True)

    @classmethod
    def of(
        cls,
        batch: DeviceBatch,
        geometry: Geometry,
        kv_cache: torch.Tensor,
        features: Features = PLAIN,
        *,
        query: torch.Tensor | None = None,
        seed: int = 1,
    ) -> "Inputs":
        """With random queries unless given, and scales, slopes and sinks where there are any."""
        device = kv_cache.device
        if query is None:
            assert batch.host is not None
            shape = (batch.host.num_query_tokens, geometry.num_heads, geometry.head_size)
            generator = torch.Generator(device).manual_seed(seed)
            query = torch.randn(shape, generator=generator, device=device).to(geometry.dtype)
        scales = FP8_SCALES if geometry.is_fp8 else (1.0, 1.0)
        k_scale, v_scale = (torch.tensor(scale, device=device) for scale in scales)
        heads = torch.arange(1, geometry.num_heads + 1, dtype=torch.float32)
        slopes, sinks = 2.0 ** (-8 * heads / geometry.num_heads), torch.cos(heads)
        return cls(
            batch, geometry, features, query, kv_cache, k_scale, v_scale,
            alibi_slopes=slopes.to(device) if features.alibi else None,
            sinks=sinks.to(device) if features.sinks else None,
        )  # fmt: skip

    @classmethod
    def unfilled(
        cls, batch: DeviceBatch, geometry: Geometry, features: Features, device: str
    ) -> "Inputs":
        shape = (batch.num_requests, geometry.num_heads, geometry.head_size)
        return cls.of(
            batch, geometry,
            torch.empty(geometry.kv_shape(ALIGNED_BLOCKS), dtype=geometry.kv_dtype, device=device),
            features, query=torch.empty(shape, dtype=geometry.dtype, device=device),
        )  # fmt: skip

    def blocks(self, ids: torch.Tensor) -> torch.Tensor:
        """A copy of some blocks of the cache; as bytes, since not every type can be indexed."""
        bytes_of_cache = self.kv_cache.view(torch.uint8)
        return bytes_of_cache[ids].view(self.kv_cache.dtype)

    def keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [num_blocks, block_size, num_kv_heads, head_size], as other kernels expect them."""
        key, value = self.kv_cache.transpose(1, 2).split(self.geometry.head_size, dim=-1)
        return key, value


ALIGNED_BLOCKS = 16


class Relay:
    """relay's kernels with one geometry, configuration and set of buffers.

    Args:
        num_sms: multiprocessors of the GPU.
    """

    def __init__(
        self,
        device: str,
        geometry: Geometry,
        config: KernelConfig,
        limits: PlannerLimits,
        *,
        num_sms: int,
    ) -> None:
        self.geometry, self.config, self.limits = geometry, config, limits
        self.planner = StepPlanner(
            limits,
            KernelSetup.of(config, geometry.layer, num_sms),
            device=device,
        )

    def plan(
        self,
        batch: DeviceBatch,
        features: Features = PLAIN,
        *,
        shares: bool = True,
        everything: bool = False,
        seq_lens: torch.Tensor | None = None,
    ) -> None:
        """Plans a step; kernels look lengths up in those of the batch, unless given."""
        host, planner = batch.host, self.planner
        assert host is not None
        query_lens = np.diff(host.query_start_loc)
        forest: Forest | str | None = "auto" if shares else None
        if everything:
            shareable = np.where(query_lens > 0, host.seq_lens - query_lens + 1, 0)
            forest = build_forest(host.block_table, shareable, host.block_size)
        _, plan = planner.plan_step(
            forest_for(
                forest,
                host.block_table,
                query_lens,
                host.seq_lens,
                block_size=host.block_size,
                group_size=planner.setup.group_size,
                cost=planner.setup.cost,
            ),
            host.query_start_loc,
            host.seq_lens,
            window_tokens=features.sliding_window or 0,
        )
        planner.hold(plan)
        planner.begin_step(batch.seq_lens if seq_lens is None else seq_lens)

    def attend(self, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """Launches the attention of the step that was planned last."""
        relay_attention(
            inputs.query,
            inputs.kv_cache,
            inputs.batch.block_table,
            self.planner.plan,
            out,
            lse=lse,
            scale=self.geometry.scale,
            sliding_window=inputs.features.sliding_window,
            alibi_slopes=inputs.alibi_slopes,
            logits_soft_cap=inputs.features.soft_cap,
            sinks=inputs.sinks,
            k_scale=inputs.k_scale,
            v_scale=inputs.v_scale,
        )

    def call(self, inputs: Inputs) -> Callable[[], torch.Tensor]:
        """`attend` into an output of its own, which it returns."""
        out = torch.empty_like(inputs.query)

        def run() -> torch.Tensor:
            self.attend(inputs, out)
            return out

        return run

    def new_lse(self, inputs: Inputs) -> torch.Tensor:
        return torch.full(inputs.query.shape[:2], math.nan, device=inputs.query.device)

    def poison(self) -> None:
        """Fills the workspace with NaN: what a step reads it must have written."""
        for tensor in self.planner.plan.workspace:
            tensor.fill_(math.nan)


class KvPool:
    """One piece of memory with random numbers, seen as the KV cache of any geometry."""

    FILL_NUMBERS = 1 << 27

    def __init__(self, num_bytes: int, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.numbers = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(0)
        for first in range(0, len(self.numbers), self.FILL_NUMBERS):
            self.numbers[first : first + self.FILL_NUMBERS].normal_(generator=generator)

    def holds(self, geometry: Geometry, num_blocks: int) -> bool:
        return math.prod(geometry.kv_shape(num_blocks)) <= len(self.numbers)

    def cache(self, geometry: Geometry, num_blocks: int) -> torch.Tensor:
        """A KV cache of the first `num_blocks` blocks; all geometries see the same memory."""
        shape = geometry.kv_shape(num_blocks)
        return self.numbers[: math.prod(shape)].view(shape)
