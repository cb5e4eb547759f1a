# SPDX-License-Identifier: Apache-2.0
"""Pinned prompts: prefixes whose KV blocks are never evicted. Lives in the engine core.

vLLM has no pinning. A pin is a reference to its blocks like that of a running request: a block
with references is not in the queue of free blocks, so it cannot be evicted. Two pins that begin
alike hold the common blocks twice.

A pin goes through two states. It is *cold* when it is declared and after a reset of the prefix
cache: only its tokens are known. It becomes *resident* when any request that has computed these
tokens gives its blocks back. That request is normally one the front end sends for the purpose; it
names the pin in ``SamplingParams.extra_args``.

A prompt with modules pins these, wherever they are imported, and nothing behind them.

Pins are for the base model and prompts without ``cache_salt``: others have other block hashes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_utils import resolve_block_hashes

from vllm_relay.commands.errors import CommandError
from vllm_relay.modules.prompt.plan import ModulePlan, plan_of_request

_PIN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")

EXTRA_ARG = "relay_pin"
"""The key in ``SamplingParams.extra_args`` under which a request names the pin it computes."""


@dataclass
class _Pin:
    id: str
    num_slots: int  # of its full blocks, with the padding of modules
    token_ids: list[int]  # of these, and what stands behind them and is part of their hashes
    plan: ModulePlan | None  # of a prompt with modules
    block_hashes: list[bytes] = field(default_factory=list)  # empty until first computed
    blocks: list[Any] = field(default_factory=list)  # held ones; empty while cold
    problem: str | None = None  # why it did not become resident

    @property
    def num_tokens(self) -> int:
        if self.plan is None:
            return self.num_slots
        return sum(segment.num_tokens for segment in self.plan.segments)


@dataclass(frozen=True)
class _Lookup:
    """What KVCacheManager.get_computed_blocks reads of a request."""

    block_hashes: list[bytes]
    num_tokens: int
    skip_reading_prefix_cache: bool = False


class PinTable:
    """The pins of one scheduler.

    Args:
        scheduler: has ``kv_cache_manager``, ``max_model_len`` and ``block_size``, as vLLM's.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        # vLLM 0.33: with EAGLE and MTP the hash of a block covers what its draft was made of
        self._lookahead_tokens = getattr(self._pool, "num_hash_lookahead_tokens", 0)
        # without such hashes, lookups leave out the last block that they find
        self._drops_last_block = self._manager.use_eagle
        self._pins: dict[str, _Pin] = {}
        self._cold: dict[str, _Pin] = {}
        self._holders: Counter[int] = Counter()  # block id -> pins that hold it
        self._computed_before_reset: set[str] = set()  # requests
        self._blocks_before_reset: dict[str, list[Any]] = {}  # by pin id

    @property
    def num_blocks(self) -> int:
        """Blocks that pins hold, each counted once."""
        return len(self._holders)

    @property
    def num_bytes(self) -> int:
        """Bytes of KV cache in these blocks."""
        return self.num_blocks * self.block_bytes

    def declare(
        self, pin_id: str, token_ids: Sequence[int], plan: ModulePlan | None = None
    ) -> dict[str, Any]:
        """Make a cold pin of the full KV blocks of ``token_ids``, or of the modules of a plan.

        Declaring it again with the same tokens changes nothing.

        Args:
            plan: of a prompt with modules; ``token_ids`` are those of its slots.

        Returns:
            The pin as in :meth:`entries`, as ``is_new`` whether it is new, and as
            ``prompt_tokens`` how many of the prompt's first tokens a request has to compute.

        Raises:
            CommandError: 400 the prompt cannot be a pinned one, 409 the id is taken, 507 the blocks
                left would not suffice for the longest request.
        """
        if not self._manager.enable_caching:
            raise CommandError(400, "prompts can be pinned only with --enable-prefix-caching")
        if not _PIN_ID.fullmatch(pin_id):
            raise CommandError(
                400,
                f"id: given {pin_id[:140]!r}, expected 1 to 128 of the letters a to z and A to Z, "
                "digits and _ . : -, the first of them a letter, a digit or _",
            )
        num_tokens = len(token_ids) if plan is None else plan.num_stored_slots
        if num_tokens == 0 and plan is not None:
            raise CommandError(400, "the prompt has no modules: give it as text to pin it")
        block_size, max_model_len = self._scheduler.block_size, self._scheduler.max_model_len
        least = block_size * (2 if self._drops_last_block else 1) + self._lookahead_tokens
        if num_tokens < least:
            raise CommandError(
                400,
                f"a prompt of {num_tokens} tokens was given, but only full KV blocks can be "
                f"pinned: expected at least {least} tokens ({self._why_least()})",
            )
        if num_tokens >= max_model_len:
            raise CommandError(
                400,
                f"a prompt of {num_tokens} tokens was given, expected fewer than "
                f"max_model_len={max_model_len}",
            )
        num_slots = (num_tokens - self._lookahead_tokens) // block_size * block_size
        token_ids = list(token_ids[: num_slots + self._lookahead_tokens])
        pin = self._pins.get(pin_id)
        if pin is not None:
            if pin.token_ids != token_ids or pin.plan != plan:
                raise CommandError(
                    409, f"pin {pin_id!r} has another prompt: unpin it, or give another id"
                )
            pin.problem = None
            return self._declared(pin, is_new=False)
        num_new = self._num_new_blocks(num_slots, token_ids, plan)
        self._check_room(pin_id, num_new, self._num_reserved_blocks())
        pin = self._pins[pin_id] = self._cold[pin_id] = _Pin(pin_id, num_slots, token_ids, plan)
        return self._declared(pin, is_new=True)

    def unpin(self, pin_id: str) -> None:
        """Forget a pin; its blocks can be evicted again, the last ones first.

        Raises:
            CommandError: 404 there is no such pin.
        """
        pin = self._get(pin_id)
        self._release(pin)
        del self._pins[pin_id]
        self._cold.pop(pin_id, None)

    def get(self, pin_id: str) -> dict[str, Any]:
        """One of :meth:`entries`.

        Raises:
            CommandError: 404 there is no such pin.
        """
        return self._describe(self._get(pin_id))

    def entries(self) -> list[dict[str, Any]]:
        """The pins: id, tokens, blocks and bytes held, whether resident, and why not.

        Blocks that several pins hold are counted for each of them.
        """
        return [self._describe(pin) for pin in self._pins.values()]

    def before_free(self, request: Any) -> None:
        """Hold the blocks of cold pins that ``request`` has computed.

        To be called while the request still holds its blocks, whether it is finished, aborted or
        preempted: what it has not computed is not found in the prefix cache.
        """
        if request.request_id in self._computed_before_reset:
            self._computed_before_reset.discard(request.request_id)
            return
        if not self._cold:
            return
        self._learn_hashes(request)
        hashes = request.block_hashes
        for pin in list(self._cold.values()):
            # hashes are chained, and the last one stands for all; if not, `_hold` looks at all
            if pin.block_hashes and pin.block_hashes[-1] in hashes:
                self._hold(pin)

    def reset(self) -> None:
        """Make all pins cold, as the prefix cache is going to be emptied.

        Requests that are running now have computed with what the reset is to forget, so they do
        not make a pin resident.
        """
        self._blocks_before_reset.clear()
        for pin in self._pins.values():
            self._blocks_before_reset[pin.id] = pin.blocks
            self._release(pin)
            self._cold[pin.id] = pin
        running = getattr(self._scheduler, "running", ())
        self._computed_before_reset = {request.request_id for request in running}

    def undo_reset(self) -> None:
        """Hold the blocks again: the prefix cache was not emptied after all."""
        self._computed_before_reset.clear()
        for pin_id, blocks in self._blocks_before_reset.items():
            if blocks:
                pin = self._cold.pop(pin_id)
                self._pool.touch(blocks)
                self._holders.update(block.block_id for block in blocks)
                pin.blocks = blocks
        self._blocks_before_reset.clear()

    def _get(self, pin_id: str) -> _Pin:
        try:
            return self._pins[pin_id]
        except KeyError:
            known = ", ".join(self._pins) or "none"
            raise CommandError(404, f"there is no pin {pin_id!r}; pins: {known}") from None

    def _describe(self, pin: _Pin) -> dict[str, Any]:
        return {
            "id": pin.id,
            "tokens": pin.num_tokens,
            "blocks": len(pin.blocks),
            "bytes": len(pin.blocks) * self.block_bytes,
            "resident": bool(pin.blocks),
            "problem": pin.problem,
        }

    def _declared(self, pin: _Pin, *, is_new: bool) -> dict[str, Any]:
        return {**self._describe(pin), "prompt_tokens": len(pin.token_ids), "is_new": is_new}

    def _why_least(self) -> str:
        if self._drops_last_block:
            return (
                "twice --block-size: with EAGLE or MTP vLLM computes the last block of what it "
                "finds again"
            )
        if self._lookahead_tokens:
            return (
                f"--block-size, and {self._lookahead_tokens} tokens behind: with EAGLE or MTP they "
                "are part of a block's hash"
            )
        return "--block-size"

    def _learn_hashes(self, request: Any) -> None:
        """Take the block hashes of a pin's own first request: other requests may name it too."""
        extra_args = getattr(request.sampling_params, "extra_args", None) or {}
        pin_id = extra_args.get(EXTRA_ARG)
        pin = self._cold.get(pin_id) if isinstance(pin_id, str) else None
        if pin is None or pin.block_hashes:
            return
        depth = pin.num_slots // self._pool.hash_block_size
        if (
            request.lora_request is None
            and request.cache_salt is None
            and not request.mm_features
            and len(request.block_hashes) >= depth
            and request.prompt_token_ids is not None
            and request.prompt_token_ids[: len(pin.token_ids)] == pin.token_ids
            and plan_of_request(request) == pin.plan
        ):
            pin.block_hashes = list(request.block_hashes[:depth])

    def _hold(self, pin: _Pin) -> None:
        """Make ``pin`` resident if all its blocks are cached and there is room."""
        num_tokens = pin.num_slots
        # of a prompt's tokens vLLM looks up all but the last
        cached, num_cached_tokens, *_ = self._manager.get_computed_blocks(
            _Lookup(pin.block_hashes, num_tokens + 1)
        )
        blocks = [block for group in cached.blocks for block in group if not block.is_null]
        if self._drops_last_block:
            blocks += self._blocks_behind(pin, num_cached_tokens)
            num_cached_tokens += self._scheduler.block_size
        if num_cached_tokens < num_tokens:
            return
        num_new = sum(block.block_id not in self._holders for block in blocks)
        try:
            self._check_room(pin.id, num_new, self.num_blocks)
        except CommandError as error:
            pin.problem = str(error)
            return
        self._pool.touch(blocks)
        self._holders.update(block.block_id for block in blocks)
        pin.blocks, pin.problem = blocks, None
        del self._cold[pin.id]

    def _blocks_behind(self, pin: _Pin, num_cached_tokens: int) -> list[Any]:
        """What the prefix cache has of a pin behind a hit, which ended before it because there was
        more: without these blocks, the next one would end earlier."""
        behind: list[Any] = []
        for group, manager in enumerate(self._manager.coordinator.single_type_managers):
            hashes = resolve_block_hashes(
                pin.block_hashes, self._pool.hash_block_size, manager.block_size
            )
            for block_hash in hashes[num_cached_tokens // manager.block_size :]:
                behind += self._pool.get_cached_block(block_hash, [group]) or []
        return behind

    def _release(self, pin: _Pin) -> None:
        self._pool.free_blocks(reversed(pin.blocks))
        for block in pin.blocks:
            self._holders[block.block_id] -= 1
            if self._holders[block.block_id] == 0:
                del self._holders[block.block_id]
        pin.blocks = []

    def _check_room(self, pin_id: str, num_new_blocks: int, num_pinned_blocks: int) -> None:
        num_usable = self._pool.num_gpu_blocks - 1  # one block stands for "no block"
        num_left = num_usable - num_pinned_blocks - num_new_blocks
        max_model_len = self._scheduler.max_model_len
        num_needed = self._num_blocks_of(max_model_len) + self._manager.watermark_blocks
        if num_left < num_needed:
            raise CommandError(
                507,
                f"pin {pin_id!r} needs {num_new_blocks} KV blocks; of {num_usable}, "
                f"{num_pinned_blocks} are pinned, so {max(num_left, 0)} would be left, and the "
                f"longest request (max_model_len={max_model_len}) needs {num_needed}: unpin "
                "another prompt, enlarge the KV cache or lower --max-model-len",
            )

    def _num_reserved_blocks(self) -> int:
        cold = sum(self._num_blocks_of(pin.num_slots) for pin in self._cold.values())
        return self.num_blocks + cold

    def _num_new_blocks(
        self, num_slots: int, token_ids: Sequence[int], plan: ModulePlan | None
    ) -> int:
        """Blocks a pin needs beyond those of resident pins, at most."""
        common = 0
        for pin in self._pins.values():
            if pin.blocks and pin.plan is None and plan is None:
                common = max(common, _common_length(token_ids, pin.token_ids))
        common = max(0, common - self._lookahead_tokens)
        common -= common % self._scheduler.block_size
        return self._num_blocks_of(num_slots) - self._num_blocks_of(common)

    def _num_blocks_of(self, num_tokens: int) -> int:
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

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block of all layers, in one worker."""
        config = self._manager.kv_cache_config
        # `size` is that of the one allocation in which all tensors lie
        size = max((tensor.size for tensor in config.kv_cache_tensors), default=0)
        return size // config.num_blocks


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)
