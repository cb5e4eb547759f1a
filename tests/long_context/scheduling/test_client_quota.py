# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Collection

import numpy as np

from vllm_relay.long_context.scheduling.catalog import ContextRecord
from vllm_relay.long_context.scheduling.kept_contexts import ClientQuota


def entry(context_id: str, num_own_tokens: int) -> ContextRecord:
    tokens = np.zeros(num_own_tokens, np.int64)
    return ContextRecord(context_id, tokens, is_clients=True, num_own_tokens=num_own_tokens)


CHAIN = [entry("turn", 10), entry("first", 50), entry("other", 20)]
TURN, FIRST, OTHER = CHAIN


def freed_bytes(contexts: Collection[ContextRecord]) -> int:
    """A byte a token; the first context takes memory as long as its turn is there."""
    return sum(
        len(each.tokens)
        for each in CHAIN
        if each in contexts and (each is not FIRST or TURN in contexts)
    )


def test_what_is_continued_stays_and_counts() -> None:
    quota = ClientQuota(100)
    assert quota.leaving(20, 0, CHAIN, freed_bytes, [TURN, FIRST]) == []
    assert quota.leaving(35, 0, CHAIN, freed_bytes, [TURN, FIRST]) == [OTHER]
    assert quota.leaving(41, 0, CHAIN, freed_bytes, [TURN, FIRST]) is None
    assert ClientQuota(None).leaving(41, 0, CHAIN, freed_bytes, [TURN]) == []


def test_contexts_of_a_chain_leave_until_there_is_memory() -> None:
    quota = ClientQuota(1000)
    assert quota.leaving(1, 10, CHAIN, freed_bytes) == [TURN]
    assert quota.leaving(1, 60, CHAIN, freed_bytes) == [TURN, FIRST]
    # what frees nothing does not leave for memory
    assert quota.leaving(1, 5, CHAIN[1:], freed_bytes) == [OTHER]
