# SPDX-License-Identifier: Apache-2.0
from benchmarks.attention.bench_op import MAIN
from vllm_relay.limits import KERNELS


def test_goals_are_those_of_kernels() -> None:
    assert {kernel for case in MAIN for kernel in case.goals} <= set(KERNELS)
