# SPDX-License-Identifier: Apache-2.0
"""The RELAY backend on CUDA with vLLM's FlashInfer for everything: vLLM's hooks.

Decodes go through the kernels of TensorRT-LLM that FlashInfer has for compute capability 10.x,
which read block tables and lengths on the device and return logarithms of sums. Its other kernels
either return none or are planned by the host, step by step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from flashinfer.prefill import trtllm_batch_context_with_kv_cache
from vllm.config import get_current_vllm_config_or_none
from vllm.utils.flashinfer import supports_trtllm_attention
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flashinfer
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from vllm_relay.attention_backends.cuda.flash.attention import NodeShapes
from vllm_relay.attention_backends.cuda.flash.hooks import (
    NodesImpl,
    NodesMetadata,
    NodesMetadataBuilder,
)
from vllm_relay.attention_backends.relay_base import NamedBackend, QueryKeyValue
from vllm_relay.limits import FP8_KV_CACHE_DTYPES


@dataclass(kw_only=True)
class RelayFlashInferMetadata(NodesMetadata, flashinfer.FlashInferMetadata):
    """The stock backend's metadata of the tails, and the nodes."""

    prompts: flashinfer.FlashInferMetadata
    """Of the requests behind the decodes, as a step of their own."""


class RelayFlashInferMetadataBuilder(NodesMetadataBuilder, flashinfer.FlashInferMetadataBuilder):
    """FlashInfer's, with nodes."""

    kernels = "FlashInfer's kernels of TensorRT-LLM"
    buffer_options: ClassVar[dict[str, bool]] = {"lse_is_base_2": True, "has_branch": False}

    def serves_nodes(self, impl: Any) -> bool:
        return impl.sliding_window == (-1, -1) and not impl.logits_soft_cap

    def num_sharing(self, common: CommonAttentionMetadata) -> int:
        """Decodes; of different lengths, some are prompts to FlashInfer."""
        num_decodes, *_ = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold, require_uniform=True
        )
        return num_decodes

    def with_nodes(
        self, tails: flashinfer.FlashInferMetadata, shapes: NodeShapes
    ) -> RelayFlashInferMetadata:
        prompts = replace(
            tails,
            num_actual_tokens=tails.num_prefill_tokens,
            num_decodes=0,
            num_decode_tokens=0,
            decode=None,
        )
        return RelayFlashInferMetadata(
            **vars(tails), buffers=self.buffers, shapes=shapes, prompts=prompts
        )


class RelayFlashInferImpl(NodesImpl, flashinfer.FlashInferImpl):
    """Attention of one layer."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def attend(
        self,
        layer: Any,
        given: QueryKeyValue,
        kv_cache: torch.Tensor,
        metadata: RelayFlashInferMetadata,
        out: torch.Tensor,
    ) -> None:
        query, decodes = given[0], slice(metadata.num_decode_tokens)
        if metadata.num_prefill_tokens:
            rest = slice(metadata.num_decode_tokens, None)
            own = (None if each is None else each[rest] for each in given)
            self.forward(layer, *own, kv_cache, metadata.prompts, out[rest])
        queries = self.maybe_quant_query(
            query[decodes], metadata.q_data_type_decode, layer._q_scale
        )
        self._attend_decodes(layer, queries.contiguous(), kv_cache, metadata, out[decodes])

    def _attend_decodes(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: RelayFlashInferMetadata,
        out: torch.Tensor,
    ) -> None:
        buffers, shapes, decode = metadata.buffers, metadata.shapes, metadata.decode
        entries = shapes.num_entries
        is_fp8 = kv_cache.dtype == torch.float8_e4m3fn
        key_scale = layer._q_scale_float * layer._k_scale_float if is_fp8 else 1.0
        caches = kv_cache.permute(*metadata.kv_cache_layout.layer_view_order)
        options = {
            "kv_cache": canonicalize_singleton_dim_strides(caches).split(self.head_size, dim=-1),
            "workspace_buffer": flashinfer._get_trtllm_workspace_buffer(),
            "bmm1_scale": self.scale * key_scale,
            "bmm2_scale": layer._v_scale_float if is_fp8 else 1.0,
            # vLLM 0.33 has one; without it FlashInfer makes one for each call
            "multi_ctas_kv_counter_buffer": getattr(self, "_multi_ctas_kv_counter_buffer", None),
        }

        def attend_nodes(queries: torch.Tensor, entry_out: torch.Tensor) -> torch.Tensor:
            lse = _lse_of(queries)
            trtllm_batch_context_with_kv_cache(
                query=canonicalize_singleton_dim_strides(queries),
                block_tables=buffers.entry_table[:entries],
                seq_lens=buffers.entry_lens[:entries],
                max_q_len=shapes.max_rows,
                max_kv_len=shapes.max_tokens,
                batch_size=entries,
                cum_seq_lens_q=buffers.row_starts[: entries + 1],
                cum_seq_lens_kv=buffers.block_starts[: entries + 1],
                causal=False,
                out=entry_out,
                lse=lse.t(),
                **options,
            )
            return lse

        def attend_tails() -> torch.Tensor:
            lse, is_ragged = _lse_of(query), decode.q_cu_seq_lens is not None
            query_len, rest = divmod(len(query), metadata.num_decodes)
            if rest:  # of a dummy run, some of whose requests have no query tokens
                query_len = 1
            trtllm_batch_decode_with_kv_cache(
                query=canonicalize_singleton_dim_strides(query),
                block_tables=decode.block_tables,
                seq_lens=decode.seq_lens,
                max_seq_len=decode.max_seq_len,
                backend=decode.kernel.value,
                q_len_per_req=None if is_ragged else query_len,
                max_q_len=decode.q_len_per_req if is_ragged else None,
                cum_seq_lens_q=decode.q_cu_seq_lens,
                out=out,
                lse=lse.t(),
                **options,
            )
            return lse

        buffers.attend_by(attend_nodes, attend_tails, query, out, shapes, self.sinks)


def _lse_of(query: torch.Tensor) -> torch.Tensor:
    """Room for float32 [heads, rows]."""
    return query.new_empty((query.shape[1], len(query)), dtype=torch.float32)


class RelayFlashInferBackend(NamedBackend, flashinfer.FlashInferBackend):
    """RELAY on CUDA, beside FlashInfer."""

    impl_cls = RelayFlashInferImpl
    builder_cls = RelayFlashInferMetadataBuilder
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        *FP8_KV_CACHE_DTYPES,
    ]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [64, 128, 256]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major == 10

    @classmethod
    def supports_combination(cls, *args: Any, **kwargs: Any) -> str | None:
        """Why its kernels of TensorRT-LLM do not serve a layer."""
        if not supports_trtllm_attention(is_prefill=True):
            return "FlashInfer cannot get its kernels of TensorRT-LLM"
        if vllm_config := get_current_vllm_config_or_none():
            asked, model_config = vllm_config.attention_config, vllm_config.model_config
            in_fp8 = vllm_config.cache_config.cache_dtype in FP8_KV_CACHE_DTYPES
            if asked.use_trtllm_attention is False:
                return "--attention-config.use_trtllm_attention=false leaves its kernels out"
            if asked.disable_flashinfer_q_quantization and in_fp8:
                return "--attention-config.disable_flashinfer_q_quantization with an fp8 KV cache"
            if getattr(model_config.hf_text_config, "attn_logit_softcapping", None):
                return "its kernels do no soft capping of logits"
        return super().supports_combination(*args, **kwargs)
