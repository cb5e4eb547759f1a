# SPDX-License-Identifier: Apache-2.0
"""Beginning to record what is in the KV blocks of a scheduler."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_relay.page.feed import Feed
from vllm_relay.page.record import BlockRecord
from vllm_relay.vllm_changes.block_pool import report_blocks


def record(scheduler: Any) -> Feed:
    """A feed of the first KV cache group that keeps every block of a prefix, or of the first."""
    manager = scheduler.kv_cache_manager
    groups = manager.kv_cache_config.kv_cache_groups
    keep_all = (isinstance(each.kv_cache_spec, FullAttentionSpec) for each in groups)
    group = next((index for index, keeps_all in enumerate(keep_all) if keeps_all), 0)
    pool = manager.block_pool
    suffix = make_block_hash_with_group_id(BlockHash(b""), group)

    def find(block_hash: bytes) -> int | None:
        block = pool.cached_block_hash_to_block.get_one_block(block_hash + suffix)
        return None if block is None else block.block_id

    block_size = manager.coordinator.single_type_managers[group].block_size
    blocks = BlockRecord(pool.num_gpu_blocks, block_size, pool.hash_block_size, find)
    report_blocks(scheduler, blocks, group)
    return Feed(scheduler, blocks)
