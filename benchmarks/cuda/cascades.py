# SPDX-License-Identifier: Apache-2.0
"""Cascade attention by others: one prefix that all requests of a batch share is read once.

Each is looked for at run time, and left out with a reason where it is missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.attention.batches import Batch
from benchmarks.cuda.baselines import Call, FlashAttention3, TritonUnified, Unsupported
from benchmarks.cuda.geometry import PLAIN
from benchmarks.cuda.inputs import Inputs
from benchmarks.cuda.stand_ins import load_op


def shared_blocks(batch: Batch) -> int:
    """Whole blocks that all requests begin with, before any of their query tokens, as vLLM has it.

    Raises:
        Unsupported: there are none.
    """
    computed_tokens = int((batch.seq_lens - np.diff(batch.query_start_loc)).min())
    table = batch.block_table[:, : computed_tokens // batch.block_size]
    is_shared = (table == table[0]).all(0)
    blocks = int(is_shared.cumprod().sum())
    if not blocks:
        raise Unsupported("no prefix that all requests share")
    return blocks


class FlashAttention3Cascade:
    """Two calls of FlashAttention 3 and vLLM's merge of attention states, as in vLLM's cascade
    attention before 0.32. It chooses splits itself; both schedules are made beforehand.

    Args:
        merge: vLLM's `merge_attn_states`.
    """

    name = "FA3 cascade"
    MERGE = "triton_merge_attn_states.py"

    def __init__(self, flash: FlashAttention3, merge: Callable[..., None]) -> None:
        self._flash, self._merge = flash, merge

    @classmethod
    def find(cls, fa3: str | None, unified_attention: str | None) -> FlashAttention3Cascade:
        """From a shared object, and the merge from beside vLLM's `unified_attention`; or both from
        an installed vLLM.

        Raises:
            ImportError, OSError: one is missing, or does not load.
        """
        ops = Path(unified_attention or TritonUnified.installed_path()).parent
        return cls(FlashAttention3.find(fa3), load_op(ops / cls.MERGE).merge_attn_states)

    def prepare(self, inputs: Inputs, free_bytes: int = 0) -> Call:
        geometry, batch = inputs.geometry, inputs.batch
        if inputs.features != PLAIN or geometry.is_fp8:
            raise Unsupported("plain attention only")
        assert batch.host is not None
        blocks = shared_blocks(batch.host)
        prefix_tokens = blocks * geometry.block_size
        num_tokens = len(inputs.query)
        key, value = inputs.keys_and_values()
        both = {"q": inputs.query, "k": key, "v": value, "softmax_scale": geometry.scale}

        def int32(*numbers: int) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=inputs.query.device)

        prefix = {
            **both,
            "cu_seqlens_q": int32(0, num_tokens),
            "max_seqlen_q": num_tokens,
            "seqused_k": int32(prefix_tokens),
            "max_seqlen_k": prefix_tokens,
            "block_table": batch.block_table[:1],
            "causal": False,
        }
        own = {
            **both,
            "cu_seqlens_q": batch.query_start_loc,
            "max_seqlen_q": batch.max_query_len,
            "seqused_k": batch.seq_lens - prefix_tokens,
            "max_seqlen_k": batch.max_seq_len - prefix_tokens,
            "block_table": batch.block_table[:, blocks:],
            "causal": True,
        }
        calls = [
            {
                **arguments,
                "out": torch.empty_like(inputs.query),
                "scheduler_metadata": self._flash.schedule(**arguments),
                "return_softmax_lse": True,
            }
            for arguments in (prefix, own)
        ]
        out = torch.empty_like(inputs.query)

        def run() -> torch.Tensor:
            (prefix_out, prefix_lse), (own_out, own_lse) = (
                self._flash.varlen(**call) for call in calls
            )
            self._merge(out, prefix_out, prefix_lse, own_out, own_lse)
            return out

        return run


@dataclass(frozen=True)
class Levels:
    """FlashInfer's tables, int32: first of the prefix, then of what each request has of its own."""

    query_starts: list[torch.Tensor]
    page_starts: list[torch.Tensor]
    pages: list[torch.Tensor]
    last_page_tokens: list[torch.Tensor]

    @classmethod
    def of(cls, batch: Batch) -> Levels:
        """On the host, where FlashInfer plans."""
        blocks = shared_blocks(batch)
        own_tokens = batch.seq_lens - blocks * batch.block_size
        own_blocks = -(-own_tokens // batch.block_size)
        columns = np.arange(batch.block_table.shape[1] - blocks)
        own_pages = batch.block_table[:, blocks:][columns < own_blocks[:, None]]
        tables = (
            ([0, batch.num_query_tokens], batch.query_start_loc),
            ([0, blocks], np.append(0, own_blocks.cumsum())),
            (batch.block_table[0, :blocks], own_pages),
            ([batch.block_size], own_tokens - (own_blocks - 1) * batch.block_size),
        )
        return cls(*([torch.tensor(np.asarray(t, np.int32)) for t in table] for table in tables))


class FlashInferCascade:
    """FlashInfer's `MultiLevelCascadeAttentionWrapper` of two levels, planned beforehand for this
    very batch. It reads the cache where it is, whose halves have equal strides.

    Args:
        backends: of the prefix and of what requests have of their own.
    """

    BACKENDS = (("auto", "auto"), ("fa2", "fa2"), ("fa3", "fa2"))
    """The wrapper takes "auto", which is "fa3" on compute capability 9.0: it does not split, and
    heads of a group do not share their tiles, as with "fa2", which some batches run faster on."""
    WORKSPACE_BYTES = 256 << 20

    def __init__(self, flashinfer: Any, backends: tuple[str, str]) -> None:
        self._flashinfer, self._backends = flashinfer, backends
        self._wrapper: Any = None

    @staticmethod
    def name(backends: tuple[str, str]) -> str:
        return f"FlashInfer cascade, {' and '.join(dict.fromkeys(backends))}"

    @classmethod
    def find(cls, backends: tuple[str, str]) -> FlashInferCascade:
        """Raises ImportError where it is not installed."""
        return cls(importlib.import_module("flashinfer"), backends)

    def prepare(self, inputs: Inputs, free_bytes: int = 0) -> Call:
        """What was prepared before cannot run any more: the wrapper has one plan."""
        geometry, host = inputs.geometry, inputs.batch.host
        if inputs.features != PLAIN or geometry.is_fp8:
            raise Unsupported("plain attention only")
        assert host is not None
        levels = Levels.of(host)
        wrapper = self._wrapper = self._wrapper or self._new_wrapper(inputs.query.device)
        wrapper.plan(
            levels.query_starts, levels.page_starts, levels.pages, levels.last_page_tokens,
            geometry.num_heads, geometry.num_kv_heads, geometry.head_size, geometry.block_size,
            causal=True, sm_scale=geometry.scale, q_data_type=geometry.dtype,
            kv_data_type=geometry.kv_dtype,
        )  # fmt: skip
        caches = inputs.kv_cache.split(geometry.head_size, dim=-1)

        def run() -> torch.Tensor:
            return wrapper.run(inputs.query, caches)

        return run

    def _new_wrapper(self, device: torch.device) -> Any:
        workspace = torch.empty(self.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = self._flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "HND")
        levels = wrapper._batch_prefill_wrappers  # it takes no backends itself
        for level, backend in zip(levels, self._backends, strict=True):
            level._backend = backend
        return wrapper
