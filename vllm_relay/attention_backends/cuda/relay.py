# SPDX-License-Identifier: Apache-2.0
"""The RELAY attention backend on CUDA with kernels of its own: vLLM's hooks.

Requests with few query tokens, decodes and verified drafts, go through the Triton kernels, which
read what they share once. Prompts are left to one of vLLM's own backends, if there is one: with
hundreds of rows of their own they gain nothing from rows of others. Both read the same KV cache.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import (
    get_num_attention_heads_from_layers,
    split_decodes_and_prefills,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_relay.attention_backends.cuda.config import LayerShape
from vllm_relay.attention_backends.cuda.hidden_bits import HiddenRun
from vllm_relay.attention_backends.cuda.kernels import kv_cache as triton_kv_cache
from vllm_relay.attention_backends.cuda.launch import relay_attention, setup_for
from vllm_relay.attention_backends.cuda.plans.decode_plans import DecodePlans
from vllm_relay.attention_backends.cuda.plans.planner import PlannerLimits, StepPlanner
from vllm_relay.attention_backends.cuda.prompts import Chunk, plan_prompts
from vllm_relay.attention_backends.cuda.step_batch import (
    StepBatch,
    follow_blocks,
    requests_behind,
)
from vllm_relay.attention_backends.relay_base import (
    QueryKeyValue,
    RelayBackendBase,
    RelayImplBase,
    typed,
)
from vllm_relay.attention_backends.step_rows import row_source
from vllm_relay.attention_backends.step_stats import tell_metrics
from vllm_relay.config import RelayConfig
from vllm_relay.limits import (
    CUDA_BLOCK_SIZE_MULTIPLE_TOKENS,
    RelayUnsupportedError,
)

logger = init_logger("vllm.relay")


@dataclass
class RelayCudaMetadata(AttentionMetadata):
    """One step of one KV cache group: decodes come first, prompts behind them."""

    num_decode_tokens: int
    num_tokens: int
    chunks: list[Chunk] = field(default_factory=list)
    """What the Triton kernels compute, behind the stock backend."""
    prompts: Any = None
    """The stock backend's metadata of the prompts, or None where it gets none."""


