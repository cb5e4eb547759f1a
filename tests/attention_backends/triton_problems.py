# SPDX-License-Identifier: Apache-2.0
"""Attention problems small enough for Triton's interpreter, and the Triton kernels on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.attention_backends import exactness
from tests.attention_backends.strategies import (
    AttentionProblem,
    error_bounds,
    problem_of_table,
    random_problem,
)
from vllm_relay.attention_backends import reference
from vllm_relay.attention_backends.cuda import launch as cuda
from vllm_relay.attention_backends.cuda.config import KernelConfig, KernelSetup, LayerShape
from vllm_relay.attention_backends.cuda.hidden_bits import HiddenRun, bits_and_rows
from vllm_relay.attention_backends.cuda.plans.plan import GpuPlan, plan_step
from vllm_relay.attention_backends.forest import Forest
from vllm_relay.attention_backends.hidden_tokens import HiddenTokens

TINY_CUTS = KernelConfig(
    tile_tokens=16, segment_tokens=64, section_tokens=128, small_rows=16, large_rows=32
)
"""Cuts that short sequences cross; rows that few requests exceed."""
OTHER_CUTS = KernelConfig(
    tile_tokens=32, segment_tokens=32, section_tokens=96, small_rows=16, large_rows=16
)

Path = Sequence[tuple[str, int]]
"""Of a request through a tree: names of nodes, and the number of blocks of each."""


def small_problem(rng: np.random.Generator, **keywords: Any) -> AttentionProblem:
    """`strategies.random_problem` with few heads and tokens, unless asked for others."""
    group = int(rng.choice([1, 2, 3, 4, 5, 7]))
    num_kv_heads = int(rng.choice([1, 1, 2]))
    sizes: dict[str, Any] = {
        "max_tokens": 320,
        "max_requests": 6,
        "heads": (group * num_kv_heads, num_kv_heads),
        "head_size": int(rng.choice([32, 64, 80])),
        "block_size": int(rng.choice([16, 32, 48])),
    }
    return random_problem(rng, **{**sizes, **keywords})


def tree_problem(
    paths: Sequence[Path],
    *,
    tails: Sequence[int] | None = None,
    query_lens: Sequence[int] | None = None,
    seed: int = 0,
    block_size: int = 16,
    heads: tuple[int, int] = (2, 1),
    head_size: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    data: str = "random",
    features: dict[str, Any] | None = None,
) -> AttentionProblem:
    """Requests whose block tables are paths through a forest.

    Args:
        tails: tokens of each request's own behind its path, one unless given.
        query_lens: of the requests, 1 unless given.
    """
    rng = np.random.default_rng(seed)
    tails = tails or [1] * len(paths)
    lengths = {name: length for path in paths for name, length in path}
    tail_blocks = [-(-tail // block_size) for tail in tails]
    ids = iter((rng.permutation(sum(lengths.values()) + sum(tail_blocks)) + 1).tolist())
    blocks = {name: [next(ids) for _ in range(length)] for name, length in lengths.items()}
    rows = [
        [block for name, _ in path for block in blocks[name]] + [next(ids) for _ in range(tail)]
        for path, tail in zip(paths, tail_blocks, strict=True)
    ]
    block_table = np.zeros((len(rows), max(map(len, rows), default=0) + 1), np.int32)
    for request, row in enumerate(rows):
        block_table[request, : len(row)] = row
    seq_lens = [
        sum(length for _, length in path) * block_size + tail
        for path, tail in zip(paths, tails, strict=True)
    ]
    return problem_of_table(
        rng,
        block_table,
        np.array(seq_lens, np.int64),
        np.array(query_lens or [1] * len(paths), np.int64),
        num_blocks=1 + sum(lengths.values()) + sum(tail_blocks),
        dtype=dtype,
        data=data,
        features=features or {},
        heads=heads,
        head_size=head_size,
        block_size=block_size,
    )


def paths_of_levels(counts: Sequence[int], lengths: Sequence[int]) -> list[Path]:
    """Complete trees: `counts[i]` nodes on level i, spread evenly over the level above."""
    return [
        [
            (f"{level}.{leaf * count // counts[-1]}", length)
            for level, (count, length) in enumerate(zip(counts, lengths, strict=True))
        ]
        for leaf in range(counts[-1])
    ]


def every_feature(num_heads: int, window: int = 40) -> dict[str, Any]:
    rng = np.random.default_rng(num_heads)
    return {
        "sliding_window": window,
        "alibi_slopes": torch.from_numpy(2.0 ** -rng.uniform(1, 8, num_heads)).float(),
        "logits_soft_cap": 20.0,
        "sinks": torch.from_numpy(rng.standard_normal(num_heads)).float(),
    }


def cuda_cache(problem: AttentionProblem, *, tokens_first: bool = False) -> torch.Tensor:
    """The KV cache in the layout of the CUDA kernels, [blocks, kv heads, tokens, K then V], with
    NaN between the blocks.

    Args:
        tokens_first: the heads of a token are neighbours in memory, else the tokens of a head.
    """
    tokens = torch.cat(reference.unpack_kv_cache(problem.kv_cache), -1)
    return strided(tokens.transpose(1, 2)).transpose(1, 2) if tokens_first else strided(tokens)


def strided(tensor: torch.Tensor, padding: float = torch.nan) -> torch.Tensor:
    """A copy inside of a larger tensor of `padding`: only the last dimension is dense."""
    shape = [tensor.shape[0], *(size + 1 for size in tensor.shape[1:-1]), tensor.shape[-1] + 8]
    larger = torch.full(shape, padding, dtype=torch.float32).to(tensor.dtype)
    inner = larger[tuple(slice(size) for size in tensor.shape)]
    return inner.copy_(tensor)


def setup_of(
    problem: AttentionProblem, config: KernelConfig = TINY_CUTS, num_programs: int = 2
) -> KernelSetup:
    _, num_heads, head_size = problem.query.shape
    kv_bytes = problem.query.dtype.itemsize
    layer = LayerShape(num_heads, problem.num_kv_heads, head_size, kv_bytes)
    return KernelSetup.of(config, layer, num_programs)


def plan_of(
    problem: AttentionProblem,
    forest: Forest | None = None,
    *,
    config: KernelConfig = TINY_CUTS,
    num_programs: int = 2,
    **options: Any,
) -> GpuPlan:
    _, plan = plan_step(
        forest or Forest.none(problem.num_requests),
        problem.query_start_loc.numpy(),
        problem.seq_lens.numpy(),
        setup_of(problem, config, num_programs),
        window_tokens=problem.features.get("sliding_window") or 0,
        **options,
    )
    return plan


def hidden_runs(problem: AttentionProblem) -> list[HiddenRun]:
    """What the query tokens of a problem hide, for the planner."""
    hidden = problem.features.get("hidden", HiddenTokens({}))
    return hidden.query_runs(problem.query_start_loc.numpy())


def solve(
    problem: AttentionProblem,
    forest: Forest | None = None,
    *,
    config: KernelConfig = TINY_CUTS,
    num_programs: int = 2,
    kv_cache: torch.Tensor | None = None,
    runs: Sequence[HiddenRun] | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of the Triton kernels, whose workspace is full of NaN. Without a forest, every
    request reads alone; without runs, tokens hide what the problem says."""
    plan = plan_of(problem, forest, config=config, num_programs=num_programs)
    hidden = None
    if (runs := hidden_runs(problem) if runs is None else runs) or "hidden" in problem.features:
        longest = int(problem.seq_lens.max()) if problem.num_requests else 0
        hidden = bits_and_rows(runs, len(problem.query), longest)
    setup = setup_of(problem, config, num_programs)
    workspace = cuda.Workspace.allocate(plan.num_slots, setup, "cpu")
    return attend(
        problem,
        cuda.DevicePlan.upload(
            setup, workspace, plan, problem.seq_lens, len(problem.query), hidden
        ),
        kv_cache=kv_cache,
        **arguments,
    )


def attend(
    problem: AttentionProblem,
    plan: cuda.DevicePlan,
    *,
    kv_cache: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a plan; output and lse begin as NaN."""
    for states in plan.workspace:
        states.fill_(torch.nan)
    out = arguments.pop("out", torch.full_like(problem.query, torch.nan))
    lse = torch.full(problem.query.shape[:2], torch.nan, dtype=torch.float32)
    features = {name: each for name, each in problem.features.items() if name != "hidden"}
    scales = {"k_scale": torch.ones(()), "v_scale": torch.ones(())}
    cuda.relay_attention(
        problem.query,
        cuda_cache(problem) if kv_cache is None else kv_cache,
        problem.block_table,
        plan,
        out,
        scale=problem.scale,
        **{"lse": lse, **scales, **features, **arguments},
    )
    return out, lse


def assert_exact_enough(problem: AttentionProblem, output: torch.Tensor, lse: torch.Tensor) -> None:
    bounds = error_bounds(problem, sums_rounded_weights=True)
    exactness.assert_exact_enough(problem, (output, lse), bounds)
