# SPDX-License-Identifier: Apache-2.0
"""The merge kernel on states that were made by hand: any number of them, empty ones, huge ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from vllm_relay.attention_backends.cuda.kernels.merge import merge_kernel
from vllm_relay.attention_backends.cuda.plan import MAX_DEPTH

TILE, SEGMENT, SECTION = 16, 32, 128
EMPTY = -1.0e30
HEADS, HEAD_SIZE = 3, 24


def random_states(rng: np.random.Generator, shape: tuple[int, ...], spread: float) -> list[Any]:
    """Totals, references and outputs as the attention kernel leaves them: about a third saw
    nothing."""
    references = np.ceil(rng.standard_normal(shape) * spread)
    totals = rng.uniform(0.5, 64, shape)
    values = rng.standard_normal((*shape, HEAD_SIZE))
    empty = rng.random(shape) < 0.35
    references[empty], totals[empty], values[empty] = EMPTY, 0.0, 0.0
    outputs = values * totals[..., None]
    return [torch.from_numpy(array.astype(np.float32)) for array in (totals, references, outputs)]


def merged(
    states: list[torch.Tensor], lengths: list[int], *, folds: bool, sinks: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges one query token's ranges of so many tokens, one after the other; slots in order."""
    chains = torch.zeros((1, MAX_DEPTH + 1, 2), dtype=torch.int32)
    chains[0, :, 0] = torch.arange(MAX_DEPTH + 1)
    ends = np.cumsum(lengths)
    num_slots = states_of_ranges(lengths, folds)
    firsts = np.cumsum([0, *num_slots])[:-1]
    ranges = [
        [end - length, end, first, slots, int(folds)]
        for end, length, first, slots in zip(ends, lengths, firsts, num_slots, strict=True)
    ]
    assert sum(num_slots) == len(states[0])
    output = torch.full((1, HEADS, HEAD_SIZE), torch.nan)
    lse = torch.full((1, HEADS), torch.nan)
    merge_kernel[(1, 1)](
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([len(lengths)], dtype=torch.int32),
        chains,
        torch.tensor(ranges, dtype=torch.int32).view(-1, 5),
        output if sinks is None else sinks,
        torch.ones(()),
        *states,
        output,
        lse,
        output.stride(0),
        output.stride(1),
        HEADS=4,
        NUM_HEADS=HEADS,
        HEAD_SIZE=HEAD_SIZE,
        PADDED_HEAD=triton.next_power_of_2(HEAD_SIZE),
        TILE=TILE,
        SEGMENT=SEGMENT,
        SECTION=SECTION,
        HAS_SINKS=sinks is not None,
        HAS_LSE=True,
    )
    return output[0], lse[0]


