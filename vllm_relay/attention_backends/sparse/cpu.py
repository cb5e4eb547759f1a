# SPDX-License-Identifier: Apache-2.0
"""The RELAY_SPARSE attention backend: vLLM's hooks. Long contexts live in `long_context`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionLayer
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_relay.attention_backends.cpu import kernels as cpu
from vllm_relay.attention_backends.cpu.relay import (
    RelayBackend,
    RelayImpl,
    RelayMetadata,
    RelayMetadataBuilder,
)
from vllm_relay.attention_backends.hidden_tokens import HiddenTokens
from vllm_relay.attention_backends.reference import unpack_tokens
from vllm_relay.attention_backends.relay_base import QueryKeyValue
from vllm_relay.attention_backends.sparse import common
from vllm_relay.config import RelayConfig
from vllm_relay.limits import SPARSE_BACKEND_NAME
from vllm_relay.long_context.host.host_attention import HostPart
from vllm_relay.long_context.host.host_sequence import HostLayer
from vllm_relay.long_context.host.worker import MirroredRow

COPIED_TOKENS = 2048
"""Of blocks that others have computed, so many are unpacked at once, to bound the memory."""


@dataclass
class RelaySparseMetadata(RelayMetadata):
    """One step of one KV cache group; `mirrored` are its long requests."""

    mirrored: list[MirroredRow] = field(default_factory=list)


class RelaySparseMetadataBuilder(RelayMetadataBuilder):
    """Plans what is on the device; the rows of long requests name only the blocks they hold."""

    def __init__(self, kv_cache_spec: AttentionSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.long_contexts = common.set_up_group(self.vllm_config, kv_cache_spec, self.layer_names)

    def _plan(
        self,
        num_tokens: int,
        block_table: torch.Tensor,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        hidden: HiddenTokens | None = None,
    ) -> RelayMetadata:
        assert hidden is None, "requests with modules have been refused"
        rows = common.mirrored_rows(
            self.long_contexts, block_table.numpy(), query_start_loc, seq_lens
        )
        if any(row.residency.num_host_tokens for row in rows.values()):
            block_table, seq_lens = block_table.clone(), seq_lens.copy()
            for number, row in rows.items():
                # moves the blocks of the window to those of the sinks
                sink_end, window_begin = (each // self.block_size for each in row.residency)
                if window_begin > sink_end:
                    blocks = block_table[number].numpy()
                    kept = blocks[window_begin:].copy()
                    blocks[sink_end : sink_end + len(kept)] = kept
                seq_lens[number] -= row.residency.num_host_tokens
        dense = super()._plan(num_tokens, block_table, query_start_loc, seq_lens)
        return RelaySparseMetadata(
            dense.num_tokens, dense.block_table, dense.plan, list(rows.values())
        )


class RelaySparseImpl(RelayImpl):
    """Attention of one layer: the device's part by RELAY, the host's part beside it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.retrieval = common.set_up_layer(self)
        self.kernel_choice = RelayConfig.from_vllm_config(get_current_vllm_config()).kernel

    def _attend(
        self,
        layer: AttentionLayer,
        given: QueryKeyValue,
        kv_cache: torch.Tensor,
        attn_metadata: RelayMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        rows: list[MirroredRow] = getattr(attn_metadata, "mirrored", [])
        if not rows:
            return super()._attend(layer, given, kv_cache, attn_metadata, output, lse)
        query, key, value = given
        name = self.kv_sharing_target_layer_name or layer.layer_name
        lse = query.new_empty(attn_metadata.num_tokens, self.num_heads, dtype=torch.float32)
        parts = [common.host_part(row, name, key) for row in rows]
        if self.kv_sharing_target_layer_name is None:
            size = kv_cache.shape[2]

            def write(keys: torch.Tensor, values: torch.Tensor, block: Any) -> None:
                slots = int(block) * size + torch.arange(len(keys))
                cpu.write_kv_cache(keys, values, kv_cache, slots)

            common.fill_first_blocks(rows, parts, size, write)
            for row, part in zip(rows, parts, strict=True):
                at = slice(row.first_query, row.last_query)
                _mirror(row, part.own, key[at], value[at], kv_cache)
                if row.request.trains_indexes:
                    grouped = query[at].unflatten(1, (self.num_kv_heads, -1)).permute(1, 2, 0, 3)
                    part.own.train_queries.add(grouped, first_position=row.num_computed_tokens)
        begin_s = time.perf_counter()
        super()._attend(layer, given, kv_cache, attn_metadata, output, lse)
        device_done_s = time.perf_counter()
        self._add_host_attention(rows, parts, query, output, lse)
        long_contexts = rows[0].worker
        long_contexts.device_seconds += device_done_s - begin_s
        long_contexts.host_seconds += time.perf_counter() - device_done_s

    def _add_host_attention(
        self,
        rows: list[MirroredRow],
        parts: list[HostPart],
        query: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Adds what the host has to the output of what the device has: generated tokens merge it,
        those of prompts are attended anew over the host's copy of all tokens."""
        reads = [
            (row, part, slice(row.first_query, row.last_query))
            for row, part in zip(rows, parts, strict=True)
            if row.residency.num_host_tokens
        ]
        common.attend_on_host(
            reads, self.retrieval, query, output, lse, with_device=True, kernel=self.kernel_choice
        )


def _mirror(
    row: MirroredRow,
    host: HostLayer,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
) -> None:
    """Copies the step's keys and values to the host, and those before that are not there yet: of
    blocks that other requests have computed, and of a request that was short so far."""
    while host.end < row.num_computed_tokens:
        size = kv_cache.shape[2]
        first = host.end // size
        end = min(row.num_computed_tokens, (first + max(1, COPIED_TOKENS // size)) * size)
        blocks = torch.from_numpy(row.blocks[first : -(-end // size)].astype(np.int64))
        at = slice(host.end - first * size, end - first * size)
        keys, values = (part[at] for part in unpack_tokens(kv_cache[blocks]))
        host.write(host.end, keys, values, is_copied=True)
    host.write(row.num_computed_tokens, key, value)


class RelaySparseBackend(RelayBackend):
    """RELAY, and a window on the device for long contexts."""

    name = SPARSE_BACKEND_NAME
    impl_cls = RelaySparseImpl
    builder_cls = RelaySparseMetadataBuilder
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return common.with_window(spec, "exact_offload")
