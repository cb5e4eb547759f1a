# SPDX-License-Identifier: Apache-2.0
"""vLLM's hooks that RELAY beside FlashAttention and RELAY beside FlashInfer have in common.

A step is the stock backend's, with the tails of requests in place of their tokens; what requests
share is added by `NodeBuffers`. Where nothing is shared and no CUDA graph expects it, a step is the
stock backend's altogether.
"""

from __future__ import annotations

import functools
import time
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from vllm_relay.attention_backends.cuda.flash.attention import NodeBuffers, NodeShapes
from vllm_relay.attention_backends.cuda.flash.node_plans import NodePlans
from vllm_relay.attention_backends.cuda.flash.nodes import NodeLimits, NodeSetup
from vllm_relay.attention_backends.cuda.launch import num_multiprocessors
from vllm_relay.attention_backends.cuda.step_batch import StepBatch, follow_blocks
from vllm_relay.attention_backends.forest import Forest
from vllm_relay.attention_backends.relay_base import QueryKeyValue, check_output, typed
from vllm_relay.attention_backends.step_stats import tell_metrics
from vllm_relay.config import RelayConfig

logger = init_logger("vllm.relay")


@dataclass(kw_only=True)
class NodesMetadata:
    """Of a step with nodes, beside the stock backend's metadata of the tails."""

    buffers: NodeBuffers
    shapes: NodeShapes


