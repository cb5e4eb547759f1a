# SPDX-License-Identifier: Apache-2.0
"""Which requests become contexts, and which contexts leave."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from vllm.v1.request import Request, RequestStatus

from vllm_relay.config import RelayConfig
from vllm_relay.long_context.orders import ContextReport, KeptContext, asks_to_be_kept
from vllm_relay.long_context.scheduling.catalog import (
    ContextCatalog,
    ContextRecord,
    HeldMemory,
    with_parents,
)
from vllm_relay.long_context.scheduling.host_memory import HostMemory
from vllm_relay.long_context.scheduling.memory import bytes_of_gib
from vllm_relay.sparse.contexts.context_store import context_id_of

logger = logging.getLogger("vllm.relay")

_FINISHED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
_MAX_DECLARED = 1024
"""Contexts that the operator has asked for and that are not computed yet."""


def is_known_by_tokens(request: Request) -> bool:
    """Whether equal tokens mean equal keys and values."""
    return (
        request.lora_request is None
        and not request.cache_salt
        and not request.mm_features
        and request.prompt_embeds is None
    )


def is_kept(request: Request) -> bool:
    """Whether a request that has ended asked to become a context, and was not aborted."""
    return (
        asks_to_be_kept(request.sampling_params)
        and is_known_by_tokens(request)
        and request.status in _FINISHED
    )


@dataclass
class ClientQuota:
    """
    Attributes:
        max_tokens: of all of them together; None: no limit, 0: none are kept.
    """

    max_tokens: int | None

    def leaving(
        self,
        num_tokens: int,
        missing_bytes: int,
        contexts: Sequence[ContextRecord],
        freed_bytes: Callable[[Collection[ContextRecord]], int],
        continued: Collection[ContextRecord] = (),
    ) -> list[ContextRecord] | None:
        """Which contexts have to leave before one of so many tokens is kept.

        Args:
            num_tokens: besides those of a context that it continues.
            missing_bytes: of host memory, for the new one.
            contexts: that requests asked for; the first ones leave first.
            freed_bytes: what is free when these contexts leave.
            continued: those that stay, since the new one continues them.

        Returns:
            None: it is larger than all may be.
        """
        if self.max_tokens is None:
            return []
        staying_tokens = sum(each.num_own_tokens for each in contexts if each in continued)
        if num_tokens + staying_tokens > self.max_tokens:
            logger.warning(
                "vllm-relay: a request of %d tokens is not kept: all contexts of clients together "
                "may have %d, and it continues %d of them (client_contexts, "
                "max_client_context_tokens)",
                num_tokens, self.max_tokens, staying_tokens,
            )  # fmt: skip
            return None
        excess_tokens = sum(each.num_own_tokens for each in contexts) + num_tokens - self.max_tokens
        leaving: list[ContextRecord] = []
        freed = 0
        for each in contexts:
            if each in continued:
                continue
            then = freed_bytes([*leaving, each])
            if excess_tokens > 0 or freed < min(then, missing_bytes):
                leaving.append(each)
                excess_tokens -= each.num_own_tokens
                freed = then
        return leaving


class KeptContexts:
    """The contexts of an engine, beside its scheduler.

    Attributes:
        has_loaded: those that the workers have found are known.

    Args:
        num_ranks: each has a part of every context.
        problem: why none can be kept, if so.
        min_tokens, max_model_len: of a prompt that can become one: at least, and fewer than.
    """

    def __init__(
        self,
        options: RelayConfig,
        catalog: ContextCatalog,
        memory: HostMemory,
        *,
        num_ranks: int,
        problem: str | None,
        min_tokens: int,
        max_model_len: int,
    ) -> None:
        self.catalog = catalog
        self.has_loaded = False
        self._memory = memory
        self._num_ranks = num_ranks
        self._problem = problem
        self._min_tokens, self._max_model_len = min_tokens, max_model_len
        self._disk_bytes = bytes_of_gib(options.context_disk_gib)
        keeps_none = options.client_contexts == "off"
        self._quota = ClientQuota(0 if keeps_none else options.max_client_context_tokens)
        self._declared: deque[str] = deque(maxlen=_MAX_DECLARED)
        self._pending: dict[str, KeptContext] = {}  # by request
        self._evicted: list[str] = []

    def refuse(
        self, num_tokens: int, num_reused: int = 0, leaving_bytes: int = 0
    ) -> tuple[int, str] | None:
        """Why a prompt of so many tokens cannot become a context, with an HTTP status; or None.

        Args:
            num_reused: first ones that another context has.
            leaving_bytes: of contexts that leave for it.
        """
        if self._problem is not None:
            return 501, self._problem
        if num_tokens < self._min_tokens:
            return 400, (
                f"a prompt of {num_tokens} tokens was given, expected at least min_context_tokens="
                f"{self._min_tokens}: a shorter one is computed faster than it is looked up"
            )
        if num_tokens >= self._max_model_len:
            return 400, (
                f"a prompt of {num_tokens} tokens was given, expected fewer than max_model_len="
                f"{self._max_model_len}"
            )
        needed, free = self._memory.bytes_for(num_tokens - num_reused), self._free_bytes()
        if needed - leaving_bytes > free:
            return 507, (
                f"a context of {num_tokens} tokens takes {needed} bytes of host memory, and "
                f"{max(0, free)} are left beside the longest request: delete contexts, or raise "
                "host_memory_gib"
            )
        return None

    def _free_bytes(self) -> int:
        """What is left must hold the longest request, else that would wait forever."""
        free = self._memory.capacity_bytes - self._memory.context_bytes
        return free - self._memory.bytes_for(self._max_model_len)

    def declare(self, context_id: str) -> None:
        """The operator asks for a context; its request comes next, if it is not there."""
        record = self.catalog.get(context_id)
        if record is not None:
            record.is_clients = False
        elif context_id not in self._declared:
            self._declared.append(context_id)

    def serve_clients(self, keeps: bool) -> None:
        """The engine is that of a server: requests that ask to be kept are others'.

        Args:
            keeps: whether any are kept.
        """
        if not keeps:
            self._quota.max_tokens = 0
        elif self._quota.max_tokens is None:
            self._quota.max_tokens = (
                self._memory.capacity_bytes // 2 // self._memory.bytes_per_token
            )

    def delete(self, context_id: str) -> bool:
        """No later request reuses it, and the workers do not make it if they have not begun to.

        Returns:
            whether they may have it.
        """
        self.catalog.remove(context_id)
        others = {key: each for key, each in self._pending.items() if each.context_id != context_id}
        is_told_of = len(others) == len(self._pending)
        self._pending = others
        return is_told_of

    def evict(self, context_id: str) -> None:
        """As `delete`; the workers are told of it."""
        if self.delete(context_id):
            self._evicted.append(context_id)

    def load(
        self, context_ids: Collection[str], tokens: Mapping[str, Sequence[int] | np.ndarray]
    ) -> None:
        """The contexts that the workers have are all there are.

        Args:
            tokens: of those that are not known yet, by id.
        """
        self.has_loaded = True
        there = {*context_ids, *(each.context_id for each in self._pending.values())}
        for record in list(self.catalog):
            if record.id not in there:
                self.delete(record.id)
        for context_id, each in tokens.items():
            if context_id not in self.catalog:
                self.catalog.add(ContextRecord(context_id, np.asarray(each, np.int64)))

    def update(self, reports: Iterable[ContextReport]) -> None:
        """What contexts take has changed; those that have to leave a folder that is full do so."""
        self.catalog.update(reports, self._num_ranks)
        limit = self._disk_bytes
        if limit is None:
            return
        # what never fits is first: no other need leave for it
        for record in sorted(
            self.catalog.in_leaving_order(), key=lambda each: each.file_bytes <= limit
        ):
            if self.catalog.file_bytes <= limit:
                return
            if record.file_bytes:
                self.evict(record.id)

    def pending(self) -> list[ContextReport]:
        """Those that the workers are told of with the next step."""
        records = [self.catalog[kept.context_id] for kept in self._pending.values()]
        return [
            ContextReport(
                context_id=record.id,
                num_tokens=len(record.tokens),
                state="indexing",
                memory_bytes=record.memory.num_bytes // self._num_ranks,
                file_bytes=0,
                parent_id=record.parent_id,
                num_own_tokens=record.num_own_tokens,
            )
            for record in records
        ]

    def take_pending(self) -> dict[str, KeptContext]:
        """By request; the workers are told of them now."""
        pending, self._pending = self._pending, {}
        return pending

    def take_evicted(self) -> list[str]:
        """Contexts that had to leave and that the workers have not been told of."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def keep(self, request: Request, num_tokens: int) -> None:
        """Makes a context of the first tokens of a request that has ended, if there is room."""
        tokens = list(request.all_token_ids[:num_tokens])
        array = np.asarray(tokens, np.int64)
        context_id = context_id_of(array)
        is_clients = context_id not in self._declared
        if not is_clients:
            self._declared.remove(context_id)
        if context_id in self.catalog:
            return
        request_id, memory = request.request_id, self._memory
        reused = memory.reused(request_id)
        num_own_tokens = num_tokens - (0 if reused is None else reused.num_tokens)
        parent = memory.record_read(request_id)
        leaving = self._leaving_for_client(num_own_tokens, parent) if is_clients else []
        if leaving is None:
            return
        leaving_bytes = memory.freed_bytes(leaving)
        if self.refuse(num_tokens, num_tokens - num_own_tokens, leaving_bytes) is not None:
            return
        for each in leaving:
            self.evict(each.id)
        # it has the memory that the request has: what that reused is not stored again
        held = HeldMemory(memory.bytes_for(num_own_tokens))
        self.catalog.add(
            ContextRecord(
                context_id, array, parent, is_clients, num_own_tokens=num_own_tokens, memory=held
            )
        )
        self._pending[request_id] = KeptContext(context_id, tokens)

    def _leaving_for_client(
        self, num_tokens: int, continued: ContextRecord | None
    ) -> list[ContextRecord] | None:
        """Contexts that requests asked for and that leave for one of so many tokens, besides those
        of a context that it continues; None: it cannot be kept."""
        missing_bytes = self._memory.bytes_for(num_tokens) - self._free_bytes()
        of_clients = [each for each in self.catalog.in_leaving_order() if each.is_clients]
        staying = with_parents([] if continued is None else [continued])
        return self._quota.leaving(
            num_tokens, missing_bytes, of_clients, self._memory.freed_bytes, staying
        )
