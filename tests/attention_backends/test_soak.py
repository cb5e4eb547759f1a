# SPDX-License-Identifier: Apache-2.0
"""Many random problems against the float64 reference: `RELAY_SOAK_CASES` of them, with the seeds
from `RELAY_SOAK_FIRST_SEED` on."""

import os
import time

import numpy as np
import pytest
import torch

from tests.attention_backends.strategies import ROUNDING_KERNELS, error_bounds, random_problem
from vllm_relay.attention_backends import ops
from vllm_relay.attention_backends.cpu import kernels as cpu


@pytest.mark.soak
def test_random_problems():
    """Every case: close to float64, no NaN from unused memory, and equal bits however grouped."""
    cases = int(os.environ.get("RELAY_SOAK_CASES", "20000"))
    first = int(os.environ.get("RELAY_SOAK_FIRST_SEED", "0"))
    failures, started_s = [], time.monotonic()
    for seed in range(first, first + cases):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng)
        usable = cpu.usable_kernels(problem.query.dtype)
        kernel = usable[rng.integers(len(usable))]
        expected, expected_lse = problem.expected
        output, lse = problem.solve(ops.relay_attention, kernel=kernel)
        alone = problem.solve(ops.relay_attention, kernel=kernel, forest=None)
        everything = problem.solve(ops.relay_attention, kernel=kernel, forest=problem.forest())
        output_bound, lse_bound = error_bounds(
            problem, sums_rounded_weights=kernel in ROUNDING_KERNELS
        )
        seen = expected_lse != -torch.inf
        fine = (
            bool(((output.double() - expected).abs() <= output_bound).all())
            and torch.equal(lse != -torch.inf, seen)
            and bool(((lse.double() - expected_lse).abs() <= lse_bound)[seen].all())
            and all(torch.equal(a, b) for a, b in zip(alone, (output, lse), strict=True))
            and all(torch.equal(a, b) for a, b in zip(everything, (output, lse), strict=True))
        )
        if not fine:
            failures.append(f"seed {seed} kernel {kernel}: {problem.description}")
        if (seed - first + 1) % 1000 == 0:
            print(
                f"{seed - first + 1} of {cases} cases, {len(failures)} failures, "
                f"{time.monotonic() - started_s:.0f} s",
                flush=True,
            )
    assert not failures, "\n".join(failures[:20])
