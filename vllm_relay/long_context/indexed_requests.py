# SPDX-License-Identifier: Apache-2.0
"""Which running requests have memory for better indexes: the scheduler's side."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_relay.config import RelayConfig
from vllm_relay.long_context.host_memory import HostMemory
from vllm_relay.long_context.host_sequence import TRAIN_QUERIES_PER_KEY
from vllm_relay.long_context.index_payoff import IndexPayoff, index_bytes_per_key
from vllm_relay.long_context.kv_cache_spec import RelaySparseSpec
from vllm_relay.sparse.search_cost import load_costs


class IndexedRequests:
    """Reserves host memory for requests, and for their indexes where these could pay.

    Attributes:
        bytes_per_token: of indexes and what they learn from, in all layers and ranks.
        changes: request -> whether it has that memory now; what workers were not told yet.

    Raises:
        ValueError: the file with the costs of this machine cannot be used.
    """

    def __init__(
        self,
        vllm_config: Any,
        options: RelayConfig,
        kv_cache_config: KVCacheConfig,
        memory: HostMemory,
    ) -> None:
        self._memory = memory
        num_ranks = vllm_config.parallel_config.tensor_parallel_size
        self.bytes_per_token = _index_bytes_per_token(kv_cache_config, num_ranks)
        self._min_prompt_tokens = options.min_context_tokens
        self._payoff = _payoff(vllm_config, options, kv_cache_config)
        self._indexed: set[str] = set()
        self.changes: dict[str, bool] = {}

    def __len__(self) -> int:
        return len(self._indexed)

    def reserve(
        self, request_id: str, num_tokens: int, num_prompt_tokens: int, longest_tokens: int
    ) -> list[str] | None:
        """As `HostMemory.reserve`. Indexes give way where there is not enough for both.

        Args:
            longest_tokens: that the request may have in the end.
        """
        if not self._memory.holds(request_id):
            could_pay = self._could_pay(num_prompt_tokens, longest_tokens)
            self._set(request_id, could_pay)
        dropped = None
        if request_id in self._indexed:
            dropped = self._memory.reserve(request_id, num_tokens, self.bytes_per_token)
            if dropped is None:
                self._set(request_id, False)
        if dropped is None:
            dropped = self._memory.reserve(request_id, num_tokens)
        if dropped is None and not self._memory.holds(request_id):
            self.take_back(request_id)
        return dropped

    def take_back(self, request_id: str) -> None:
        """The request does not begin in this step: the workers are not told of it."""
        self._indexed.discard(request_id)
        self.changes.pop(request_id, None)

    def end(self, request_id: str) -> None:
        """The request has ended."""
        self._indexed.discard(request_id)

    def take_changes(self) -> dict[str, bool]:
        changes, self.changes = self.changes, {}
        return changes

    def _could_pay(self, num_prompt_tokens: int, longest_tokens: int) -> bool:
        """Whether better indexes could pay for a request that begins, and would fit."""
        memory = self._memory
        return (
            self._payoff is not None
            and num_prompt_tokens >= self._min_prompt_tokens
            and self._payoff.may_pay(num_prompt_tokens, longest_tokens - num_prompt_tokens)
            and memory.bytes_for(longest_tokens, self.bytes_per_token)
            <= memory.capacity_bytes - memory.context_bytes
        )

    def _set(self, request_id: str, is_indexed: bool) -> None:
        if is_indexed != (request_id in self._indexed):
            self.changes[request_id] = is_indexed
        if is_indexed:
            self._indexed.add(request_id)
        else:
            self._indexed.discard(request_id)


def _index_bytes_per_token(kv_cache_config: KVCacheConfig, num_ranks: int) -> int:
    """Indexes of a request and what they learn from, in all layers and ranks."""
    num_bytes = 0.0
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, RelaySparseSpec):
            per_key = index_bytes_per_key(
                spec.head_size, spec.dtype.itemsize, TRAIN_QUERIES_PER_KEY
            )
            num_bytes += len(group.layer_names) * spec.num_kv_heads * per_key
    return int(num_bytes * num_ranks)


def _payoff(
    vllm_config: Any, options: RelayConfig, kv_cache_config: KVCacheConfig
) -> IndexPayoff | None:
    """None where running requests get no better indexes: nothing is searched, or every key is
    looked at for a bound.

    Raises:
        ValueError: the file with the costs of this machine cannot be used.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    spec = next((each for each in specs if isinstance(each, RelaySparseSpec)), None)
    if spec is None or not options.index_running_requests:
        return None
    if options.alpha == 0 or options.max_dropped_mass is not None:
        return None
    num_heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
    return IndexPayoff(
        load_costs(),
        group=num_heads // spec.num_kv_heads,
        head_size=spec.head_size,
        key_bytes=spec.head_size * spec.dtype.itemsize,
    )
