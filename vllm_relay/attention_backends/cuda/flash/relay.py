# SPDX-License-Identifier: Apache-2.0
"""The RELAY backend on CUDA with vLLM's FlashAttention for everything: vLLM's hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backends import flash_attn

from vllm_relay.attention_backends.cuda.flash.attention import NodeShapes
from vllm_relay.attention_backends.cuda.flash.hooks import (
    NodesImpl,
    NodesMetadata,
    NodesMetadataBuilder,
)
from vllm_relay.attention_backends.cuda.flash.nodes import NODE_SPLITS
from vllm_relay.attention_backends.relay_base import NamedBackend, QueryKeyValue


@dataclass(kw_only=True)
class RelayNodesMetadata(NodesMetadata, flash_attn.FlashAttentionMetadata):
    """The stock backend's metadata of the tails, and the nodes."""

    node_schedule: torch.Tensor | None
    """FlashAttention 3's, of the nodes; None where each layer makes its own."""


class RelayNodesMetadataBuilder(NodesMetadataBuilder, flash_attn.FlashAttentionMetadataBuilder):
    """FlashAttention's, with nodes."""

    kernels = "FlashAttention"

    def serves_nodes(self, impl: Any) -> bool:
        # FlashAttention 4's own kernel for heads of size 256 takes blocks of one size
        has_mask = impl.sliding_window != (-1, -1) or impl.alibi_slopes is not None
        return not has_mask and not impl.fa4_hd256

    def with_nodes(
        self, tails: flash_attn.FlashAttentionMetadata, shapes: NodeShapes
    ) -> RelayNodesMetadata:
        is_scheduled = tails.scheduler_metadata is not None
        return RelayNodesMetadata(
            **vars(tails),
            buffers=self.buffers,
            shapes=shapes,
            node_schedule=self._node_schedule(shapes) if is_scheduled else None,
        )

    def _node_schedule(self, shapes: NodeShapes) -> torch.Tensor:
        """As the stock builder makes that of the tails; graphs read it from a buffer that stays."""
        entries, buffers = shapes.num_entries, self.buffers
        made = self._get_scheduler_metadata(
            aot_schedule=True,
            batch_size=entries,
            cu_query_lens=buffers.row_starts[: entries + 1],
            max_query_len=shapes.max_rows,
            seqlens=buffers.entry_lens[:entries],
            max_seq_len=shapes.max_tokens,
            causal=False,
            max_num_splits=NODE_SPLITS,
        )
        if not self.use_full_cuda_graph:
            return made
        buffers.schedule.zero_()[: len(made)] = made
        return buffers.schedule[: len(made)]


class RelayNodesImpl(NodesImpl, flash_attn.FlashAttentionImpl):
    """Attention of one layer."""

    def attend(
        self,
        layer: Any,
        given: QueryKeyValue,
        kv_cache: torch.Tensor,
        metadata: RelayNodesMetadata,
        out: torch.Tensor,
    ) -> None:
        num_tokens = metadata.num_actual_tokens
        key_cache, value_cache = (
            canonicalize_singleton_dim_strides(cache)
            for cache in kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        )
        metadata.buffers.attend(
            flash_attn.flash_attn_varlen_func,
            given[0][:num_tokens],
            key_cache,
            value_cache,
            out[:num_tokens],
            metadata.shapes,
            query_start_loc=metadata.query_start_loc,
            tails={
                "max_seqlen_q": metadata.max_query_len,
                "max_seqlen_k": metadata.max_seq_len,
                "scheduler_metadata": metadata.scheduler_metadata,
                "num_splits": metadata.max_num_splits,
                **self._descales(layer, len(metadata.seq_lens)),
            },
            nodes={
                "scheduler_metadata": metadata.node_schedule,
                **self._descales(layer, metadata.shapes.num_entries),
            },
            sinks=self.sinks,
            softmax_scale=self.scale,
            softcap=self.logits_soft_cap,
            fa_version=self.vllm_flash_attn_version,
        )

    def _descales(self, layer: Any, batch_size: int) -> dict[str, torch.Tensor | None]:
        shape = (batch_size, self.num_kv_heads)
        return {
            "q_descale": layer._q_scale.expand(shape) if self.supports_quant_query_input else None,
            "k_descale": layer._k_scale.expand(shape),
            "v_descale": layer._v_scale.expand(shape),
        }


class RelayNodesBackend(NamedBackend, flash_attn.FlashAttentionBackend):
    """RELAY on CUDA, beside FlashAttention."""

    impl_cls = RelayNodesImpl
    builder_cls = RelayNodesMetadataBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False
