# SPDX-License-Identifier: Apache-2.0
"""Attention that shares nothing, by others, on the same inputs: the rivals.

Each is looked for at run time, and left out with a reason where it is missing.
"""

import importlib
import importlib.util
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.cuda.inputs import Inputs
from benchmarks.cuda.stand_ins import load_op

Call = Callable[[], torch.Tensor]


class Unsupported(Exception):
    """A rival cannot compute these inputs; the message says why."""


class Sdpa:
    """torch's scaled_dot_product_attention over keys and values that were gathered beforehand into
    contiguous tensors, which no paged cache is; only where that fits in memory."""

    name = "SDPA, contiguous"
    MAX_BYTES = 6 << 30
    MAX_CALLS = 64
    """Requests of different lengths take a call each."""

    def prepare(self, inputs: Inputs, free_bytes: int) -> Call:
        batch, geometry = inputs.batch.host, inputs.geometry
        assert batch is not None
        if inputs.features.soft_cap or inputs.features.sinks:
            raise Unsupported("no soft cap and no sinks")
        query_lens, seq_lens = np.diff(batch.query_start_loc), batch.seq_lens
        kv_bytes = batch.kv_tokens * 2 * geometry.num_kv_heads * geometry.head_size
        if kv_bytes * geometry.dtype.itemsize > min(self.MAX_BYTES, free_bytes // 4):
            raise Unsupported("gathered keys and values would not fit in memory")
        out = torch.empty_like(inputs.query)
        groups = [[request] for request in range(batch.num_requests)]
        if len(np.unique(query_lens)) == 1 and len(np.unique(seq_lens)) == 1:
            groups = [list(range(batch.num_requests))]
        if len(groups) > self.MAX_CALLS:
            raise Unsupported(f"more than {self.MAX_CALLS} requests of different lengths")
        parts = [self._part(inputs, out, requests) for requests in groups]

        def run() -> torch.Tensor:
            for target, arguments in parts:
                target.copy_(F.scaled_dot_product_attention(enable_gqa=True, **arguments))
            return out

        return run

    def _part(
        self, inputs: Inputs, out: torch.Tensor, requests: list[int]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Of requests of equal lengths: where their output goes, [requests, num_heads, query
        tokens, head_size], and the arguments that compute it."""
        batch, geometry = inputs.batch.host, inputs.geometry
        assert batch is not None
        first, last = batch.query_start_loc[requests[0]], batch.query_start_loc[requests[-1] + 1]
        query_len = int(last - first) // len(requests)
        seq_len = int(batch.seq_lens[requests[0]])

        def of_requests(tokens: torch.Tensor) -> torch.Tensor:
            return tokens[first:last].unflatten(0, (len(requests), query_len)).transpose(1, 2)

        num_blocks = -(-seq_len // geometry.block_size)
        blocks = inputs.batch.block_table[requests, :num_blocks].long()
        kv = inputs.blocks(blocks).transpose(2, 3).flatten(1, 2)[:, :seq_len].transpose(1, 2)
        key, value = kv.split(geometry.head_size, dim=-1)
        if geometry.is_fp8:
            key, value = key.float() * inputs.k_scale, value.float() * inputs.v_scale
        arguments = {
            "query": of_requests(inputs.query).contiguous(),
            "key": key.to(geometry.dtype).contiguous(),
            "value": value.to(geometry.dtype).contiguous(),
            "scale": geometry.scale,
        }
        window = inputs.features.sliding_window
        if query_len > 1 or window or inputs.features.alibi:
            arguments["attn_mask"] = self._mask(inputs, query_len, seq_len)
        return of_requests(out), arguments

    def _mask(self, inputs: Inputs, query_len: int, seq_len: int) -> torch.Tensor:
        """What is added to scores, [num_heads, query tokens, seq_len]."""
        device = inputs.query.device
        position = torch.arange(seq_len, device=device)
        distance = (position - position[seq_len - query_len :, None])[None]
        bias = torch.zeros(inputs.geometry.num_heads, query_len, seq_len, device=device)
        if inputs.alibi_slopes is not None:
            bias += inputs.alibi_slopes[:, None, None] * distance
        bias.masked_fill_(distance > 0, -torch.inf)
        if inputs.features.sliding_window:
            bias.masked_fill_(distance <= -inputs.features.sliding_window, -torch.inf)
        return bias.to(inputs.geometry.dtype)


class TritonUnified:
    """vLLM's `unified_attention` on the paged cache, with as many segments as vLLM would take."""

    name = "vLLM Triton"
    MIN_PROGRAMS_2D = 128
    SEGMENTS = 16

    def __init__(self, module: types.ModuleType) -> None:
        self._attention = module.unified_attention

    @classmethod
    def find(cls, path: str | None) -> "TritonUnified":
        """From a file, or from an installed vLLM.

        Raises:
            ImportError: there is none, or it cannot be loaded alone.
        """
        return cls(load_op(Path(path or cls.installed_path())))

    @staticmethod
    def installed_path() -> str:
        """Raises ImportError where vLLM is not installed."""
        return str(_vllm_folder() / "v1" / "attention" / "ops" / "triton_unified_attention.py")

    def prepare(self, inputs: Inputs, free_bytes: int = 0) -> Call:
        geometry, features, batch = inputs.geometry, inputs.features, inputs.batch
        key, value = inputs.keys_and_values()
        out = torch.empty_like(inputs.query)
        most = self.MIN_PROGRAMS_2D // geometry.num_kv_heads
        padded_head = 1 << (geometry.head_size - 1).bit_length()
        segments = (max(most, 1), geometry.num_heads, self.SEGMENTS)
        scratch = [
            torch.empty(shape, dtype=torch.float32, device=out.device)
            for shape in ((*segments, padded_head), segments, segments)
        ]
        scales = (batch.num_requests, geometry.num_kv_heads)
        window = (features.sliding_window - 1, 0) if features.sliding_window else (-1, -1)

        def run() -> torch.Tensor:
            self._attention(
                q=inputs.query,
                k=key,
                v=value,
                out=out,
                cu_seqlens_q=batch.query_start_loc,
                max_seqlen_q=batch.max_query_len,
                seqused_k=batch.seq_lens,
                max_seqlen_k=batch.max_seq_len,
                softmax_scale=geometry.scale,
                causal=True,
                window_size=window,
                block_table=batch.block_table,
                softcap=features.soft_cap or 0.0,
                q_descale=None,
                k_descale=inputs.k_scale.expand(scales),
                v_descale=inputs.v_scale.expand(scales),
                seq_threshold_3D=most,
                num_par_softmax_segments=self.SEGMENTS,
                softmax_segm_output=scratch[0],
                softmax_segm_max=scratch[1],
                softmax_segm_expsum=scratch[2],
                alibi_slopes=inputs.alibi_slopes,
                sinks=inputs.sinks,
                **({"kv_quant_mode": 1} if geometry.is_fp8 else {}),
            )
            return out

        return run

    def all_ways(self, inputs: Inputs) -> Iterator[Call]:
        """Calls that compile every kernel that inputs like these may need: for few requests and for
        many, for numbers that are multiples of 16 and for others."""
        most = self.MIN_PROGRAMS_2D // inputs.geometry.num_kv_heads
        batch = inputs.batch
        for requests in {1, min(most, 3), most // 16 * 16, batch.num_requests - 1, 16 * 9}:
            if not 0 < requests <= batch.num_requests:
                continue
            few = replace(
                batch,
                block_table=batch.block_table[:requests],
                query_start_loc=batch.query_start_loc[: requests + 1],
                seq_lens=batch.seq_lens[:requests],
            )
            yield self.prepare(replace(inputs, batch=few))


class FlashAttention3:
    """FlashAttention 3 as vLLM ships it, on the paged cache, with its own choice of splits. Its
    schedule is made beforehand, once, as vLLM makes it once for all layers."""

    name = "FlashAttention 3"
    SHARED_OBJECT = "_vllm_fa3_C.abi3.so"

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    @classmethod
    def find(cls, path: str | None) -> "FlashAttention3":
        """From a shared object, or from an installed vLLM.

        Raises:
            ImportError, OSError: there is none, or it does not load.
        """
        if not torch.cuda.is_available():
            raise ImportError("there is no GPU")
        if torch.cuda.get_device_capability()[0] != 9:
            raise ImportError("needs a GPU of compute capability 9.x")
        torch.ops.load_library(path or str(_vllm_folder() / "vllm_flash_attn" / cls.SHARED_OBJECT))
        if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
            raise ImportError("the library registers no _vllm_fa3_C.fwd")
        return cls(torch.ops._vllm_fa3_C)

    def prepare(self, inputs: Inputs, free_bytes: int = 0) -> Call:
        geometry, features, batch = inputs.geometry, inputs.features, inputs.batch
        if geometry.dtype not in (torch.bfloat16, torch.float16):
            raise Unsupported("bfloat16 and float16 only")
        if geometry.is_fp8:
            raise Unsupported("an fp8 cache needs fp8 queries")
        if features.alibi:
            raise Unsupported("no ALiBi")
        key, value = inputs.keys_and_values()
        out = torch.empty_like(inputs.query)
        arguments = {
            "q": inputs.query,
            "k": key,
            "v": value,
            "out": out,
            "softmax_scale": geometry.scale,
            "cu_seqlens_q": batch.query_start_loc,
            "max_seqlen_q": batch.max_query_len,
            "seqused_k": batch.seq_lens,
            "max_seqlen_k": batch.max_seq_len,
            "block_table": batch.block_table,
            "causal": True,
            "softcap": features.soft_cap or 0.0,
            "window_tokens": features.sliding_window or 0,
            "s_aux": None if inputs.sinks is None else inputs.sinks.to(torch.bfloat16),
        }
        schedule = self.schedule(**arguments)

        def run() -> torch.Tensor:
            self.varlen(**arguments, scheduler_metadata=schedule)
            return out

        return run

    def schedule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        seqused_k: torch.Tensor,
        max_seqlen_k: int,
        causal: bool,
        softcap: float = 0.0,
        window_tokens: int = 0,
        **others: Any,
    ) -> Any:
        """Of a call of `varlen`."""
        left, right = (window_tokens - 1, 0) if window_tokens else (-1, -1)
        (_, num_heads, head_size), (_, block_size, num_kv_heads, _) = q.shape, k.shape
        return self._called(
            "get_scheduler_metadata",
            [
                len(seqused_k), max_seqlen_q, max_seqlen_k, num_heads, num_kv_heads, head_size,
                head_size, q.dtype, seqused_k, cu_seqlens_q, None, None, None, None, block_size, 0,
                causal, left, right, softcap > 0, 0, None, 0,
            ],
        )  # fmt: skip

    def varlen(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        seqused_k: torch.Tensor,
        max_seqlen_k: int,
        block_table: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        out: torch.Tensor | None = None,
        softcap: float = 0.0,
        window_tokens: int = 0,
        scheduler_metadata: torch.Tensor | None = None,
        s_aux: torch.Tensor | None = None,
        return_softmax_lse: bool = False,
        num_splits: int = 0,
        left_sms: int = 0,
    ) -> Any:
        """As vLLM's `flash_attn_varlen_func`, which is in a package that imports all of vLLM.

        Args:
            left_sms: multiprocessors that are left to others.
        """
        left, right = (window_tokens - 1, 0) if window_tokens else (-1, -1)
        found = self._called(
            "fwd",
            [
                q, k, v, None, None, None, out, cu_seqlens_q, None, None, None, seqused_k,
                max_seqlen_q, max_seqlen_k, block_table, None, None, None, None, None, None, None,
                None, softmax_scale, causal, left, right, softcap, True, scheduler_metadata,
                num_splits, None, left_sms, s_aux, 1, 0, None,
            ],
        )  # fmt: skip
        return (found[0], found[1]) if return_softmax_lse else found[0]

    def _called(self, name: str, arguments: list[Any]) -> Any:
        """Versions differ in how many arguments they take at the end."""
        op = getattr(self._ops, name).default
        return op(*arguments[: len(op._schema.arguments)])


class UpstreamFlashAttention3:
    """FlashAttention 3 from its own package, on the paged cache."""

    name = "FlashAttention 3 (own package)"

    def __init__(self, attention: Any) -> None:
        self._attention = attention

    @classmethod
    def find(cls, path: str | None) -> "UpstreamFlashAttention3":
        """Raises ImportError where it is not installed."""
        return cls(importlib.import_module("flash_attn_interface").flash_attn_with_kvcache)

    def prepare(self, inputs: Inputs, free_bytes: int = 0) -> Call:
        geometry, features, batch = inputs.geometry, inputs.features, inputs.batch
        if geometry.dtype not in (torch.bfloat16, torch.float16) or geometry.is_fp8:
            raise Unsupported("bfloat16 and float16 only")
        if features.alibi or features.sinks:
            raise Unsupported("no ALiBi and no sinks")
        key, value = inputs.keys_and_values()
        window = features.sliding_window

        def run() -> torch.Tensor:
            return self._attention(
                inputs.query,
                key,
                value,
                cache_seqlens=batch.seq_lens,
                page_table=batch.block_table,
                cu_seqlens_q=batch.query_start_loc,
                max_seqlen_q=batch.max_query_len,
                softmax_scale=geometry.scale,
                causal=True,
                window_size=(window - 1, 0) if window else (-1, -1),
                softcap=features.soft_cap or 0.0,
            )

        return run


def _vllm_folder() -> Path:
    """Of an installed vLLM, which is not imported for it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("no path was given, and vLLM is not installed")
    return Path(spec.submodule_search_locations[0])
