# SPDX-License-Identifier: Apache-2.0
"""The RELAY backend on CUDA with vLLM's FlashAttention for everything: vLLM's hooks.

A step is the stock backend's, with the tails of requests in place of their tokens; what requests
share is added by `NodeBuffers.attend`. Where nothing is shared and no CUDA graph expects it, a step
is the stock backend's altogether.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn

from vllm_relay.attention_backends.cuda.flash.attention import NodeBuffers, NodeShapes
from vllm_relay.attention_backends.cuda.flash.node_plans import NodePlans
from vllm_relay.attention_backends.cuda.flash.nodes import (
    MAX_ENTRIES,
    MAX_STATES,
    NODE_SPLITS,
    NodeLimits,
)
from vllm_relay.attention_backends.cuda.launch import num_multiprocessors
from vllm_relay.attention_backends.cuda.step_batch import StepBatch, follow_blocks
from vllm_relay.attention_backends.forest import Forest
from vllm_relay.attention_backends.relay_base import check_output, typed
from vllm_relay.attention_backends.step_stats import tell_metrics
from vllm_relay.config import RelayConfig
from vllm_relay.limits import BACKEND_NAME

logger = init_logger("vllm.relay")


class RelayNodesBackend(flash_attn.FlashAttentionBackend):
    """RELAY on CUDA, beside FlashAttention."""

    @staticmethod
    def get_name() -> str:
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[RelayNodesImpl]:
        return RelayNodesImpl

    @staticmethod
    def get_builder_cls() -> type[RelayNodesMetadataBuilder]:
        return RelayNodesMetadataBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False


@dataclass(kw_only=True)
class RelayNodesMetadata(flash_attn.FlashAttentionMetadata):
    """A step with nodes: the stock backend's metadata of the tails, and the nodes."""

    buffers: NodeBuffers
    shapes: NodeShapes
    node_schedule: torch.Tensor | None
    """FlashAttention 3's, of the nodes; None where each layer makes its own."""


