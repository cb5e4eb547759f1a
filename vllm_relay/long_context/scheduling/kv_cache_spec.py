# SPDX-License-Identifier: Apache-2.0
"""vLLM's bookkeeping of KV blocks for layers whose middle tokens leave the device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_relay.long_context.window import WindowPolicy
from vllm_relay.sparse.index.key_codes import row_bytes
from vllm_relay.sparse.index.sparse_layer import MEAN_TOKENS

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class RelaySparseSpec(FullAttentionSpec):
    """Full attention of which the device keeps sinks and a window of long requests.

    Attributes:
        policy: says what is kept.
        max_blocks_per_request: the most blocks one request holds.
    """

    policy: WindowPolicy
    max_blocks_per_request: int

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return self.max_blocks_per_request * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Any]) -> RelaySparseSpec:
        assert all(isinstance(spec, cls) for spec in specs), "layers of different kinds"
        own = {(spec.policy, spec.max_blocks_per_request) for spec in specs}
        assert len(own) == 1, f"layers of one KV cache group with different windows: {own}"
        [(policy, max_blocks)] = own
        base = FullAttentionSpec.merge([FullAttentionSpec(**_fields_of(spec)) for spec in specs])
        return cls.of(base, policy, max_blocks)

    @classmethod
    def of(
        cls, spec: FullAttentionSpec, policy: WindowPolicy, max_blocks_per_request: int
    ) -> RelaySparseSpec:
        """The spec of a layer with full attention, with a window."""
        return cls(**_fields_of(spec), policy=policy, max_blocks_per_request=max_blocks_per_request)


class RelaySparseManager(FullAttentionManager):
    """Frees the blocks between sinks and window.

    The worker copies every block to the host in the step that computes it, so that a block may be
    freed as soon as that step is processed.
    """

    kv_cache_spec: RelaySparseSpec

    def __init__(self, kv_cache_spec: RelaySparseSpec, *args: Any, **kwargs: Any) -> None:
        kwargs["max_admission_blocks_per_request"] = kv_cache_spec.max_blocks_per_request
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.first_resident_tokens: dict[str, int] = {}

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: RelaySparseSpec,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[list[Any], ...], int]:
        """As FullAttentionManager's, but no longer than leaves room for a step: all blocks of a hit
        are held for its first step, and the pool need not have room for a whole prompt."""
        policy = kv_cache_spec.policy
        size = policy.block_size_tokens
        if policy.prefill == "exact_offload":
            num_step_blocks = (
                kv_cache_spec.max_blocks_per_request - policy.min_context_tokens // size + 1
            )
            most = (block_pool.num_gpu_blocks - 1) // len(kv_cache_group_ids) - num_step_blocks
            max_length = min(max_length, max(most, 0) * size)
        return super().find_longest_cache_hit(
            block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, *args, **kwargs
        )

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        policy = self.kv_cache_spec.policy
        if not policy.frees(processed_computed_tokens, num_prompt_tokens or 0):
            return
        size = policy.block_size_tokens
        sink_end, window_begin = policy.residency(
            processed_computed_tokens,
            num_prompt_tokens or 0,
            self.first_resident_tokens.get(request_id, 0),
        )
        self._remove_blocks_in_range(request_id, sink_end // size, window_begin // size)

    def pop_blocks_for_free(self, request_id: str, *args: Any, **kwargs: Any) -> list[Any]:
        self.first_resident_tokens.pop(request_id, None)
        return super().pop_blocks_for_free(request_id, *args, **kwargs)


def host_bytes_per_token(kv_cache_config: KVCacheConfig) -> int:
    """Of one rank: keys, values, eight-bit codes of the keys and means of the values, in all layers
    with a window."""
    num_bytes = 0
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, RelaySparseSpec):
            states = spec.page_size_bytes // spec.block_size
            codes = spec.num_kv_heads * row_bytes(spec.head_size)
            means = -(-states // 2 // MEAN_TOKENS)
            num_bytes += len(group.layer_names) * (states + codes + means)
    return num_bytes


def register_kv_cache_spec() -> None:
    """Tell vLLM's registry which manager serves these layers; may be called again."""
    # it does not register its own specs once it holds any other
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(RelaySparseSpec, RelaySparseManager, FullAttentionSpec)


def _fields_of(spec: KVCacheSpec) -> dict[str, Any]:
    return {
        field.name: getattr(spec, field.name) for field in fields(FullAttentionSpec) if field.init
    }


register_kv_cache_spec()  # every process that unpickles such a spec needs it
