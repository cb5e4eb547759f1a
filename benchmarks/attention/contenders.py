# SPDX-License-Identifier: Apache-2.0
"""vLLM's own attention op and relay's, on the same queries, keys and values."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import vllm._custom_ops as vllm_ops
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from benchmarks.attention.batches import BLOCK_SIZE_TOKENS, Batch, shared_prefix
from vllm_relay.attention_backends import ops, reference
from vllm_relay.attention_backends.cpu import kernels as cpu
from vllm_relay.attention_backends.plan import StepPlan, plan_step

current_platform.import_kernels()

_FILL_BLOCKS = 32
_LARGEST_ERROR = 0.02
"""Of the largest output: several times what rounding to bfloat16 can do."""
_LARGEST_FP8_ERROR = 0.4
"""The same of CPU_ATTN over fp8: it rounds keys and values towards zero, relay to the nearest."""


@dataclass(frozen=True)
class Heads:
    """The attention geometry of a model."""

    num_heads: int
    num_kv_heads: int
    head_size: int = 128
    dtype: torch.dtype = torch.bfloat16
    kv_cache_dtype: str = "auto"

    @property
    def is_fp8(self) -> bool:
        return self.kv_cache_dtype == "fp8"

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    def __str__(self) -> str:
        size = "" if self.head_size == 128 else f" x {self.head_size}"
        fp8 = ", fp8" if self.is_fp8 else ""
        return f"{self.num_heads} / {self.num_kv_heads}{size}{fp8}"

    def flops(self, batch: Batch) -> float:
        """Of scores and outputs; what a kernel multiplies beyond that is its own affair."""
        return 4.0 * self.num_heads * self.head_size * batch.attended_pairs()

    def kv_bytes_per_token(self) -> int:
        element_bytes = 1 if self.is_fp8 else self.dtype.itemsize
        return 2 * self.num_kv_heads * self.head_size * element_bytes


class KvCaches:
    """The same random keys and values twice: as vLLM packs them and as relay does."""

    def __init__(
        self,
        heads: Heads,
        num_blocks: int,
        *,
        block_size: int = BLOCK_SIZE_TOKENS,
        key_factor: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.heads, self.block_size = heads, block_size
        shape = (num_blocks, heads.num_kv_heads, block_size, 2 * heads.head_size)
        self.relay = torch.zeros(shape, dtype=cpu.FP8 if heads.is_fp8 else heads.dtype)
        self.isa = _get_attn_isa(heads.dtype, block_size, heads.head_size, heads.kv_cache_dtype)
        stock = torch.zeros(shape, dtype=torch.uint8 if heads.is_fp8 else heads.dtype)
        stock = stock.view(num_blocks, heads.num_kv_heads, 2 * block_size, heads.head_size)
        self.stock_key, self.stock_value = stock.chunk(2, dim=2)
        generator = torch.Generator().manual_seed(seed)
        for first in range(0, num_blocks, _FILL_BLOCKS):
            slots = torch.arange(first, min(first + _FILL_BLOCKS, num_blocks))[:, None] * block_size
            slots = (slots + torch.arange(block_size)).flatten()
            tokens = (len(slots), heads.num_kv_heads, heads.head_size)
            key = (torch.randn(tokens, generator=generator) * key_factor).to(heads.dtype)
            value = torch.randn(tokens, generator=generator).to(heads.dtype)
            ops.write_kv_cache(key, value, self.relay, slots)
            vllm_ops.cpu_attn_reshape_and_cache(
                key, value, self.stock_key, self.stock_value, slots, self.isa,
                kv_cache_dtype=heads.kv_cache_dtype,
            )  # fmt: skip


class Contender:
    """One way to compute a batch; `run` is what a layer does, `plan` what a step does once."""

    def __init__(self, caches: KvCaches, batch: Batch, query: torch.Tensor, threads: int) -> None:
        self.caches, self.batch, self.query, self.threads = caches, batch, query, threads
        self.output = torch.empty_like(query)
        self.block_table = torch.from_numpy(batch.block_table)
        self.query_start_loc = torch.from_numpy(batch.query_start_loc)
        self.seq_lens = torch.from_numpy(batch.seq_lens)


class StockOp(Contender):
    """vLLM's CPU_ATTN, called as its backend calls it."""

    def __init__(self, caches: KvCaches, batch: Batch, query: torch.Tensor, threads: int) -> None:
        super().__init__(caches, batch, query, threads)
        torch.set_num_threads(threads)
        self.metadata = self.plan()

    def plan(self) -> torch.Tensor:
        heads = self.caches.heads
        return vllm_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=self.batch.num_requests,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_size,
            seq_lens=self.seq_lens,
            dtype=heads.dtype,
            query_start_loc=self.query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=self.caches.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=heads.kv_cache_dtype,
        )

    def run(self) -> None:
        vllm_ops.cpu_attention_with_kv_cache(
            query=self.query,
            key_cache=self.caches.stock_key,
            value_cache=self.caches.stock_value,
            output=self.output,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            scale=self.caches.heads.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.block_table,
            softcap=0.0,
            scheduler_metadata=self.metadata,
            s_aux=None,
            kv_cache_dtype=self.caches.heads.kv_cache_dtype,
        )

    def run_with_own_threads(self) -> None:
        torch.set_num_threads(self.threads)
        self.run()


