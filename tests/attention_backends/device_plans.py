# SPDX-License-Identifier: Apache-2.0
"""Planners for problems of the tests, full of garbage, and what their plans say."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.attention_backends.plan_checks import check_plan
from tests.attention_backends.strategies import AttentionProblem
from tests.attention_backends.triton_problems import TINY_CUTS, attend, hidden_runs
from vllm_relay.attention_backends.cuda.config import KernelConfig
from vllm_relay.attention_backends.cuda.kernels import counts as triton_counts
from vllm_relay.attention_backends.cuda.plan import GpuPlan
from vllm_relay.attention_backends.cuda.planner import DevicePlanner, PlannerLimits

Groups = set[tuple[frozenset[int], int, int]]
"""{(members, begin, end)}"""


def make_planner(
    problem: AttentionProblem,
    *,
    config: KernelConfig = TINY_CUTS,
    num_programs: int = 2,
    rng: np.random.Generator | None = None,
    **limits: int,
) -> DevicePlanner:
    """A planner for a problem, or for larger ones; whatever it has to write first is garbage."""
    _, num_heads, head_size = problem.query.shape
    longest = int(problem.query_lens.max()) if problem.num_requests else 1
    exactly = {
        "max_requests": max(1, problem.num_requests),
        "max_tokens": max(1, len(problem.query)),
        "max_query_len": max(1, longest),
        "max_seq_len": problem.block_table.shape[1] * problem.block_size,
        "num_blocks": len(problem.kv_cache),
        "max_hidden": max(1, problem.num_requests) if "hidden" in problem.features else 0,
    }
    planner = DevicePlanner(
        PlannerLimits(**{**exactly, **limits}),
        config,
        block_size=problem.block_size,
        num_heads=num_heads,
        num_kv_heads=problem.num_kv_heads,
        head_size=head_size,
        kv_dtype=problem.kv_cache.dtype,
        num_programs=num_programs,
        device="cpu",
    )
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)) if rng else 0)
    kept = planner.plan.counts[triton_counts.EPOCH.value].clone()
    for holder in (planner, planner.plan):
        for name, buffer in vars(holder).items():
            kept_buffers = ("leaders", "members", "totals", "hidden_bits", "hidden_row")
            if isinstance(buffer, torch.Tensor) and name not in kept_buffers:
                buffer.random_(-(2**31), 2**31, generator=generator)
    planner.plan.members[planner.limits.max_tokens :] = -(2**30)
    planner.plan.counts[triton_counts.EPOCH.value] = kept
    return planner


def update(planner: DevicePlanner, problem: AttentionProblem, **options: Any) -> None:
    longest = int(problem.query_lens.max()) if problem.num_requests else 0
    planner.update(
        problem.block_table,
        problem.query_start_loc,
        problem.seq_lens,
        max_query_len=longest,
        window_tokens=problem.features.get("sliding_window") or 0,
        **{"hidden": hidden_runs(problem), **options},
    )


def plan_and_attend(
    planner: DevicePlanner, problem: AttentionProblem, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    update(planner, problem, **options)
    return attend_as_planned(planner, problem)


def attend_as_planned(
    planner: DevicePlanner, problem: AttentionProblem
) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(
        problem,
        planner.plan,
        planner.workspace,
        config=planner.config,
        num_programs=planner.num_programs,
    )


def counted(planner: DevicePlanner, name: str) -> int:
    """One of the counts of `triton_counts`."""
    return int(planner.plan.counts[getattr(triton_counts, name).value])


def host_plan(planner: DevicePlanner, problem: AttentionProblem) -> GpuPlan:
    """The plan that the buffers hold."""
    plan, tokens = planner.plan, len(problem.query)
    requests = problem.num_requests
    return GpuPlan(
        large_items=plan.large_items[: counted(planner, "NUM_LARGE")].numpy(),
        small_items=plan.small_items[: counted(planner, "NUM_SMALL")].numpy(),
        members=plan.members.numpy(),
        visible=plan.visible[:tokens].numpy(),
        token_request=plan.token_request[:tokens].numpy(),
        token_entry=plan.token_entry[:tokens].numpy(),
        chain_length=plan.chain_length[:requests].numpy(),
        chains=plan.chains[:requests].numpy(),
        ranges=plan.ranges.numpy(),
        num_slots=counted(planner, "NUM_SLOTS"),
    )


def check_device_plan(planner: DevicePlanner, problem: AttentionProblem) -> None:
    """`check_plan`, and that the plan fits in the buffers."""
    plan = host_plan(planner, problem)
    check_plan(plan, problem, planner.config, planner.limits.max_query_len)
    assert len(plan.large_items) <= planner.max_items
    assert len(plan.small_items) <= planner.max_items
    assert plan.num_slots <= planner.max_slots
    assert (planner.plan.token_request[len(problem.query) :] == -1).all()


def groups_of(planner: DevicePlanner, problem: AttentionProblem) -> Groups:
    """Who reads what together, from the chains: all members of a group agree about it."""
    members: dict[int, set[int]] = {}
    for request in range(problem.num_requests):
        length = int(planner.plan.chain_length[request])
        chain = planner.plan.chains[request, :length, 0].tolist()
        assert chain[-1] == problem.num_requests + request
        for group in chain[:-1]:
            assert 0 <= group < problem.num_requests
            members.setdefault(group, set()).add(request)
    return {
        (frozenset(requests), *planner.plan.ranges[group, :2].tolist())
        for group, requests in members.items()
    }
