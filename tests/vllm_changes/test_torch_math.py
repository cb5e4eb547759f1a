# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from vllm_relay import plugin
from vllm_relay.vllm_changes.worker import torch_math

_FORKS = """
import os, sys, time
import numpy as np
import torch
from vllm_relay.vllm_changes.worker import torch_math

angles = np.linspace(0.1, 500, 1 << 17, dtype=np.float32)
expected = np.cos(angles.astype(np.float64))

def inexact():
    torch.set_num_threads(4)
    if sys.argv[1] == "chosen":
        torch_math.choose_math_kernels()
    return np.abs(torch.from_numpy(angles).cos().numpy() - expected).max() > 1e-5

processes = wrong = 0
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    forks = []
    for _ in range(4):
        fork = os.fork()
        if fork == 0:
            os._exit(int(inexact()))
        forks.append(fork)
    for fork in forks:
        wrong += os.waitpid(fork, 0)[1] != 0
        processes += 1
print(processes, wrong)
"""


def test_each_function_has_been_called_before_threads_share_a_call() -> None:
    torch_math.choose_math_kernels.cache_clear()
    seen: list[tuple[str, torch.dtype, int]] = []
    with mock.patch.multiple(
        torch,
        **{
            name: (lambda one, name=name: seen.append((name, one.dtype, one.numel())))
            for name in torch_math._FUNCTIONS
        },
    ):
        torch_math.choose_math_kernels()
    assert {("cos", torch.float32, 1), ("sin", torch.float32, 1), ("exp", torch.float64, 1)} <= set(
        seen
    )


def test_the_plug_in_does_it_first() -> None:
    with mock.patch.object(torch_math, "choose_math_kernels") as choose:
        plugin.register()
    choose.assert_called_once_with()


@pytest.mark.soak
def test_cosines_of_forks_on_busy_cores_are_exact() -> None:
    """Without the call 3 in 10,000 are not."""
    seconds = float(os.environ.get("RELAY_SOAK_S", "60"))
    run = subprocess.run(
        [sys.executable, "-c", _FORKS, "chosen", str(seconds)],
        capture_output=True,
        text=True,
        check=True,
    )
    processes, wrong = map(int, run.stdout.split())
    assert processes > 0
    assert wrong == 0