class RelayOp(Contender):
    """relay's op, called as its backend calls it."""

    def __init__(
        self,
        caches: KvCaches,
        batch: Batch,
        query: torch.Tensor,
        threads: int,
        forest: str | None = "auto",
    ) -> None:
        super().__init__(caches, batch, query, threads)
        self.forest = forest
        self.step_plan = self.plan()

    def plan(self) -> StepPlan:
        heads = self.caches.heads
        return plan_step(
            self.batch.block_table,
            self.batch.query_start_loc,
            self.batch.seq_lens,
            block_size=self.batch.block_size,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
            num_threads=self.threads,
            kernel=cpu.kernel_for(heads.dtype),
            forest=self.forest,
            is_fp8=heads.is_fp8,
        )

    def run(self) -> None:
        cpu.relay_attention(
            self.query,
            self.caches.relay,
            self.block_table,
            self.step_plan,
            self.output,
            scale=self.caches.heads.scale,
            num_kv_heads=self.caches.heads.num_kv_heads,
        )


def without_unserved(all_heads: Iterable[Heads]) -> list[Heads]:
    """Those that CPU_ATTN serves here: it has no fp8 without AVX-512."""
    serves_fp8 = torch.cpu._is_avx512_supported()
    return [heads for heads in all_heads if serves_fp8 or not heads.is_fp8]


def random_query(heads: Heads, batch: Batch, seed: int = 1) -> torch.Tensor:
    shape = (batch.num_query_tokens, heads.num_heads, heads.head_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(heads.dtype)


def reference_output(caches: KvCaches, batch: Batch, query: torch.Tensor) -> torch.Tensor:
    """float64 [tokens, heads, head_size], over what relay's cache holds."""
    output, _ = reference.relay_attention(
        query,
        caches.relay.to(caches.heads.dtype),  # has every number of fp8
        torch.from_numpy(batch.block_table),
        torch.from_numpy(batch.query_start_loc),
        torch.from_numpy(batch.seq_lens),
        scale=caches.heads.scale,
        num_kv_heads=caches.heads.num_kv_heads,
        output_dtype=torch.float64,
    )
    return output


def refuse_wrong_results() -> None:
    """No benchmark reports how fast an op is that computes something else.

    Raises:
        SystemExit: relay's op, or the call of vLLM's, does not agree with the float64 reference.
    """
    for heads in without_unserved(
        (Heads(32, 8), Heads(7, 1), Heads(4, 4), Heads(8, 2, kv_cache_dtype="fp8"))
    ):
        batch = shared_prefix(9, 3 * BLOCK_SIZE_TOKENS, 77)
        caches = KvCaches(heads, batch.num_blocks)
        query = random_query(heads, batch)
        expected = reference_output(caches, batch, query)
        contenders = {
            "relay": RelayOp(caches, batch, query, 1),
            "relay without sharing": RelayOp(caches, batch, query, 1, forest=None),
            "CPU_ATTN": StockOp(caches, batch, query, 1),
        }
        for name, contender in contenders.items():
            contender.run()
            error = float((contender.output - expected).abs().max() / expected.abs().max())
            is_coarse = heads.is_fp8 and isinstance(contender, StockOp)
            largest = _LARGEST_FP8_ERROR if is_coarse else _LARGEST_ERROR
            if not error <= largest:
                raise SystemExit(
                    f"{name} is wrong at heads {heads}: its largest error is {error:.3g} of the "
                    f"largest output, at most {largest} was expected. No times are reported."
                )


def kv_bytes(heads: Heads, batch: Batch, *, shared_once: bool) -> int:
    """Bytes of keys and values that one layer has to read."""
    tokens = batch.kv_tokens_unique if shared_once else batch.kv_tokens
    return int(np.int64(tokens) * heads.kv_bytes_per_token())