def num_states(begin: int, end: int, folds: bool) -> int:
    """Slots of a range, counted token by token: a new one begins where nothing may fold."""
    slots, last_section = 0, end // SEGMENT * SEGMENT
    folding_to = begin
    for token in range(begin, end):
        if token < folding_to:
            continue
        slots += 1
        segment_end = min(token // SEGMENT * SEGMENT + SEGMENT, end)
        if token % SEGMENT:
            folding_to = min(token + TILE, segment_end)
        elif folds and token % SECTION == 0 and last_section > token:
            folding_to = min(token + SECTION, last_section)
        else:
            folding_to = segment_end
    return slots


def states_of_ranges(lengths: list[int], folds: bool) -> list[int]:
    ends = np.cumsum(lengths).tolist()
    extents = zip(ends, lengths, strict=True)
    return [num_states(end - length, end, folds) for end, length in extents]


def expected(states: list[torch.Tensor], sinks: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    totals, references, outputs = (state.double() for state in states)
    lse = totals.log2() + references
    lse = torch.where(totals > 0, lse * np.log(2), -torch.inf)
    values = outputs / torch.where(totals > 0, totals, 1.0)[..., None]
    all_lse = lse if sinks is None else torch.cat((lse, sinks.double()[None]))
    joint = all_lse.logsumexp(0)
    weights = torch.where(lse == -torch.inf, 0.0, (lse - joint).exp())
    return (weights[..., None] * values).sum(0), joint


@settings(max_examples=cases(10))
@given(
    seed=st.integers(0, 2**32 - 1),
    tiles=st.lists(st.integers(0, 14), min_size=1, max_size=4),
    rest=st.integers(0, TILE),
    folds=st.booleans(),
    spread=st.sampled_from([0.0, 3.0, 100.0, 30000.0]),
    has_sinks=st.booleans(),
)
def test_states_of_ranges(seed, tiles, rest, folds, spread, has_sinks):
    """In float32, whatever the states: no range at all, empty ones, and weights of 2^30000."""
    rng = np.random.default_rng(seed)
    lengths = [count * TILE for count in tiles]
    lengths[-1] += rest
    count = sum(states_of_ranges(lengths, folds))
    states = random_states(rng, (count, HEADS), spread)
    sinks = torch.from_numpy(rng.standard_normal(HEADS).astype(np.float32)) if has_sinks else None
    output, lse = merged(states, lengths, folds=folds, sinks=sinks)
    wanted, wanted_lse = expected(states, sinks)
    assert torch.equal(lse == -torch.inf, wanted_lse == -torch.inf)
    finite = wanted_lse != -torch.inf
    torch.testing.assert_close(lse[finite].double(), wanted_lse[finite], rtol=3e-7, atol=1e-6)
    torch.testing.assert_close(output.double(), wanted, rtol=0, atol=4e-6)


@pytest.mark.parametrize(
    ("sinks", "lse"),
    [(None, -torch.inf), (2.5, 2.5), (-torch.inf, -torch.inf), (-90.0, -90.0), (0.0, 0.0)],
)
def test_nothing_seen_is_zero_and_what_sinks_say(sinks, lse):
    states = random_states(np.random.default_rng(0), (5, HEADS), 1.0)
    for state, empty in zip(states, (0.0, EMPTY, 0.0), strict=True):
        state.fill_(empty)
    given = None if sinks is None else torch.full((HEADS,), sinks)
    for lengths in ([5 * SEGMENT], [TILE] * 5, []):
        kept = [state[: len(lengths) and 5] for state in states]
        output, result = merged(kept, lengths, folds=False, sinks=given)
        assert torch.equal(output, torch.zeros_like(output))
        torch.testing.assert_close(result, torch.full((HEADS,), lse), rtol=1e-6, atol=0)


def test_empty_states_change_no_bit():
    """Wherever they stand among the states of one segment, or as segments and sections."""
    rng = np.random.default_rng(1)
    (total, reference, output) = random_states(rng, (1, HEADS), 1.0)
    total.clamp_(min=1.0)
    alone = merged([total, reference, output], [SEGMENT], folds=False)
    for place in range(9):
        states = [torch.zeros(9, HEADS), torch.full((9, HEADS), EMPTY)]
        states.append(torch.zeros(9, HEADS, HEAD_SIZE))
        for among, state in zip(states, (total, reference, output), strict=True):
            among[place] = state[0]
        result = merged(states, [TILE] * 2 + [SEGMENT] * 7, folds=False)
        assert all(torch.equal(got, wanted) for got, wanted in zip(result, alone, strict=True))


def test_tokens_of_no_request_are_left_alone():
    output = torch.full((2, HEADS, HEAD_SIZE), torch.nan)
    nothing = torch.zeros(1, dtype=torch.int32)
    states = random_states(np.random.default_rng(0), (1, HEADS), 1.0)
    merge_kernel[(2, 1)](
        torch.full((2,), -1, dtype=torch.int32), nothing, nothing, nothing, nothing, output,
        torch.ones(()), *states, output, output, *output.stride()[:2], HEADS=4, NUM_HEADS=HEADS,
        HEAD_SIZE=HEAD_SIZE, PADDED_HEAD=32, TILE=TILE, SEGMENT=SEGMENT, SECTION=SECTION,
        HAS_SINKS=False, HAS_LSE=True,
    )  # fmt: skip
    assert output.isnan().all()
