# SPDX-License-Identifier: Apache-2.0
"""Keys and values in host memory, by position, and the indexes over them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from vllm_relay.long_context.host import host_sequence
from vllm_relay.long_context.host.host_sequence import (
    COPIED_TOKENS_PER_ENCODED,
    EncodingBudget,
    HostLayer,
    HostSequence,
    Segment,
    SequencePlace,
)

KV_HEADS, HEAD_SIZE = 2, 32
UNINDEXED_TOKENS, SEGMENT_TOKENS = 10, 80


@pytest.fixture(autouse=True, scope="module")
def small_indexes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_sequence, "GRANULE_TOKENS", UNINDEXED_TOKENS)
        patch.setattr(host_sequence, "SEGMENT_TOKENS", SEGMENT_TOKENS)
        yield


def states(num_tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[tokens, kv_heads, size]"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, KV_HEADS, HEAD_SIZE, generator=generator).to(dtype)


def layer_of(
    num_tokens: int,
    begin: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    sink_end: int = 0,
    prompt_end: int = 0,
) -> HostLayer:
    """With random keys and values, and NaN behind them."""
    place = SequencePlace(begin, 550, sink_end, 7, prompt_end)
    layer = HostLayer(place, KV_HEADS, HEAD_SIZE, dtype)
    layer.keys.fill_(torch.nan)
    layer.values.fill_(torch.nan)
    layer.write(begin, states(num_tokens, 1, dtype), states(num_tokens, 2, dtype))
    return layer


def ranges_of(segments: list[Segment]) -> list[tuple[int, int]]:
    return [(segment.begin, segment.end) for segment in segments]


def check_segments(layer: HostLayer, end: int, compared: list[Segment] | None = None) -> int:
    """They are adjacent, from the first token on that has an index, and have the keys and values of
    their positions. Returns up to where they reach.

    Args:
        compared: whose keys and values were compared before; new ones are added.
    """
    at = layer.index_begin
    for segment in layer.segments_up_to(end):
        assert segment.begin == at < segment.end
        at = segment.end
        if compared is not None:
            if any(segment is each for each in compared):
                continue
            compared.append(segment)
        keys, values = layer.rows(segment.begin, segment.end)
        for head in range(KV_HEADS):
            index = segment.layer.indexes[head]
            np.testing.assert_array_equal(index.keys.to_float32(), keys[head].float())
            np.testing.assert_array_equal(
                segment.layer.values[head].to_float32(), values[head].float()
            )
    assert at <= max(end, layer.index_begin)
    return at


@settings(max_examples=cases(20))
@given(
    st.sampled_from([0, 7]),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_are_what_was_written_last(
    begin: int, writes: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    layer = HostLayer(SequencePlace(begin, 200, 0, 0, 0), KV_HEADS, HEAD_SIZE, dtype)
    keys, values = states(0, 0, dtype), states(0, 0, dtype)
    for seed, (back, num_tokens) in enumerate(writes):
        position = max(begin, layer.end - (0 if seed % 2 else back))
        new_keys, new_values = states(num_tokens, seed, dtype), states(num_tokens, -seed, dtype)
        if position - begin + num_tokens > 200:
            break
        layer.write(position, new_keys, new_values)
        keys = torch.cat([keys[: position - begin], new_keys])
        values = torch.cat([values[: position - begin], new_values])
        assert layer.end == begin + len(keys)
        for first in (begin, (begin + layer.end) // 2):
            found = layer.rows(first, layer.end)
            assert torch.equal(found[0], keys[first - begin :].transpose(0, 1))
            assert torch.equal(found[1], values[first - begin :].transpose(0, 1))


@settings(max_examples=cases(10))
@given(
    st.sampled_from([0, 5]),
    st.lists(st.integers(0, 35), min_size=1, max_size=12),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_indexes_are_adjacent_and_leave_less_than_a_granule(
    begin: int, strides: list[int], dtype: torch.dtype
) -> None:
    layer = layer_of(begin + sum(strides), dtype=dtype, sink_end=begin)
    end = begin
    for stride in strides:
        end += stride
        assert end - UNINDEXED_TOKENS < check_segments(layer, end) <= end


def test_a_segment_stays_while_others_come() -> None:
    layer = layer_of(500, sink_end=32, prompt_end=0)
    large = layer.segments_up_to(32 + 17 * UNINDEXED_TOKENS)[:2]
    assert ranges_of(large) == [(32, 112), (112, 192)]
    for granules in range(18, 24):
        segments = layer.segments_up_to(32 + granules * UNINDEXED_TOKENS + 3)
        assert segments[:2] == large
        assert len(segments) == 2 + granules - 16
    assert ranges_of(layer.segments_up_to(32 + 24 * UNINDEXED_TOKENS))[2:] == [(192, 272)]
    assert (192, 202) not in layer.segments


def test_a_prompt_is_encoded_while_it_is_computed() -> None:
    """Whole segments at once, the rest with the last token."""
    layer = layer_of(0, sink_end=5, prompt_end=200)
    known = []
    for first in range(0, 200, 25):
        layer.write(first, states(25, first), states(25, first + 1))
        known.append(list(layer.segments))
    assert known[2:5] == [[], [(5, 85)], [(5, 85)]]
    assert known[6] == [(5, 85), (85, 165)]
    assert known[7] == [(5, 85), (85, 165), (165, 175), (175, 185)]
    assert check_segments(layer, 193) == 185
    assert list(layer.segments) == known[7]


def test_nothing_is_indexed_where_the_window_begins_before_the_tokens() -> None:
    layer = layer_of(100, begin=50, prompt_end=1000)
    assert not layer.segments_up_to(32)


def test_what_is_indexed_does_not_depend_on_the_steps() -> None:
    at_once, in_steps = layer_of(100), layer_of(100)
    in_steps.segments_up_to(3 * UNINDEXED_TOKENS // 2)
    end = 9 * UNINDEXED_TOKENS
    assert ranges_of(at_once.segments_up_to(end)) == ranges_of(in_steps.segments_up_to(end))


def test_a_request_that_begins_again_has_no_old_indexes() -> None:
    layer = layer_of(100, sink_end=32, prompt_end=1000)
    assert check_segments(layer, 90) == 82
    layer.write(0, states(40, 3), states(40, 4))
    assert layer.end == 40 and not layer.segments
    layer.write(40, states(30, 5), states(30, 6))
    assert check_segments(layer, 60) == 52


def test_indexes_of_rejected_tokens_go_and_those_before_stay() -> None:
    layer = layer_of(200, prompt_end=1000)
    layer.segments_up_to(120)
    layer.write(85, states(1, 3), states(1, 4))
    assert list(layer.segments) == [(0, 80)]
    layer.write(86, states(75, 5), states(75, 6))
    assert check_segments(layer, 155) == 150


def test_no_step_makes_the_indexes_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sequence, "LAYER_LAG_TOKENS", 3)
    sequence = HostSequence(SequencePlace(0, 400, 5, 7, 0))
    layers = [sequence.layer(name, states(1, 0)) for name in "abcd"]
    most_made = 0
    for end in range(1, 400):
        made = 0
        for layer in layers:
            layer.write(end - 1, states(1, end), states(1, -end))
            before = set(layer.segments)
            at = check_segments(layer, end)
            assert end - 2 * UNINDEXED_TOKENS < at
            made += len(layer.segments.keys() - before)
        most_made = max(most_made, made)
    assert most_made == 1


@settings(max_examples=cases(15))
@given(
    num_copied=st.sampled_from([0, 0, 30, 390]),
    chunk=st.sampled_from([1, 25, 60, 200]),
    num_layers=st.integers(1, 6),
    step_tokens=st.sampled_from([UNINDEXED_TOKENS, 4 * UNINDEXED_TOKENS]),
)
def test_a_step_encodes_no_more_than_its_budget(
    num_copied: int, chunk: int, num_layers: int, step_tokens: int
) -> None:
    """Of what others have computed, of chunks of a prompt and of what is generated; in the end all
    is encoded that would be without a budget."""
    budget = EncodingBudget(step_tokens)
    place = SequencePlace(0, 550, 5, 7, 400)
    sequence = HostSequence(place, budget)
    layers = [sequence.layer(str(number), states(1, 0)) for number in range(num_layers)]
    compared: dict[HostLayer, list[Segment]] = {layer: [] for layer in layers}
    keys, values = states(550, 1), states(550, 2)
    ends = [*range(num_copied + chunk, 400, chunk), *range(400, 551)]
    for begin, end in zip([num_copied, *ends], ends, strict=False):
        budget.renew()
        encoded, allowed, copied = 0, step_tokens, 0
        for layer in layers:
            before = set(layer.segments)
            if layer.end < begin:
                copied = begin - layer.end
                of_others = (part[layer.end : begin] for part in (keys, values))
                layer.write(layer.end, *of_others, is_copied=True)
                assert layer.segments.keys() == before
            layer.write(begin, keys[begin:end], values[begin:end])
            if begin < 400:
                allowed += end - begin
            if end > 400:
                check_segments(layer, end - 7, compared[layer])
            made = layer.segments.keys() - before
            encoded += sum(last - first for first, last in made)
        # a step that does not copy much makes one in any case
        is_much = copied >= COPIED_TOKENS_PER_ENCODED
        assert encoded <= (allowed if is_much else max(allowed, SEGMENT_TOKENS))
    for layer in layers:
        check_segments(layer, 543)
        whole = HostLayer(place, KV_HEADS, HEAD_SIZE, torch.float32, layer._lag_tokens)
        whole.write(0, keys, values)
        expected = ranges_of(whole.segments_up_to(543))
        assert ranges_of(layer.segments_up_to(543)) == expected
        assert list(layer.segments) == expected


def test_granules_are_read_as_long_as_the_budget_has_no_room_for_their_segment() -> None:
    budget = EncodingBudget(2 * UNINDEXED_TOKENS)
    layer = HostLayer(SequencePlace(0, 200, 0, 0, 0), KV_HEADS, HEAD_SIZE, torch.float32, 0, budget)
    layer.write(0, states(170, 1), states(170, 2))
    for end in (20, 40, 60, 70):
        budget.renew()
        assert check_segments(layer, end) == end
    budget.take(1)
    assert check_segments(layer, 95) == 70
    for end in (80, 90):
        budget.renew()
        assert check_segments(layer, 95) == end
    assert list(layer.segments) == [(0, 80), (80, 90)]


def test_what_is_indexed_in_a_later_layer_does_not_depend_on_the_steps() -> None:
    found = []
    for chunk in (1, 7, 200):
        layer = HostLayer(SequencePlace(0, 400, 5, 7, 200), KV_HEADS, HEAD_SIZE, torch.float32, 6)
        for first in range(0, 200, chunk):
            count = min(chunk, 200 - first)
            layer.write(first, states(200, 1)[first:][:count], states(200, 2)[first:][:count])
        assert len(layer.segments) > 2, "nothing was made ahead"
        known = set(layer.segments)
        found.append(ranges_of(layer.segments_up_to(193)))
        assert set(found[-1]) <= known
    assert found[0] == found[1] == found[2]
    assert found[0][-1][1] == 185


def test_a_sequence_makes_its_layers_when_they_are_written() -> None:
    sequence = HostSequence(SequencePlace(64, 30, 0, 0, 100))
    assert not sequence.layers
    layer = sequence.layer("a", states(3, 0, torch.bfloat16))
    assert sequence.layer("a", states(5, 1, torch.bfloat16)) is layer
    other = sequence.layer("b", states(3, 0)[:, :1])
    assert list(sequence.layers) == ["a", "b"]
    assert (layer.begin, layer.end) == (64, 64)
    assert layer.keys.shape == layer.values.shape == (KV_HEADS, 30, HEAD_SIZE)
    assert layer.keys.dtype == layer.values.dtype == torch.bfloat16
    assert other.keys.shape == (1, 30, HEAD_SIZE)
