# SPDX-License-Identifier: Apache-2.0
"""Long requests in vLLM's own KVCacheManager."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from tests.long_context.kv_cache_managers import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    POLICY,
    SHAPE,
    Blocks,
    spec_of,
)
from tests.support.depth import cases
from vllm_relay.long_context.scheduling.kv_cache_spec import (
    RelaySparseManager,
    register_kv_cache_spec,
)
from vllm_relay.long_context.window import WindowPolicy

try:
    from vllm.v1.core.kv_cache_planning import is_kv_cache_spec_uniform
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import is_kv_cache_spec_uniform

MAX_IN_FLIGHT_TOKENS = 30

policies = st.builds(
    WindowPolicy,
    block_size_tokens=st.just(BLOCK_SIZE),
    sink_tokens=st.integers(0, 20),
    window_tokens=st.integers(1, 40),
    min_context_tokens=st.integers(1, 100),
    prefill=st.sampled_from(["exact_offload", "exact_resident"]),
)


def whole_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


@settings(max_examples=cases(15))
@given(policies, st.integers(1, 300), st.booleans(), st.data())
def test_a_request_holds_what_the_window_says(
    policy: WindowPolicy, num_prompt_tokens: int, enable_caching: bool, data: st.DataObject
) -> None:
    """In steps of any size, of which some are in flight when the next one is scheduled, in a pool
    that is no larger than one request may need."""
    spec = spec_of(policy, MAX_IN_FLIGHT_TOKENS)
    blocks = Blocks(spec, 1 + spec.max_blocks_per_request, enable_caching)
    request = blocks.request(list(range(num_prompt_tokens)))
    in_flight: list[int] = []
    end = min(MAX_MODEL_LEN, num_prompt_tokens + 60)
    while request.num_computed_tokens < end:
        room = MAX_IN_FLIGHT_TOKENS - sum(in_flight)
        if in_flight and (not room or data.draw(st.booleans())):
            request.num_in_flight_tokens -= in_flight.pop(0)
            continue
        while request.num_tokens <= request.num_computed_tokens:
            request.append_output_token_ids(7)
        left = request.num_tokens - request.num_computed_tokens
        chunk = data.draw(st.integers(1, min(room, left)))
        num_processed = request.num_computed_tokens - request.num_in_flight_tokens
        if request.num_computed_tokens:
            assert blocks.go_on(request, chunk)
        else:
            assert blocks.begin(request, chunk) == 0
        in_flight.append(chunk)
        table = blocks.table(request)
        gap = [each // BLOCK_SIZE for each in policy.residency(num_processed, num_prompt_tokens)]
        assert len(table) == whole_blocks(request.num_computed_tokens)
        assert [i for i, block in enumerate(table) if not block] == list(range(*gap))
        held = [block for block in table if block]
        assert len(set(held)) == len(held) <= spec.max_blocks_per_request
        assert blocks.num_free == blocks.pool.num_gpu_blocks - 1 - len(held)
    blocks.manager.free(request)
    blocks.check_all_are_free()


@settings(max_examples=cases(15))
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 25)), min_size=1, max_size=60))
def test_no_block_is_lost_or_freed_twice_among_requests(steps: list[tuple[int, int]]) -> None:
    """Four requests with common beginnings: they share blocks, run out of them, and end."""
    blocks = Blocks(spec_of(), 40)
    running: dict[int, Request] = {}
    for number, chunk in steps:
        if number not in running:
            request = blocks.request([*range(30 * number), *[1000 + number] * 100])
            if blocks.begin(request, chunk) is not None:
                running[number] = request
            continue
        request = running[number]
        request.num_in_flight_tokens = 0
        left = request.num_tokens - request.num_computed_tokens
        if not left or not blocks.go_on(request, min(chunk, left)):
            blocks.manager.free(running.pop(number))
        held = {block for each in running.values() for block in blocks.table(each)} - {0}
        assert blocks.num_free == blocks.pool.num_gpu_blocks - 1 - len(held)
    for request in running.values():
        blocks.manager.free(request)
    blocks.check_all_are_free()


def test_the_prefix_cache_hits_what_is_left_without_a_gap() -> None:
    blocks = Blocks(spec_of(), 1 + MAX_MODEL_LEN // BLOCK_SIZE)
    first = blocks.request(list(range(200)))
    blocks.run(first, 25)
    (cached,) = blocks.manager.get_computed_blocks(blocks.request(list(range(200))))[0].blocks
    assert len(cached) == 49  # the last one is computed for its logits
    ids = [block.block_id for block in cached]
    assert 0 not in ids and len(set(ids)) == 49
    kept = [(i, block) for i, block in enumerate(blocks.table(first)) if block]
    assert len(kept) < 20
    assert all(ids[i] == block for i, block in kept if i < 49)
    # others take the blocks that were freed
    other = blocks.request([-1] * 200)
    blocks.run(other, 25)
    blocks.manager.free(other)
    another = blocks.request([-2] * 240)
    assert blocks.begin(another, 240) == 0
    second = blocks.request(list(range(200)))
    num_cached = blocks.begin(second, 10)
    assert num_cached is not None and num_cached % BLOCK_SIZE == 0
    table = blocks.table(second)[: num_cached // BLOCK_SIZE]
    assert table == blocks.table(first)[: len(table)]
    assert num_cached // BLOCK_SIZE == POLICY.sink_end // BLOCK_SIZE
    for request in (first, another, second):
        blocks.manager.free(request)
    blocks.check_all_are_free()


def test_a_request_whose_hit_fills_the_pool_is_admitted() -> None:
    spec = spec_of()
    blocks = Blocks(spec, 1 + spec.max_blocks_per_request)
    prompt = list(range(BLOCK_SIZE * spec.max_blocks_per_request))
    first = blocks.request(prompt)
    blocks.run(first, 30)
    blocks.manager.free(first)
    blocks.check_all_are_free()
    second = blocks.request([*prompt, *range(1000, 1010)])
    assert blocks.begin(second, 10) is not None


def test_blocks_of_tokens_that_were_never_here_are_null() -> None:
    blocks = Blocks(spec_of(), 60)
    (manager,) = blocks.manager.coordinator.single_type_managers
    assert isinstance(manager, RelaySparseManager)
    request = blocks.request(list(range(200)))
    blocks.run(request, 200)
    manager.first_resident_tokens[request.request_id] = 196
    request.append_output_token_ids(7)
    assert blocks.go_on(request, 1)
    table = blocks.table(request)
    assert not any(table[:49]) and all(table[49:])
    blocks.manager.free(request)
    assert not manager.first_resident_tokens
    blocks.check_all_are_free()


def test_memory_for_one_request_is_memory_for_its_blocks() -> None:
    spec = spec_of()
    assert spec.max_memory_usage_bytes(None) == spec.max_blocks_per_request * spec.page_size_bytes
    assert spec.max_blocks_per_request < MAX_MODEL_LEN // BLOCK_SIZE / 2


def test_layers_with_one_window_are_merged() -> None:
    spec = spec_of()
    merged = type(spec).merge([spec, replace(spec), replace(spec)])
    assert merged == spec and type(merged) is type(spec)
    assert is_kv_cache_spec_uniform({"a": spec, "b": replace(spec)})
    # what a spec of full attention has is merged as its class does it
    assert type(spec).merge([replace(spec, non_causal=True), spec]).non_causal


def test_layers_of_different_kinds_are_not_merged() -> None:
    spec = spec_of()
    for other in (
        replace(spec, policy=replace(POLICY, window_tokens=5)),
        replace(spec, max_blocks_per_request=7),
        replace(spec, num_kv_heads=2),
    ):
        with pytest.raises(AssertionError):
            type(spec).merge([spec, other])
        assert not is_kv_cache_spec_uniform({"a": spec, "b": other})


def test_a_full_layer_before_a_sliding_one_is_another_kind() -> None:
    assert not is_kv_cache_spec_uniform(
        {"full": spec_of(), "window": SlidingWindowSpec(**SHAPE, sliding_window=8)}
    )


def test_a_spec_keeps_what_full_attention_says() -> None:
    full = FullAttentionSpec(**{**SHAPE, "num_kv_heads": 3}, head_size_v=32, non_causal=True)
    spec = type(spec_of()).of(full, POLICY, 9)
    assert spec.page_size_bytes == full.page_size_bytes
    assert (spec.head_size_v, spec.num_kv_heads, spec.non_causal) == (32, 3, True)
    assert (spec.policy, spec.max_blocks_per_request) == (POLICY, 9)


def test_specs_are_pickled() -> None:
    assert pickle.loads(pickle.dumps(spec_of())) == spec_of()


def test_registering_again_changes_nothing() -> None:
    register_kv_cache_spec()
    spec = spec_of()
    assert KVCacheSpecRegistry.get_manager_class(spec) is RelaySparseManager
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(spec) is FullAttentionSpec
