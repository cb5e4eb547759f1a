# SPDX-License-Identifier: Apache-2.0
"""Pinned prompts: prefixes whose KV blocks are never evicted. Lives in the engine core.

vLLM has no pinning. A pin is a reference to its blocks like that of a running request: a block
with references is not in the queue of free blocks, so it cannot be evicted. Two pins that begin
alike hold the common blocks twice.

A pin goes through two states. It is *cold* when it is declared and after a reset of the prefix
cache: only its tokens are known, by their digest. It becomes *resident* when any request that has
computed these tokens gives its blocks back. That request is normally one the front end sends for
the purpose; it names the pin in ``SamplingParams.extra_args``.

A pin belongs to who declared it, and ends when its time is up. A prompt with modules pins these,
wherever they are imported, and nothing behind them.

Pins are for the base model and prompts without ``cache_salt``: others have other block hashes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, KeysView, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.kv_cache_utils import resolve_block_hashes

from vllm_relay.commands.errors import CommandError
from vllm_relay.modules.prompt.plan import ModulePlan, plan_of_request
from vllm_relay.prefix_cache.pins.pin import Pin, Room, chain_of, check_pin, digest_of

EXTRA_ARG = "relay_pin"
"""The key in ``SamplingParams.extra_args`` under which a request names the pin it computes."""
MAX_PINS = 1024
"""Pins of the same blocks need no room in the KV cache, but a place in every list."""
_MAX_NAMED = 10


class PinTable:
    """The pins of one scheduler.

    Args:
        scheduler: has ``kv_cache_manager``, ``max_model_len`` and ``block_size``, as vLLM's.
        max_pinned_fraction: share of the KV cache that all pins together may take.
    """

    def __init__(
        self,
        scheduler: Any,
        max_pinned_fraction: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._room = Room(scheduler, max_pinned_fraction)
        self._clock = clock
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        # vLLM 0.33: with EAGLE and MTP the hash of a block covers what its draft was made of
        self._lookahead_tokens = getattr(self._pool, "num_hash_lookahead_tokens", 0)
        # without such hashes, lookups leave out the last block that they find
        self._drops_last_block = self._manager.use_eagle
        self._pins: dict[str, Pin] = {}
        self._holders: Counter[int] = Counter()  # block id -> pins that hold it
        self.num_changes = 0
        """How often pins have come to hold blocks, or ceased to."""
        self._chains: Counter[int] = Counter()  # of resident pins without modules
        self._computed_before_reset: set[str] = set()  # requests
        self._blocks_before_reset: dict[str, list[Any]] = {}  # by pin id

    @property
    def held_blocks(self) -> KeysView[int]:
        """The ids of the blocks that pins hold."""
        return self._holders.keys()

    @property
    def num_blocks(self) -> int:
        """Blocks that pins hold, each counted once."""
        return len(self._holders)

    @property
    def num_bytes(self) -> int:
        """Bytes of KV cache in these blocks."""
        return self.num_blocks * self.block_bytes

    def declare(
        self,
        pin_id: str,
        token_ids: Sequence[int],
        plan: ModulePlan | None = None,
        *,
        owner: str = "python",
        ttl_s: float | None = None,
        declaration: str | None = None,
    ) -> dict[str, Any]:
        """Make a cold pin of the full KV blocks of ``token_ids``, or of the modules of a plan.

        Declaring it again with the same prompt changes nothing but its time, and that only for its
        owner.

        Args:
            plan: of a prompt with modules; ``token_ids`` are those of its slots.
            ttl_s: seconds from now until it is unpinned; None: never.
            declaration: a name by which :meth:`settle` knows a pin that is new.

        Returns:
            The pin as in :meth:`entries`, and as ``prompt_tokens`` how many of the prompt's first
            tokens a request has to compute.

        Raises:
            CommandError: 400 the prompt cannot be a pinned one, 403 the pin is another owner's, 409
                the id is taken, 507 pins have no such room.
        """
        if not self._manager.enable_caching:
            raise CommandError(400, "prompts can be pinned only with --enable-prefix-caching")
        check_pin(pin_id, ttl_s)
        self.expire()
        num_tokens = len(token_ids) if plan is None else plan.num_stored_slots
        self._check_length(num_tokens, plan)
        prompt = digest_of(token_ids, plan)
        expires_s = math.inf if ttl_s is None else self._clock() + ttl_s
        pin = self._pins.get(pin_id)
        if pin is not None:
            if pin.prompt != prompt:
                raise CommandError(
                    409, f"pin {pin_id!r} has another prompt: unpin it, or give another id"
                )
            if pin.owner == owner:
                pin.expires_s = expires_s
            elif ttl_s is not None:
                pin.check_owner(owner)
            pin.problem = pin.declaration = None
            return self._declared(pin)
        if len(self._pins) >= MAX_PINS:
            raise CommandError(
                507, f"{len(self._pins)} prompts are pinned, the most there can be: unpin another"
            )
        block_size = self._scheduler.block_size
        num_slots = (num_tokens - self._lookahead_tokens) // block_size * block_size
        prefix = token_ids[: num_slots + self._lookahead_tokens]
        chain = chain_of(prefix, block_size, self._lookahead_tokens) if plan is None else ()
        num_new = self._num_new_blocks(num_slots, chain)
        cold = sum(self._num_new_blocks(each.num_slots, each.chain) for each in self._cold())
        self._room.check(pin_id, num_new, self.num_blocks + cold)
        pin = self._pins[pin_id] = Pin(
            id=pin_id,
            owner=owner,
            declaration=declaration,
            expires_s=expires_s,
            prompt=prompt,
            num_slots=num_slots,
            prefix=digest_of(prefix),
            num_prefix_tokens=len(prefix),
            chain=chain,
            plan=plan,
        )
        return self._declared(pin)

    def settle(self, pin_id: str, declaration: str) -> dict[str, Any]:
        """What has become of a declared pin; one that is new, and still cold, is forgotten.

        Raises:
            CommandError: 409 it is gone or was not computed, 507 it found no room.
        """
        self.expire()
        pin = self._pins.get(pin_id)
        if pin is None:
            raise CommandError(
                409,
                f"pin {pin_id!r} was unpinned before it was computed, or its time had passed: try "
                "again, with a longer ttl_s if it had one",
            )
        if pin.blocks:
            pin.declaration = None
            return self._describe(pin)
        problem = pin.problem
        if pin.declaration == declaration:
            self._forget(pin)
        if problem is not None:
            raise CommandError(507, problem)
        raise CommandError(
            409,
            f"the request that computed pin {pin_id!r} ended without having computed all of it: "
            "try again",
        )

    def unpin(self, pin_id: str, owner: str | None = None) -> None:
        """Forget a pin; its blocks can be evicted again, the last ones first.

        Args:
            owner: who asks; None: who may unpin all.

        Raises:
            CommandError: 403 it is another owner's, 404 there is no such pin.
        """
        pin = self._get(pin_id)
        if owner is not None:
            pin.check_owner(owner)
        self._forget(pin)

    def entries(self) -> list[dict[str, Any]]:
        """The pins: id, owner, tokens, blocks and bytes held, whether resident, and why not.

        Blocks that several pins hold are counted for each of them.
        """
        self.expire()
        return [self._describe(pin) for pin in self._pins.values()]

    def expire(self) -> None:
        """Unpin what has had its time. To be called before each step."""
        now_s = self._clock()
        for pin in [each for each in self._pins.values() if each.expires_s <= now_s]:
            self._forget(pin)

    def before_free(self, request: Any) -> None:
        """Hold the blocks of cold pins that ``request`` has computed.

        To be called while the request still holds its blocks, whether it is finished, aborted or
        preempted: what it has not computed is not found in the prefix cache.
        """
        if request.request_id in self._computed_before_reset:
            self._computed_before_reset.discard(request.request_id)
            return
        cold = self._cold()
        if not cold:
            return
        self._learn_hashes(request)
        hashes = set(request.block_hashes)
        for pin in cold:
            # hashes are chained, and the last one stands for all; if not, `_hold` looks at all
            if pin.block_hashes and pin.block_hashes[-1] in hashes:
                self._hold(pin)

    def reset(self) -> None:
        """Make all pins cold, as the prefix cache is going to be emptied.

        Requests that are running now have computed with what the reset is to forget, so they do
        not make a pin resident.
        """
        resident = [pin for pin in self._pins.values() if pin.blocks]
        self._blocks_before_reset = {pin.id: pin.blocks for pin in resident}
        for pin in resident:
            self._release(pin)
        running = getattr(self._scheduler, "running", ())
        self._computed_before_reset = {request.request_id for request in running}

    def undo_reset(self) -> None:
        """Hold the blocks again: the prefix cache was not emptied after all."""
        self._computed_before_reset.clear()
        for pin_id, blocks in self._blocks_before_reset.items():
            self._take(self._pins[pin_id], blocks)
        self._blocks_before_reset.clear()

    def _get(self, pin_id: str) -> Pin:
        self.expire()
        pin = self._pins.get(pin_id)
        if pin is None:
            first = list(islice(self._pins, _MAX_NAMED))
            more = len(self._pins) - len(first)
            known = ", ".join(first) + (f" and {more} more" if more else "")
            raise CommandError(404, f"there is no pin {pin_id!r}; pins: {known or 'none'}")
        return pin

    def _forget(self, pin: Pin) -> None:
        self._release(pin)
        del self._pins[pin.id]

    def _cold(self) -> list[Pin]:
        return [pin for pin in self._pins.values() if not pin.blocks]

    def _describe(self, pin: Pin) -> dict[str, Any]:
        return {
            "id": pin.id,
            "owner": pin.owner,
            "expires_in_s": (
                None if math.isinf(pin.expires_s) else round(pin.expires_s - self._clock(), 3)
            ),
            "tokens": pin.num_tokens,
            "blocks": len(pin.blocks),
            "bytes": len(pin.blocks) * self.block_bytes,
            "resident": bool(pin.blocks),
            "problem": pin.problem,
        }

    def _declared(self, pin: Pin) -> dict[str, Any]:
        return {**self._describe(pin), "prompt_tokens": pin.num_prefix_tokens}

    def _check_length(self, num_tokens: int, plan: ModulePlan | None) -> None:
        if num_tokens == 0 and plan is not None:
            raise CommandError(400, "the prompt has no modules: give it as text to pin it")
        block_size, max_model_len = self._scheduler.block_size, self._scheduler.max_model_len
        least, why = block_size + self._lookahead_tokens, "--block-size"
        if self._drops_last_block:
            least += block_size
            why = (
                "twice --block-size: with EAGLE or MTP vLLM computes the last block of what it "
                "finds again"
            )
        elif self._lookahead_tokens:
            why = (
                f"--block-size, and {self._lookahead_tokens} tokens behind: with EAGLE or MTP they "
                "are part of a block's hash"
            )
        if num_tokens < least:
            raise CommandError(
                400,
                f"a prompt of {num_tokens} tokens was given, but only full KV blocks can be "
                f"pinned: expected at least {least} tokens ({why})",
            )
        if num_tokens >= max_model_len:
            raise CommandError(
                400,
                f"a prompt of {num_tokens} tokens was given, expected fewer than "
                f"max_model_len={max_model_len}",
            )

    def _learn_hashes(self, request: Any) -> None:
        """Take the block hashes of a pin's own first request: other requests may name it too."""
        extra_args = getattr(request.sampling_params, "extra_args", None) or {}
        pin_id = extra_args.get(EXTRA_ARG)
        pin = self._pins.get(pin_id) if isinstance(pin_id, str) else None
        if pin is None or pin.blocks or pin.block_hashes:
            return
        depth = pin.num_slots // self._pool.hash_block_size
        if (
            request.lora_request is None
            and request.cache_salt is None
            and not request.mm_features
            and len(request.block_hashes) >= depth
            and request.prompt_token_ids is not None
            and len(request.prompt_token_ids) >= pin.num_prefix_tokens
            and digest_of(request.prompt_token_ids[: pin.num_prefix_tokens]) == pin.prefix
            and plan_of_request(request) == pin.plan
        ):
            pin.block_hashes = list(request.block_hashes[:depth])

    def _hold(self, pin: Pin) -> None:
        """Make ``pin`` resident if all its blocks are cached and there is room."""
        num_tokens = pin.num_slots
        # what vLLM reads of a request; of a prompt's tokens it looks up all but the last
        lookup = SimpleNamespace(
            block_hashes=pin.block_hashes,
            num_tokens=num_tokens + 1,
            skip_reading_prefix_cache=False,
        )
        cached, num_cached_tokens, *_ = self._manager.get_computed_blocks(lookup)
        blocks = [block for group in cached.blocks for block in group if not block.is_null]
        if self._drops_last_block:
            blocks += self._blocks_behind(pin, num_cached_tokens)
            num_cached_tokens += self._scheduler.block_size
        if num_cached_tokens < num_tokens:
            return
        num_new = sum(block.block_id not in self._holders for block in blocks)
        try:
            self._room.check(pin.id, num_new, self.num_blocks)
        except CommandError as error:
            pin.problem = str(error)
            return
        pin.problem = None
        self._take(pin, blocks)

    def _blocks_behind(self, pin: Pin, num_cached_tokens: int) -> list[Any]:
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

    def _take(self, pin: Pin, blocks: list[Any]) -> None:
        self.num_changes += 1
        self._pool.touch(blocks)
        self._holders.update(block.block_id for block in blocks)
        self._chains.update(pin.chain)
        pin.blocks = blocks

    def _release(self, pin: Pin) -> None:
        self.num_changes += 1
        if pin.blocks:
            _discount(self._chains, pin.chain)
        self._pool.free_blocks(reversed(pin.blocks))
        _discount(self._holders, [block.block_id for block in pin.blocks])
        pin.blocks = []

    def _num_new_blocks(self, num_slots: int, chain: tuple[int, ...]) -> int:
        """Blocks a pin needs beyond those of resident pins, at most."""
        depth = next((i for i, link in enumerate(chain) if link not in self._chains), len(chain))
        common = depth * self._scheduler.block_size
        return self._room.num_blocks_of(num_slots) - self._room.num_blocks_of(common)

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block of all layers, in one worker."""
        config = self._manager.kv_cache_config
        # `size` is that of the one allocation in which all tensors lie
        size = max((tensor.size for tensor in config.kv_cache_tensors), default=0)
        return size // config.num_blocks


def _discount(counter: Counter[int], keys: Iterable[int]) -> None:
    for key in keys:
        counter[key] -= 1
        if counter[key] == 0:
            del counter[key]