class RelayCudaMetadataBuilder(AttentionMetadataBuilder[RelayCudaMetadata]):
    """Plans each step once for all layers of a KV cache group, on the host."""

    stock_builder_cls: ClassVar[type[AttentionMetadataBuilder] | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if reasons := _reasons_against(self.kv_cache_spec):
            raise RelayUnsupportedError(reasons)
        vllm_config, layer_names = self.vllm_config, self.layer_names
        self.options = RelayConfig.from_vllm_config(vllm_config)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.max_query_len = self.reorder_batch_threshold or 1
        stock = self.stock_builder_cls
        self.stock = None if stock is None else stock(*args, **kwargs)
        self.num_heads = get_num_attention_heads_from_layers(
            vllm_config, layer_names
        ) or vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        self.window_tokens = _window_of_all(vllm_config, layer_names)
        self.row_source = row_source(vllm_config)
        self.worker_blocks = follow_blocks(vllm_config)
        tell_metrics()

    @functools.cached_property
    def planner(self) -> StepPlanner:
        """Made for the first step, which comes before any CUDA graph is captured."""
        vllm_config, spec = self.vllm_config, self.kv_cache_spec
        max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        max_tokens = self.max_query_len * max_num_seqs
        # graphs of decodes pad a step to the next captured size
        captured = vllm_config.compilation_config.cudagraph_capture_sizes or []
        max_tokens = min((size for size in captured if size >= max_tokens), default=max_tokens)
        max_requests = max(max_num_seqs, max_tokens // self.max_query_len)
        kv_dtype = torch.float8_e4m3fn if spec.dtype == torch.uint8 else spec.dtype
        layer = LayerShape(self.num_heads, spec.num_kv_heads, spec.head_size, kv_dtype.itemsize)
        setup = setup_for(self.device, layer)
        planner = StepPlanner(
            PlannerLimits(
                max_requests=max_requests,
                max_tokens=max_tokens,
                max_seq_len=vllm_config.model_config.max_model_len,
                max_hidden=0 if self.row_source is None else max_requests,
            ),
            setup,
            device=self.device,
            shares_workspace=True,
        )
        logger.info_once(
            "vllm-relay: Triton kernels, %d query heads on %d KV heads of size %d in %s, KV blocks "
            "of %d tokens, prompts by %s, %s, %.0f MiB for states, options: %s",
            self.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            str(kv_dtype).removeprefix("torch."),
            spec.block_size,
            self.stock_builder_cls.__name__ if self.stock_builder_cls else "relay",
            setup.config,
            planner.plan.workspace.num_bytes / 2**20,
            self.options.given(),
        )
        return planner

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> Any:
        """Decodes of one length replay as one graph; the plan is made before it."""
        return AttentionCGSupport.UNIFORM_BATCH

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **kwargs: Any,
    ) -> RelayCudaMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise RelayUnsupportedError(
                ["non-causal attention: use another --attention-backend for this model"]
            )
        hidden_runs = self._hidden_runs(common)
        prompts: Any = None
        chunks: list[Chunk] = []
        num_decodes, num_prompts, num_decode_tokens, _ = split_decodes_and_prefills(
            common, decode_threshold=self.max_query_len
        )
        if num_decodes:
            started_s = time.perf_counter()
            batch = self._batch(common, num_decodes)
            batch.record(self.plans.plan(batch), started_s)
            self.planner.begin_step(
                common.seq_lens[:num_decodes],
                [run for run in hidden_runs if run[1] <= num_decode_tokens],
            )
            table = common.block_table_tensor[:num_decodes]
            chunks.append(Chunk(slice(num_decode_tokens), self.planner.plan, table))
        if num_prompts:
            if self.stock is None or any(end > num_decode_tokens for _, end, _ in hidden_runs):
                assert common.seq_lens_cpu_upper_bound is not None
                chunks += plan_prompts(
                    common.query_start_loc_cpu.numpy(),
                    common.seq_lens_cpu_upper_bound.numpy(),
                    common.block_table_tensor,
                    runs=hidden_runs,
                    first_request=num_decodes,
                    planner=self.planner,
                    window_tokens=self.window_tokens,
                )
            else:
                prompts = self.stock.build(
                    0, requests_behind(common, num_decodes, num_decode_tokens), fast_build
                )
        return RelayCudaMetadata(
            num_decode_tokens=num_decode_tokens,
            num_tokens=common.num_actual_tokens,
            chunks=chunks,
            prompts=prompts,
        )

    @functools.cached_property
    def plans(self) -> DecodePlans:
        return DecodePlans(
            self.planner,
            layer_name=self.layer_names[0],
            min_shared_tokens=self.options.min_shared_tokens if self.options.sharing else None,
            max_query_len=self.max_query_len,
            window_tokens=self.window_tokens,
        )

    def _batch(self, common: CommonAttentionMetadata, num_requests: int) -> StepBatch:
        return StepBatch.of(self.worker_blocks, common, num_requests)

    def _hidden_runs(self, common: CommonAttentionMetadata) -> list[HiddenRun]:
        """What query tokens of the step hide."""
        if self.row_source is None or not self.row_source.requests:
            return []
        assert common.seq_lens_cpu_upper_bound is not None  # exact without drafts
        rows = self.row_source.rows_of_step(
            common.query_start_loc_cpu.numpy(), common.seq_lens_cpu_upper_bound.numpy()
        )
        return [] if rows is None else rows.hidden.query_runs(rows.query_start_loc)


class RelayCudaImpl(RelayImplBase):
    """Attention of one layer."""

    device_type = "cuda"
    stock_impl_cls: ClassVar[type[AttentionImpl] | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stock = self.stock_impl_cls
        self.stock: Any = None if stock is None else stock(*args, **kwargs)

    def get_impl_variants(self) -> tuple[AttentionImpl, ...]:
        """Where a stock builder looks for the layers of its own backend."""
        return (self,) if self.stock is None else (self, self.stock)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.stock is not None:
            self.stock.process_weights_after_loading(act_dtype)

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if self.stock is not None:
            self.stock.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        triton_kv_cache.write_kv_cache(
            key, value, typed(kv_cache), slot_mapping, layer._k_scale, layer._v_scale
        )

    def _attend(
        self,
        layer: AttentionLayer,
        given: QueryKeyValue,
        kv_cache: torch.Tensor,
        attn_metadata: RelayCudaMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Of ``lse``, only what the Triton kernels compute is written."""
        if attn_metadata.prompts is not None:
            rest = slice(attn_metadata.num_decode_tokens, attn_metadata.num_tokens)
            own = (None if each is None else each[rest] for each in given)
            self.stock.forward(layer, *own, kv_cache, attn_metadata.prompts, output[rest])
        query, *_ = given
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        for tokens, plan, block_table in attn_metadata.chunks:
            relay_attention(
                query[tokens],
                typed(kv_cache),
                block_table,
                plan,
                output[tokens],
                lse=None if lse is None else lse[tokens],
                scale=self.scale,
                sliding_window=self.sliding_window,
                alibi_slopes=self.alibi_slopes,
                logits_soft_cap=self.logits_soft_cap,
                sinks=self.sinks,
                k_scale=layer._k_scale,
                v_scale=layer._v_scale,
            )


def _reasons_against(kv_cache_spec: AttentionSpec) -> list[str]:
    other = "use another --attention-backend"
    reasons = []
    if getattr(kv_cache_spec, "attention_chunk_size", None):
        reasons.append(f"chunked local attention: {other}")
    if getattr(kv_cache_spec, "head_size_v", None) not in (None, kv_cache_spec.head_size):
        reasons.append(f"values of another size than keys: {other}")
    return reasons


def _window_of_all(vllm_config: VllmConfig, layer_names: list[str]) -> int:
    """Tokens that every one of these layers sees at most; 0 if one of them sees all."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
    windows = [getattr(layer.impl, "sliding_window", None) or 0 for layer in layers.values()]
    return max(windows) if windows and all(windows) else 0


class RelayCudaBackend(RelayBackendBase):
    """RELAY on CUDA, prompts included."""

    impl_cls = RelayCudaImpl
    builder_cls = RelayCudaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(*args: Any, **kwargs: Any) -> list[int | MultipleOf]:
        return [MultipleOf(CUDA_BLOCK_SIZE_MULTIPLE_TOKENS)]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8
