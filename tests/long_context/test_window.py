# SPDX-License-Identifier: Apache-2.0
"""What the device holds, for requests that go forward in steps of any size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.long_context.window import PrefillMode, Residency, WindowPolicy

MODES = get_args(PrefillMode)

policies = st.builds(
    WindowPolicy,
    block_size_tokens=st.sampled_from([1, 3, 32]),
    sink_tokens=st.integers(0, 100),
    window_tokens=st.integers(1, 150),
    min_context_tokens=st.integers(1, 300),
    prefill=st.sampled_from(MODES),
)
positions = st.integers(0, 600)


def policy_of(prefill: PrefillMode = "exact_offload", **kwargs: int) -> WindowPolicy:
    """Blocks of 32 tokens, one of them for sinks and two for the window."""
    options = {"block_size_tokens": 32, "sink_tokens": 20, "window_tokens": 64}
    return WindowPolicy(**(options | {"min_context_tokens": 100} | kwargs), prefill=prefill)


@pytest.mark.parametrize(
    ("num_computed_tokens", "expected"),
    [
        (99, (0, 0)),  # too short
        (100, (0, 0)),
        (127, (0, 0)),  # its window begins in the sinks
        (128, (32, 64)),
        (159, (32, 64)),
        (160, (32, 96)),
    ],
)
def test_sinks_and_window_stay(num_computed_tokens: int, expected: tuple[int, int]) -> None:
    assert policy_of().residency(num_computed_tokens, 1000) == expected


def test_a_resident_prompt_stays_until_it_is_computed() -> None:
    policy = policy_of("exact_resident")
    assert policy.residency(999, 1000) == (0, 0)
    assert policy.residency(1000, 1000) == (32, 928)


def test_tokens_that_were_never_on_the_device_are_the_hosts() -> None:
    for mode in MODES:
        policy = policy_of(mode)
        assert policy.residency(650, 600, first_resident_token=640) == (0, 640)
        assert policy.residency(704, 600, first_resident_token=640) == (0, 640)
        assert policy.residency(736, 600, first_resident_token=640) == (0, 672)
    # before the prompt is computed too
    assert policy_of("exact_resident").residency(800, 900, first_resident_token=640) == (0, 640)


@given(policies, positions, positions, st.integers(0, 20))
def test_the_hosts_range(
    policy: WindowPolicy, num_computed_tokens: int, num_prompt_tokens: int, first_block: int
) -> None:
    size = policy.block_size_tokens
    first_resident = min(first_block, num_computed_tokens // size) * size
    residency = policy.residency(num_computed_tokens, num_prompt_tokens, first_resident)
    begin, end = residency
    assert begin % size == end % size == 0
    assert residency.num_host_tokens == end - begin >= 0
    if first_resident:
        assert begin == 0 and first_resident <= end
        assert end == first_resident or end <= num_computed_tokens - policy.window_tokens
        return
    if not residency.num_host_tokens:
        assert residency == (0, 0)
        return
    assert policy.sink_tokens <= begin < policy.sink_tokens + size
    # the window is whole, and less than a block more stays
    assert num_computed_tokens - policy.window_tokens - size < end
    assert end <= num_computed_tokens - policy.window_tokens
    assert num_computed_tokens >= policy.min_context_tokens
    assert policy.prefill == "exact_offload" or num_computed_tokens >= num_prompt_tokens


@given(policies, positions, positions, st.integers(0, 20))
def test_a_token_that_has_left_never_comes_back(
    policy: WindowPolicy, start: int, num_prompt_tokens: int, first_block: int
) -> None:
    first_resident = min(first_block, start // policy.block_size_tokens) * policy.block_size_tokens
    before = policy.residency(start, num_prompt_tokens, first_resident)
    for num_computed_tokens in range(start, start + 200):
        after = policy.residency(num_computed_tokens, num_prompt_tokens, first_resident)
        if before.num_host_tokens:
            assert after.sink_end == before.sink_end
            assert after.window_begin >= before.window_begin
        before = after


@given(policies, st.lists(st.integers(1, 90), max_size=12), positions)
def test_what_has_left_was_mirrored_since_the_first_step(
    policy: WindowPolicy, chunks: list[int], num_prompt_tokens: int
) -> None:
    """The worker begins to copy in the step that ends with enough tokens, with all before it: all
    of these are still on the device."""
    num_computed_tokens, has_copy = 0, False
    for chunk in chunks:
        chunk = min(chunk, max(1, num_prompt_tokens - num_computed_tokens))
        residency = policy.residency(num_computed_tokens, num_prompt_tokens)
        mirrors = policy.mirrors(num_computed_tokens + chunk, num_prompt_tokens)
        assert has_copy or not residency.num_host_tokens
        assert mirrors or not has_copy
        has_copy = mirrors
        num_computed_tokens += chunk


@dataclass
class SimulatedRequest:
    """Blocks as vLLM's KV cache manager gives and takes them."""

    policy: WindowPolicy
    num_prompt_tokens: int
    max_model_len_tokens: int
    num_computed_tokens: int = 0  # or in flight
    num_in_flight_tokens: int = 0
    first_resident_token: int = 0
    freed: Residency = Residency(0, 0)
    most_blocks: int = 0

    def schedule(self, num_new_tokens: int) -> None:
        num_new_tokens = min(num_new_tokens, self.max_model_len_tokens - self.num_computed_tokens)
        num_processed = self.num_computed_tokens - self.num_in_flight_tokens
        self.freed = self.policy.residency(
            num_processed, self.num_prompt_tokens, self.first_resident_token
        )
        size = self.policy.block_size_tokens
        self.num_computed_tokens += num_new_tokens
        self.num_in_flight_tokens += num_new_tokens
        num_blocks = -(-self.num_computed_tokens // size) - self.freed.num_host_tokens // size
        self.most_blocks = max(self.most_blocks, num_blocks)


@given(
    policies,
    st.integers(1, 200),
    st.integers(1, 600),
    st.integers(1, 600),
    st.integers(0, 600),
    st.data(),
)
def test_no_request_holds_more_blocks_than_said(
    policy: WindowPolicy,
    max_in_flight_tokens: int,
    max_model_len_tokens: int,
    num_prompt_tokens: int,
    start: int,
    data: st.DataObject,
) -> None:
    most = policy.max_blocks(max_model_len_tokens, max_in_flight_tokens)
    request = SimulatedRequest(policy, num_prompt_tokens, max_model_len_tokens)
    if policy.min_context_tokens <= start < max_model_len_tokens:
        request.num_computed_tokens = start
        request.first_resident_token = start // policy.block_size_tokens * policy.block_size_tokens
    in_flight: list[int] = []
    while request.num_computed_tokens < max_model_len_tokens:
        if in_flight and (sum(in_flight) == max_in_flight_tokens or data.draw(st.booleans())):
            request.num_in_flight_tokens -= in_flight.pop(0)
            continue
        room = max_in_flight_tokens - sum(in_flight)
        chunk = data.draw(st.one_of(st.just(room), st.integers(1, room)))
        before = request.num_in_flight_tokens
        request.schedule(chunk)
        in_flight.append(request.num_in_flight_tokens - before)
        assert request.most_blocks <= most


@given(policies, st.integers(1, 200), st.integers(1, 1200))
def test_the_number_of_blocks_is_not_needlessly_large(
    policy: WindowPolicy, max_in_flight_tokens: int, max_model_len_tokens: int
) -> None:
    """Some request takes all of them but one."""
    most = 0
    for start in range(min(max_model_len_tokens, 700)):
        request = SimulatedRequest(policy, max_model_len_tokens, max_model_len_tokens, start)
        request.schedule(max_in_flight_tokens)
        most = max(most, request.most_blocks)
    assert (
        most
        >= min(
            policy.max_blocks(max_model_len_tokens, max_in_flight_tokens),
            -(-700 // policy.block_size_tokens),
        )
        - 2
    )


def test_from_min_context_tokens_on_a_request_is_long() -> None:
    policy = policy_of(min_context_tokens=200)
    assert policy.residency(199, 0) == (0, 0)
    assert policy.residency(200, 0) == (32, 128)
    assert [policy.mirrors(n, 10) for n in (199, 200)] == [False, True]
    # what is known to become long is copied from its first token on
    assert [policy.mirrors(1, n) for n in (199, 200)] == [False, True]


def test_a_resident_prompt_may_take_all_blocks() -> None:
    assert policy_of("exact_resident").max_blocks(1000, 50) == 32
    assert policy_of().max_blocks(1000, 50) == 6
    assert policy_of().max_blocks(150, 50) == 5