class NodesMetadataBuilder(AttentionMetadataBuilder[Any]):
    """Plans each step once for all layers of a KV cache group, on the host. The stock builder
    stands behind it among the bases of a class.

    Attributes:
        kernels: whose they are, for the log.
        buffer_options: of `NodeBuffers`: what kernels return, and whether they run beside others.
    """

    supports_update_block_table = False
    kernels: ClassVar[str]
    buffer_options: ClassVar[dict[str, bool]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = RelayConfig.from_vllm_config(self.vllm_config)
        self.worker_blocks = follow_blocks(self.vllm_config)
        tell_metrics()
        if self.shares:
            self._warm_up()

    @abstractmethod
    def serves_nodes(self, impl: Any) -> bool:
        """Whether a layer sees all tokens before it, and its kernels can read nodes."""

    @abstractmethod
    def with_nodes(self, tails: Any, shapes: NodeShapes) -> Any:
        """A step's metadata.

        Args:
            tails: the stock builder's, of the tails.
            shapes: of the nodes that `buffers` holds.
        """

    def num_sharing(self, common: CommonAttentionMetadata) -> int:
        """How many requests may share something: the first ones of a step."""
        return common.num_reqs

    @functools.cached_property
    def impls(self) -> list[Any]:
        """Of all layers."""
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase, self.layer_names)
        return [layer.impl for layer in layers.values()]

    @functools.cached_property
    def shares(self) -> bool:
        """Whether nodes are read together."""
        # builders that vLLM derives from this one cut requests into others first
        if type(self).build is not NodesMetadataBuilder.build:
            return False
        return (
            self.options.sharing
            and self.dcp_world_size == 1
            and all(map(self.serves_nodes, self.impls))
        )

    @property
    def decode_query_len(self) -> int:
        """Query tokens of a decode, at most, with the drafts that it verifies."""
        return 1 + self.vllm_config.num_speculative_tokens

    @property
    def max_captured_tokens(self) -> int:
        """Query tokens of a step that may be in a CUDA graph."""
        return self.vllm_config.compilation_config.max_cudagraph_capture_size or 0

    @functools.cached_property
    def plans(self) -> NodePlans:
        spec = self.kv_cache_spec
        return NodePlans(
            self.buffers,
            layer_name=self.layer_names[0],
            max_query_len=self.decode_query_len,
            min_shared_tokens=self.options.min_shared_tokens,
            token_bytes=spec.unpadded_page_size_bytes // spec.block_size,
        )

    def _warm_up(self) -> None:
        """Compiles the kernels: the first step that shares something is a request's."""
        dtype = self.vllm_config.model_config.dtype
        buffers = self._make_buffers(NodeLimits(1, 1, 1), max_blocks=1)
        in_fp8 = self.vllm_config.cache_config.cache_dtype.startswith("fp8")
        for impl in self.impls:  # for all but the first of a kind everything is there
            asks_in_fp8 = in_fp8 and impl.supports_quant_query_input
            buffers.warm_up(
                impl.num_heads,
                self.kv_cache_spec.head_size,
                dtype=dtype,
                query_dtype=torch.float8_e4m3fn if asks_in_fp8 else dtype,
                sinks_dtype=None if impl.sinks is None else impl.sinks.dtype,
            )

    def _make_buffers(self, limits: NodeLimits, max_blocks: int) -> NodeBuffers:
        spec = self.kv_cache_spec
        setup = NodeSetup(
            block_size=spec.block_size,
            group_size=self.impls[0].num_heads // spec.num_kv_heads,
            num_kv_heads=spec.num_kv_heads,
            num_sms=num_multiprocessors(self.device),
        )
        return NodeBuffers(
            limits, setup, max_blocks=max_blocks, device=self.device, **self.buffer_options
        )

    @functools.cached_property
    def buffers(self) -> NodeBuffers:
        """Made for the first step, which comes before any CUDA graph is captured."""
        scheduler_config, spec = self.vllm_config.scheduler_config, self.kv_cache_spec
        max_requests = max(scheduler_config.max_num_seqs, self.max_captured_tokens)
        limits = NodeLimits(
            max_requests=max_requests,
            max_tokens=max(scheduler_config.max_num_batched_tokens, self.max_captured_tokens),
            max_sharing_tokens=max_requests * self.decode_query_len,
        )
        logger.info_once(
            "vllm-relay: %s over shared prefixes, %d query heads on %d KV heads of size %d, KV "
            "blocks of %d tokens, options: %s",
            self.kernels,
            self.impls[0].num_heads,
            spec.num_kv_heads,
            spec.head_size,
            spec.block_size,
            self.options.given(),
        )
        max_model_len = self.vllm_config.model_config.max_model_len
        return self._make_buffers(limits, max_blocks=-(-max_model_len // spec.block_size))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
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
        return self.with_nodes(super().build(0, tails, *args, **kwargs), shapes)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> Any:
        """The stock backend's: graphs of several drafts are replayed without asking the host, which
        is how they know nothing of nodes. Each layer schedules, as lengths differ by draft."""
        return super().build(0, common_attn_metadata, fast_build=True)

    def _plan(self, common: CommonAttentionMetadata) -> NodeShapes | None:
        """Uploads the nodes of a step, if they are not there yet; None where there are none and no
        graph expects them."""
        started_s = time.perf_counter()
        batch = StepBatch.of(self.worker_blocks, common, common.num_reqs)
        forest, shapes = Forest.none(common.num_reqs), None
        num_sharing = self.num_sharing(common)
        if num_sharing > 1:
            planned = self.plans.plan(batch, common.num_actual_tokens, num_sharing)
            if self._may_be_captured(common):
                forest = planned.forest
                shapes = NodeShapes.captured(
                    self.buffers.limits,
                    common.num_actual_tokens,
                    self.vllm_config.model_config.max_model_len,
                )
            elif planned.pays:
                forest, shapes = planned.forest, planned.shapes
        batch.record(forest, started_s)
        return shapes

    def _may_be_captured(self, common: CommonAttentionMetadata) -> bool:
        """Whether a step may be in a CUDA graph, attention included."""
        # vLLM may have chosen another mode since this builder was made
        mode = self.vllm_config.compilation_config.cudagraph_mode
        return (
            mode.has_full_cudagraphs()
            and common.num_actual_tokens <= self.max_captured_tokens
            and (common.max_query_len <= self.decode_query_len or not mode.separate_routine())
        )


class NodesImpl(AttentionImpl[Any]):
    """Attention of one layer. The stock implementation stands behind it among the bases."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *scales: Any,
        **named_scales: Any,
    ) -> torch.Tensor:
        """Write the attention of ``query`` over ``kv_cache`` into ``output``; shapes are those of
        the stock backend.

        Raises:
            NotImplementedError: the output is to be quantized, in a step with nodes.
        """
        given = (query, key, value)
        if not isinstance(attn_metadata, NodesMetadata):
            return super().forward(
                layer, *given, kv_cache, attn_metadata, output, *scales, **named_scales
            )
        check_output(*scales, *named_scales.values())
        self.attend(layer, given, typed(kv_cache), attn_metadata, output)
        return output

    @abstractmethod
    def attend(
        self,
        layer: Any,
        given: QueryKeyValue,
        kv_cache: torch.Tensor,
        metadata: Any,
        out: torch.Tensor,
    ) -> None:
        """As ``forward``, of a step with nodes."""
