# SPDX-License-Identifier: Apache-2.0
"""How much contexts may take that requests asked for, beside those of the operator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from vllm_relay.long_context.scheduling.context_record import ContextRecord

logger = logging.getLogger("vllm.relay")


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
