# SPDX-License-Identifier: Apache-2.0
"""The kernels of aarch64: built by a cross-compiler, run by qemu. `make aarch64-tests` has both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attention_backends import exactness, low_parts
from tests.attention_backends.aarch64 import emulated
from tests.attention_backends.exactness import assert_same_bits
from tests.attention_backends.strategies import (
    DATA_KINDS,
    DTYPES,
    AttentionProblem,
    error_bounds,
    in_fp8,
    random_problem,
)
from tests.support.depth import cases
from vllm_relay.attention_backends import ops
from vllm_relay.attention_backends.cpu import kernels as cpu

KERNELS = {"neon": DTYPES, "neon_bf16": (torch.bfloat16,), "portable": DTYPES}
every_kernel = pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        pytest.param(kernel, dtype, id=f"{kernel}-{str(dtype).removeprefix('torch.')}")
        for kernel, dtypes in KERNELS.items()
        for dtype in dtypes
    ],
)
pytestmark = pytest.mark.aarch64
settled = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[emulated.EmulatedMachine]:
    server = emulated.build(tmp_path_factory.mktemp("aarch64"))
    with emulated.emulated_machine(server) as machine:
        yield machine


@pytest.fixture(autouse=True)
def its_kernels(machine: emulated.EmulatedMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is computed there instead of here."""
    monkeypatch.setattr(cpu, "relay_attention", machine.relay_attention)
    monkeypatch.setattr(
        cpu, "usable_kernels", lambda dtype: [name for name in KERNELS if dtype in KERNELS[name]]
    )


def solve(problem: AttentionProblem, kernel: str, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return problem.solve(ops.relay_attention, kernel=kernel, **how)


@every_kernel
@settings(settled, max_examples=cases(6))
@given(seed=SEEDS)
def test_close_to_float64(kernel: str, dtype: torch.dtype, seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed), dtype=dtype)
    exactness.assert_exact_enough(problem, solve(problem, kernel), error_bounds(problem))


@pytest.mark.parametrize("data", DATA_KINDS)
@every_kernel
def test_kinds_of_data_with_everything_shared(kernel: str, dtype: torch.dtype, data: str) -> None:
    for seed in range(2):
        problem = random_problem(np.random.default_rng(seed), dtype=dtype, data=data)
        found = solve(problem, kernel, forest=problem.forest())
        exactness.assert_exact_enough(problem, found, error_bounds(problem))


@every_kernel
@settings(settled, max_examples=cases(4))
@given(seed=SEEDS, hides_tokens=st.booleans())
def test_grouped_is_alone_to_the_bit(
    kernel: str, dtype: torch.dtype, seed: int, hides_tokens: bool
) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, dtype=dtype, hides_tokens=hides_tokens)
    alone = solve(problem, kernel, forest=None)
    everything = problem.forest()
    some = everything.without(rng.random(len(everything.nodes)) < 0.5)
    for forest in ("auto", everything, some):
        assert_same_bits(solve(problem, kernel, forest=forest), alone, problem.description)


@every_kernel
@settings(settled, max_examples=cases(4))
@given(seed=SEEDS)
def test_fp8_is_the_same_numbers_to_the_bit(kernel: str, dtype: torch.dtype, seed: int) -> None:
    narrow, wide = in_fp8(random_problem(np.random.default_rng(seed), dtype=dtype))
    found = solve(narrow, kernel, forest=narrow.forest())
    assert_same_bits(found, solve(wide, kernel, forest=None), narrow.description)


@every_kernel
def test_any_number_of_threads(kernel: str, dtype: torch.dtype) -> None:
    problem = random_problem(np.random.default_rng(5), dtype=dtype, max_tokens=6144, max_requests=4)
    results = []
    for num_threads in (16, 3, 1):
        torch.set_num_threads(num_threads)
        results.append(solve(problem, kernel, forest=problem.forest()))
    assert_same_bits(results[1], results[0], problem.description)
    assert_same_bits(results[2], results[0], problem.description)


@settings(settled, max_examples=cases(4))
@given(seed=SEEDS)
def test_rows_drop_low_parts_whatever_is_beside_them(seed: int) -> None:
    low_parts.check_grouping("neon_bf16", seed)


@pytest.mark.parametrize("sinks", low_parts.SINKS)
@pytest.mark.parametrize("num_threads", [1, 64])
def test_low_parts_that_do_not_show_are_dropped(sinks: tuple[int, int], num_threads: int) -> None:
    low_parts.check_which_are_dropped("neon_bf16", sinks, num_threads)


def test_a_cross_build_leaves_what_tools_of_this_machine_read() -> None:
    recorded = Path(__file__).parents[3] / "build" / "compile_commands.json"
    compilers = {entry["arguments"][0] for entry in json.loads(recorded.read_text())}
    assert not any("aarch64-linux-gnu" in compiler for compiler in compilers)
