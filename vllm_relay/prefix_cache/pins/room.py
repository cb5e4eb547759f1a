# SPDX-License-Identifier: Apache-2.0
"""How much of the KV cache pins may take."""

from __future__ import annotations

import math
from typing import Any

from vllm_relay.commands.errors import CommandError


class Room:
    """
    Args:
        scheduler: has ``kv_cache_manager`` and ``max_model_len``, as vLLM's.
        max_pinned_fraction: share of the KV cache that all pins together may take.
    """

    def __init__(self, scheduler: Any, max_pinned_fraction: float) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._max_pinned_fraction = max_pinned_fraction

    def check(self, pin_id: str, num_new_blocks: int, num_pinned_blocks: int) -> None:
        """
        Raises:
            CommandError: 507 pins would take too much.
        """
        num_usable = self._manager.block_pool.num_gpu_blocks - 1  # one block stands for "no block"
        num_allowed = math.floor(num_usable * self._max_pinned_fraction + 1e-9)
        asked = (
            f"pin {pin_id!r} needs {num_new_blocks} KV blocks; of {num_usable}, "
            f"{num_pinned_blocks} are pinned"
        )
        if num_pinned_blocks + num_new_blocks > num_allowed:
            raise CommandError(
                507,
                f"{asked}, and pins may take {num_allowed} (max_pinned_fraction="
                f"{self._max_pinned_fraction:g}): unpin another prompt, enlarge the KV cache or "
                "raise additional_config.relay.max_pinned_fraction",
            )
        num_left = num_usable - num_pinned_blocks - num_new_blocks
        max_model_len = self._scheduler.max_model_len
        num_needed = self.num_blocks_of(max_model_len) + self._manager.watermark_blocks
        if num_left < num_needed:
            raise CommandError(
                507,
                f"{asked}, so {max(num_left, 0)} would be left, and the longest request "
                f"(max_model_len={max_model_len}) needs {num_needed}: unpin another prompt, "
                "enlarge the KV cache or lower --max-model-len",
            )

    def num_blocks_of(self, num_tokens: int) -> int:
        """Blocks a request of this length needs on its own, in all KV cache groups."""
        return self._manager.coordinator.get_num_blocks_to_allocate(
            request_id="",
            num_tokens=num_tokens,
            new_computed_blocks=self._manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=0,
            num_local_computed_tokens=0,
            num_tokens_main_model=num_tokens,
            apply_admission_cap=True,
        )
