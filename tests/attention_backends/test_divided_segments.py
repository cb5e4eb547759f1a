# SPDX-License-Identifier: Apache-2.0
"""With more threads than segments, several compute one segment: its scores by tokens, its weights
by rows and its outputs by dims. The result is that of one thread."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends.exactness import assert_exact_enough, assert_same_bits
from tests.attention_backends.strategies import DTYPES, AttentionProblem, random_problem
from tests.attention_backends.test_ops import bounds_of, every_kernel
from tests.support.depth import cases
from vllm_relay.attention_backends import ops, reference
from vllm_relay.attention_backends.hidden_tokens import HiddenTokens
from vllm_relay.attention_backends.plan import StepPlan, plan_step


@contextmanager
def planned_for(num_threads: int) -> Iterator[list[StepPlan]]:
    """Plans for so many threads, which two carry out; yields the plans that are made."""
    plans: list[StepPlan] = []

    def plan(*arguments, **keywords):
        made = plan_step(*arguments, **{**keywords, "num_threads": num_threads})
        made.num_threads = min(num_threads, 2)
        plans.append(made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "plan_step", plan)
        yield plans


def long_problem(dtype: torch.dtype, **features) -> AttentionProblem:
    """Several segments a request, a prefix that two share, a few query tokens."""
    rng = np.random.default_rng(3)
    block_size, head_size, num_heads = 64, 48, 3
    seq_lens, query_lens = np.array([2500, 5000, 90, 1400]), np.array([1, 1, 3, 5])
    table = np.arange(1, 1 + 4 * 80).reshape(4, 80).astype(np.int32)
    table[1, :35] = table[0, :35]
    shape = (table.max() + 1, 1, block_size, head_size)
    key, value = rng.standard_normal((2, *shape), np.float32)
    query = rng.standard_normal((query_lens.sum(), num_heads, head_size), np.float32)
    key[table[1, 50:60]] *= 30  # outgrows the first reference of its segment
    return AttentionProblem(
        query=torch.from_numpy(query).to(dtype),
        kv_cache=reference.pack_kv_cache(
            torch.from_numpy(key).to(dtype), torch.from_numpy(value).to(dtype)
        ),
        block_table=torch.from_numpy(table),
        query_start_loc=torch.from_numpy(np.append(0, np.cumsum(query_lens)).astype(np.int32)),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        scale=head_size**-0.5,
        num_kv_heads=1,
        features=features,
        description=f"long, {features}",
    )


@every_kernel
@settings(max_examples=cases(6))
@given(seed=st.integers(0, 2**32 - 1))
def test_plans_for_any_number_of_threads(kernel, dtype, seed):
    problem = random_problem(np.random.default_rng(seed), dtype=dtype)
    expected = problem.solve(ops.relay_attention, kernel=kernel, forest=None)
    for num_threads, forest in [(6, "auto"), (64, problem.forest())]:
        with planned_for(num_threads):
            result = problem.solve(ops.relay_attention, kernel=kernel, forest=forest)
        assert_same_bits(result, expected, problem.description)


@every_kernel
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"sliding_window": 1500},
        {"logits_soft_cap": 4.0, "alibi_slopes": torch.tensor([0.1, 0.01, 0.002])},
    ],
    ids=["plain", "window", "soft cap and ALiBi"],
)
def test_long_sequences(kernel, dtype, features):
    problem = long_problem(dtype, **features)
    expected = problem.solve(ops.relay_attention, kernel=kernel)
    assert_exact_enough(problem, expected, bounds_of(problem, kernel))
    for num_threads, forest in [(24, None), (200, "auto")]:
        with planned_for(num_threads) as plans:
            result = problem.solve(ops.relay_attention, kernel=kernel, forest=forest)
        (plan,) = plans
        segments = {tuple(row) for row in plan.work.divisions[:, :2].tolist()}
        assert len(segments) >= 4 and max(segment for _, segment in segments) == 2
        assert max(len(plan.work.value_items), len(plan.work.score_items)) > len(segments)
        assert_same_bits(result, expected, f"{num_threads} threads, forest {forest}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_that_overflow_in_one_part_of_the_dims(dtype):
    """Only one of the threads that share a segment sees it; all of the row is folded again."""
    problem = long_problem(dtype)
    key, value = reference.unpack_kv_cache(problem.kv_cache)
    value[..., -1] = 2.0**100
    key[problem.block_table[1, 50:60].long()] *= 0.4  # weights far above 1, below 2^60
    problem.kv_cache.copy_(reference.pack_kv_cache(key, value))
    expected = problem.solve(ops.relay_attention)
    assert expected[0].isfinite().all()
    with planned_for(200) as plans:
        result = problem.solve(ops.relay_attention)
    assert len(plans[0].work.divisions)
    assert_same_bits(result, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_segments_with_hidden_tokens_are_not_divided(dtype):
    problem = long_problem(dtype)
    hidden = HiddenTokens({0: ((100, 333),), 1: ((100, 333),), 3: ((7, 1001), (1010, 1100))})
    expected = problem.solve(ops.relay_attention, hidden=hidden)
    with planned_for(200) as plans:
        result = problem.solve(ops.relay_attention, hidden=hidden)
    assert not len(plans[0].work.divisions)
    assert_same_bits(result, expected)
