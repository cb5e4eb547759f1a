# SPDX-License-Identifier: Apache-2.0
"""Prompts of an average shape."""

from __future__ import annotations

import pytest

from vllm_relay.tables.engines.base import PromptShape


@pytest.mark.parametrize("num_cached_tokens", [0, 5, 31, 32, 33, 188, 320])
def test_whole_blocks_are_shared(num_cached_tokens: int) -> None:
    """Shared tokens behind the last whole block would be computed anew by each prompt."""
    shape = PromptShape(num_cached_tokens, 10, 1)
    shared = [shape.num_shared_tokens(number, 32) for number in range(64)]
    assert all(each % 32 == 0 and abs(each - num_cached_tokens) < 32 for each in shared)
    assert 64 * num_cached_tokens - 32 < sum(shared) <= 64 * num_cached_tokens
