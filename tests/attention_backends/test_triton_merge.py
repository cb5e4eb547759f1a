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
from vllm_relay.attention_backends.cuda.plans.plan import (
    BEGINS_SECTION,
    BEGINS_SEGMENT,
    ENTRY_FIELDS,
    IS_SECTION,
    ITEM_FIELDS,
    GpuPlan,
)

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
    states: list[torch.Tensor], begins: list[int], *, sections: bool = False, sinks: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges one query token's states, which begin at these tokens.

    Args:
        sections: whether those that begin a section are of several segments.
    """
    kinds = [
        BEGINS_SEGMENT * (begin % SEGMENT == 0)
        + (BEGINS_SECTION + IS_SECTION * sections) * (begin % SECTION == 0)
        for begin in begins
    ]
    nothing, none = np.zeros((0, ITEM_FIELDS), np.int32), np.zeros(1, np.int32)
    plan = GpuPlan(
        np.zeros((1, ENTRY_FIELDS), np.int32), nothing, none[:0], none, np.array(kinds, np.int32),
        none,
    )  # fmt: skip
    output = torch.full((1, HEADS, HEAD_SIZE), torch.nan)
    lse = torch.full((1, HEADS), torch.nan)
    merge_kernel[(2, 1)](  # the second entry has no states, and no query token
        torch.from_numpy(plan.packed(2)),
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
        HAS_SINKS=sinks is not None,
        HAS_LSE=True,
    )
    return output[0], lse[0]


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
    tiles=st.lists(st.integers(0, 20), min_size=1, max_size=30, unique=True),
    sections=st.booleans(),
    spread=st.sampled_from([0.0, 3.0, 100.0, 30000.0]),
    has_sinks=st.booleans(),
)
def test_states_that_begin_anywhere(seed, tiles, sections, spread, has_sinks):
    """In float32, whatever the states: empty ones, and weights of 2^30000."""
    rng = np.random.default_rng(seed)
    states = random_states(rng, (len(tiles), HEADS), spread)
    sinks = torch.from_numpy(rng.standard_normal(HEADS).astype(np.float32)) if has_sinks else None
    begins = [tile * TILE for tile in sorted(tiles)]
    output, lse = merged(states, begins, sections=sections, sinks=sinks)
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
    for step in (SECTION, SEGMENT, TILE):
        output, result = merged(states, [step * number for number in range(5)], sinks=given)
        assert torch.equal(output, torch.zeros_like(output))
        torch.testing.assert_close(result, torch.full((HEADS,), lse), rtol=1e-6, atol=0)


def test_empty_states_change_no_bit():
    """Wherever they stand among the states of one segment, or as segments and sections."""
    rng = np.random.default_rng(1)
    (total, reference, output) = random_states(rng, (1, HEADS), 1.0)
    total.clamp_(min=1.0)
    alone = merged([total, reference, output], [0])
    for place in range(9):
        states = [torch.zeros(9, HEADS), torch.full((9, HEADS), EMPTY)]
        states.append(torch.zeros(9, HEADS, HEAD_SIZE))
        for among, state in zip(states, (total, reference, output), strict=True):
            among[place] = state[0]
        result = merged(states, [0, TILE, *(SEGMENT * number for number in range(1, 8))])
        assert all(torch.equal(got, wanted) for got, wanted in zip(result, alone, strict=True))
