# SPDX-License-Identifier: Apache-2.0
"""The RELAY attention backend: vLLM's hooks. The plan of a step and the kernels live beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_relay import _C
from vllm_relay.attention_backends.cpu import kernels as cpu
from vllm_relay.attention_backends.hidden_tokens import HiddenTokens
from vllm_relay.attention_backends.plan import StepPlan, plan_step
from vllm_relay.attention_backends.relay_base import (
    QueryKeyValue,
    RelayBackendBase,
    RelayImplBase,
    typed,
)
from vllm_relay.attention_backends.step_rows import row_source
from vllm_relay.attention_backends.step_stats import recorder, tell_metrics
from vllm_relay.config import RelayConfig
from vllm_relay.limits import (
    BLOCK_SIZE_MULTIPLE_TOKENS,
    RelayUnsupportedError,
)

logger = init_logger("vllm.relay")


@dataclass
class RelayMetadata(AttentionMetadata):
    """One step of one KV cache group."""

    num_tokens: int
    """Query tokens of the step, padding excluded."""
    block_table: torch.Tensor
    """int32 [num_requests, max_blocks]."""
    plan: StepPlan


class RelayMetadataBuilder(AttentionMetadataBuilder[RelayMetadata]):
    """Plans each step once for all layers of a KV cache group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config, kv_cache_spec = self.vllm_config, self.kv_cache_spec
        self.options = RelayConfig.from_vllm_config(vllm_config)
        # the model-wide head count is wrong for models that vary it from layer to layer
        self.num_heads = get_num_attention_heads_from_layers(
            vllm_config, self.layer_names
        ) or vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        self.num_kv_heads = kv_cache_spec.num_kv_heads
        self.head_size = kv_cache_spec.head_size
        self.block_size = kv_cache_spec.block_size
        self.is_fp8 = kv_cache_spec.dtype == torch.uint8  # as vLLM allocates it
        dtype = vllm_config.model_config.dtype if self.is_fp8 else kv_cache_spec.dtype
        self.kernel = cpu.kernel_for(dtype, self.options.kernel)
        self.row_source = row_source(vllm_config)
        tell_metrics()
        logger.info_once(
            "vllm-relay: kernel %s, threads: %d, %d query heads on %d KV heads of size %d in %s, "
            "KV blocks of %d tokens%s, options: %s",
            self.kernel,
            torch.get_num_threads(),
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            str(dtype).removeprefix("torch."),
            self.block_size,
            " in fp8" if self.is_fp8 else "",
            self.options.given(),
        )
        if self.kernel == "portable" and self.options.kernel == "auto":
            logger.warning_once(
                "vllm-relay: of the kernels in this build (%s) only the portable one runs here, "
                "which is many times slower than the others and than vLLM's CPU_ATTN: use "
                "--attention-backend CPU_ATTN, or build vllm-relay on this machine with a newer "
                "compiler (vllm-relay doctor)",
                ", ".join(_C.compiled_kernels()),
            )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **kwargs: Any,
    ) -> RelayMetadata:
        if common_attn_metadata.causal is not True:
            raise RelayUnsupportedError(
                ["non-causal attention: use --attention-backend CPU_ATTN for this model"]
            )
        query_start_loc = common_attn_metadata.query_start_loc_cpu.numpy()
        num_tokens = int(query_start_loc[common_attn_metadata.num_reqs])
        # rows that pad the batch come last and have no query tokens
        num_requests = int(np.searchsorted(query_start_loc, num_tokens))
        query_start_loc = query_start_loc[: num_requests + 1]
        block_table = common_attn_metadata.block_table_tensor[:num_requests]
        seq_lens = common_attn_metadata.seq_lens[:num_requests].numpy()
        rows = None
        if self.row_source is not None:
            rows = self.row_source.rows_of_step(query_start_loc, seq_lens)
        if rows is None:
            return self._plan(num_tokens, block_table, query_start_loc, seq_lens)
        if rows.requests is not None:
            block_table = block_table[torch.from_numpy(rows.requests)]
        return self._plan(num_tokens, block_table, rows.query_start_loc, rows.seq_lens, rows.hidden)

    def _plan(
        self,
        num_tokens: int,
        block_table: torch.Tensor,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        hidden: HiddenTokens | None = None,
    ) -> RelayMetadata:
        plan = plan_step(
            block_table.numpy(),
            query_start_loc,
            seq_lens,
            block_size=self.block_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            num_threads=torch.get_num_threads(),
            kernel=self.kernel,
            forest="auto" if self.options.sharing else None,
            min_shared_tokens=self.options.min_shared_tokens,
            hidden=hidden,
            is_fp8=self.is_fp8,
        )
        recorder.add_plan(plan.stats)
        return RelayMetadata(num_tokens=num_tokens, block_table=block_table, plan=plan)


class RelayImpl(RelayImplBase):
    """Attention of one layer."""

    device_type = "cpu"

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        num_tokens = slot_mapping.shape[0]
        cpu.write_kv_cache(
            key[:num_tokens],
            value[:num_tokens],
            typed(kv_cache),
            slot_mapping,
            **_scales(layer, kv_cache),
        )

    def _attend(
        self,
        layer: AttentionLayer,
        given: QueryKeyValue,
        kv_cache: torch.Tensor,
        attn_metadata: RelayMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        num_tokens = attn_metadata.num_tokens
        cpu.relay_attention(
            given[0][:num_tokens],
            typed(kv_cache),
            attn_metadata.block_table,
            attn_metadata.plan,
            output[:num_tokens],
            lse=lse,
            scale=self.scale,
            num_kv_heads=self.num_kv_heads,
            sliding_window=self.sliding_window,
            alibi_slopes=self.alibi_slopes,
            logits_soft_cap=self.logits_soft_cap,
            # cast each time: weights may be loaded again
            sinks=None if self.sinks is None else self.sinks.float(),
            **_scales(layer, kv_cache),
        )


def _scales(layer: AttentionLayer, kv_cache: torch.Tensor) -> dict[str, float]:
    if kv_cache.dtype != torch.uint8:
        return {}
    return {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}


class RelayBackend(RelayBackendBase):
    """RELAY on CPUs."""

    impl_cls = RelayImpl
    builder_cls = RelayMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(*args: Any, **kwargs: Any) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK_SIZE_MULTIPLE_TOKENS)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False
