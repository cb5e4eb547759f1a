# SPDX-License-Identifier: Apache-2.0
"""A pin: what it holds, whose it is and until when; and what can be none."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from vllm_relay.arguments import is_number, shortened
from vllm_relay.commands.errors import CommandError
from vllm_relay.commands.owners import check_owner
from vllm_relay.modules.prompt.plan import ModulePlan

_PIN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")


@dataclass
class Pin:
    """A pinned prompt, known by digests of its tokens."""

    id: str
    owner: str
    declaration: str | None  # the one that will withdraw it if it fails; None: others rely on it
    expires_s: float  # by the clock of the table
    prompt: str  # digest of the whole prompt
    num_slots: int  # of its full blocks, with the padding of modules
    prefix: str  # digest of the tokens of these, and of those behind them in their hashes
    num_prefix_tokens: int
    chain: tuple[int, ...]  # see `chain_of`
    plan: ModulePlan | None  # of a prompt with modules
    block_hashes: list[bytes] = field(default_factory=list)  # empty until first computed
    blocks: list[Any] = field(default_factory=list)  # held ones; empty while cold
    problem: str | None = None  # why it did not become resident

    @property
    def num_tokens(self) -> int:
        if self.plan is None:
            return self.num_slots
        return sum(segment.num_tokens for segment in self.plan.segments)

    def check_owner(self, owner: str) -> None:
        """
        Raises:
            CommandError: 403 the pin is another owner's.
        """
        check_owner(f"pin {self.id!r}", self.owner, owner, option="system_prompts")


def check_pin(pin_id: Any, ttl_s: Any) -> None:
    """
    Raises:
        CommandError: 400, they cannot be the id and the seconds of a pin.
    """
    if not isinstance(pin_id, str) or not _PIN_ID.fullmatch(pin_id):
        raise CommandError(
            400,
            f"id: given {shortened(pin_id)}, expected 1 to 128 of the letters a to z and A to Z, "
            "digits and _ . : -, the first of them a letter, a digit or _",
        )
    if ttl_s is None:
        return
    if not is_number(ttl_s) or not 0 < ttl_s < math.inf:
        raise CommandError(
            400,
            f"ttl_s: given {shortened(ttl_s)}, expected seconds, more than 0, or none to pin until "
            "the prompt is unpinned",
        )


def digest_of(token_ids: Sequence[int], plan: ModulePlan | None = None) -> str:
    """A name of a prompt: 64 hex digits."""
    digest = sha256(array("q", token_ids).tobytes())
    if plan is not None:
        digest.update(plan.to_argument().encode())
    return digest.hexdigest()


def chain_of(token_ids: Sequence[int], block_size: int, lookahead_tokens: int) -> tuple[int, ...]:
    """For each full block, a number made of all tokens up to its end and those behind it that its
    hash covers. It only estimates what pins have in common: blocks are found by their hashes."""
    links, link = [], 0
    for begin in range(0, len(token_ids) - lookahead_tokens, block_size):
        link = hash((link, *token_ids[begin : begin + block_size + lookahead_tokens]))
        links.append(link)
    return tuple(links)


class Room:
    """How much of the KV cache pins may take.

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