class RelayNodesMetadataBuilder(flash_attn.FlashAttentionMetadataBuilder):
    """Plans each step once for all layers of a KV cache group, on the host."""

    supports_update_block_table = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = RelayConfig.from_vllm_config(self.vllm_config)
        self.worker_blocks = follow_blocks(self.vllm_config)
        tell_metrics()
        if self.shares:
            self._warm_up()

    @functools.cached_property
    def impls(self) -> list[Any]:
        """Of all layers."""
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase, self.layer_names)
        return [layer.impl for layer in layers.values()]

    @functools.cached_property
    def shares(self) -> bool:
        """Whether nodes are read together: layers of this group see all tokens before them, and
        FlashAttention takes blocks of any number."""
        # builders that vLLM derives from this one cut requests into others first
        if type(self).build is not RelayNodesMetadataBuilder.build:
            return False
        sees_all = all(
            impl.sliding_window == (-1, -1) and impl.alibi_slopes is None and not impl.fa4_hd256
            for impl in self.impls
        )
        return self.options.sharing and self.dcp_world_size == 1 and sees_all

    @property
    def decode_query_len(self) -> int:
        """Query tokens of a decode, at most, with the drafts that it verifies."""
        return 1 + self.vllm_config.num_speculative_tokens

    @functools.cached_property
    def plans(self) -> NodePlans:
        return NodePlans(
            self.buffers,
            layer_name=self.layer_names[0],
            group_size=self.num_heads_q // self.num_heads_kv,
            num_kv_heads=self.num_heads_kv,
            num_sms=num_multiprocessors(self.device),
            max_query_len=self.decode_query_len,
            min_shared_tokens=self.options.min_shared_tokens,
            token_bytes=self.kv_cache_spec.unpadded_page_size_bytes // self.block_size,
        )

    def _warm_up(self) -> None:
        """Compiles the kernels: the first step that shares something is a request's."""
        buffers = NodeBuffers(
            NodeLimits(1, 1, 1, MAX_ENTRIES, MAX_STATES),
            block_size=self.block_size,
            max_blocks=1,
            device=self.device,
        )
        in_fp8 = self.cache_config.cache_dtype.startswith("fp8")
        kinds = {
            (impl.sinks is not None, in_fp8 and impl.supports_quant_query_input)
            for impl in self.impls
        }
        for has_sinks, asks_in_fp8 in kinds:
            buffers.warm_up(
                self.num_heads_q,
                self.headdim,
                dtype=self.model_config.dtype,
                query_dtype=torch.float8_e4m3fn if asks_in_fp8 else self.model_config.dtype,
                has_sinks=has_sinks,
            )

    @functools.cached_property
    def buffers(self) -> NodeBuffers:
        """Made for the first step, which comes before any CUDA graph is captured."""
        scheduler_config = self.vllm_config.scheduler_config
        captured = self.max_cudagraph_size or 0
        max_tokens = max(scheduler_config.max_num_batched_tokens, captured)
        max_requests = max(scheduler_config.max_num_seqs, captured)
        buffers = NodeBuffers(
            NodeLimits(
                max_requests=max_requests,
                max_tokens=max_tokens,
                max_sharing_tokens=max_requests * self.decode_query_len,
                max_entries=MAX_ENTRIES,
                max_states=MAX_STATES,
            ),
            block_size=self.block_size,
            max_blocks=-(-self.model_config.max_model_len // self.block_size),
            device=self.device,
        )
        logger.info_once(
            "vllm-relay: FlashAttention over shared prefixes, %d query heads on %d KV heads of "
            "size %d, KV blocks of %d tokens, options: %s",
            self.num_heads_q,
            self.num_heads_kv,
            self.headdim,
            self.block_size,
            self.options.without_texts(),
        )
        return buffers

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        *args: Any,
        **kwargs: Any,
    ) -> flash_attn.FlashAttentionMetadata:
        common = common_attn_metadata
        if self.worker_blocks.is_drafting:
            return self.build_for_drafting(common, 0)
        shapes = self._plan(common) if self.shares and common.causal is True else None
        if shapes is None:
            return super().build(0, common, *args, **kwargs)
        buffers, num_requests = self.buffers, common.num_reqs
        buffers.write_tables(
            common.block_table_tensor[:num_requests], common.seq_lens, shapes.num_entries
        )
        tails = common.replace(
            block_table_tensor=buffers.tail_table[:num_requests],
            seq_lens=buffers.tail_lens[:num_requests],
        )
        stock = super().build(0, tails, *args, **kwargs)
        is_scheduled = stock.scheduler_metadata is not None
        return RelayNodesMetadata(
            **vars(stock),
            buffers=buffers,
            shapes=shapes,
            node_schedule=self._node_schedule(shapes) if is_scheduled else None,
        )

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> flash_attn.FlashAttentionMetadata:
        """The stock backend's: graphs of several drafts are replayed without asking the host, which
        is how they know nothing of nodes. Each layer schedules, as lengths differ by draft."""
        return super().build(0, common_attn_metadata, fast_build=True)

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

    def _plan(self, common: CommonAttentionMetadata) -> NodeShapes | None:
        """Uploads the nodes of a step, if they are not there yet; None where there are none and no
        graph expects them."""
        started_s = time.perf_counter()
        batch = StepBatch.of(self.worker_blocks, common, common.num_reqs)
        forest, shapes = Forest.none(common.num_reqs), None
        if common.num_reqs > 1:
            planned = self.plans.plan(batch, common.num_actual_tokens)
            if self._may_be_captured(common):
                forest = planned.forest
                shapes = NodeShapes.captured(
                    self.buffers.limits, common.num_actual_tokens, self.model_config.max_model_len
                )
            elif planned.pays:
                forest, shapes = planned.forest, planned.shapes
        batch.record(forest, started_s, self.options)
        return shapes

    def _may_be_captured(self, common: CommonAttentionMetadata) -> bool:
        """Whether a step may be in a CUDA graph, attention included."""
        # vLLM may have chosen another mode since this builder was made
        has_decodes_alone = self.compilation_config.cudagraph_mode.separate_routine()
        return (
            self.use_full_cuda_graph
            and common.num_actual_tokens <= (self.max_cudagraph_size or 0)
            and (common.max_query_len <= self.decode_query_len or not has_decodes_alone)
        )


class RelayNodesImpl(flash_attn.FlashAttentionImpl):
    """Attention of one layer."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: flash_attn.FlashAttentionMetadata | None,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write the attention of ``query`` over ``kv_cache`` into ``output``; shapes are those of
        the stock backend."""
        metadata = attn_metadata
        if not isinstance(metadata, RelayNodesMetadata):
            return super().forward(
                layer, query, key, value, kv_cache, metadata, output, *args, **kwargs
            )
        check_output(*args, *kwargs.values())
        num_tokens = metadata.num_actual_tokens
        key_cache, value_cache = (
            canonicalize_singleton_dim_strides(cache)
            for cache in typed(kv_cache).transpose(1, 2).split(self.head_size, dim=-1)
        )
        metadata.buffers.attend(
            flash_attn.flash_attn_varlen_func,
            query[:num_tokens],
            key_cache,
            value_cache,
            output[:num_tokens],
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
        return output

    def _descales(self, layer: Any, batch_size: int) -> dict[str, torch.Tensor | None]:
        shape = (batch_size, self.num_kv_heads)
        return {
            "q_descale": layer._q_scale.expand(shape) if self.supports_quant_query_input else None,
            "k_descale": layer._k_scale.expand(shape),
            "v_descale": layer._v_scale.expand(shape),
        }
