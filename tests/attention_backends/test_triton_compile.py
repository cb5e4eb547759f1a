# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel compiles for the GPUs that configurations ship for, without such a GPU."""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attention_backends.compile_main import ATTENTION_ONLY, VARIANTS
from vllm_relay.attention_backends.cuda.config import shipped_for
from vllm_relay.attention_backends.cuda.flash import kernels as triton_nodes
from vllm_relay.attention_backends.cuda.kernels import attention as triton_attention
from vllm_relay.attention_backends.cuda.kernels import kv_cache as triton_kv_cache
from vllm_relay.attention_backends.cuda.kernels import merge as triton_merge

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Per block, at most."""
PARAMETERS = [
    pytest.param(
        capability,
        variant,
        id=f"sm_{capability} {variant}",
        marks=[] if capability == 90 else pytest.mark.soak,
    )
    for capability, variants in VARIANTS.items()
    for variant in variants
]


@pytest.fixture(scope="module")
def compiled(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int], dict[str, Any]]:
    """What `compile_main` says of a capability."""

    @functools.cache
    def of_capability(capability: int) -> dict[str, Any]:
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.attention_backends.compile_main", str(capability)],
            cwd=Path(__file__).parents[2],
            env={**environment, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return of_capability


def kernel_names() -> set[str]:
    modules = triton_attention, triton_kv_cache, triton_merge, triton_nodes
    return {
        name
        for module in modules
        for name, member in inspect.getmembers(module)
        if name.endswith("_kernel") and member.fn.__module__ == module.__name__
    }


@pytest.mark.parametrize(("capability", "variant"), PARAMETERS)
def test_every_kernel_compiles_and_fits(compiled, capability, variant):
    kernels = compiled(capability)[variant]
    wanted = {"attention_kernel"} if capability in ATTENTION_ONLY else kernel_names()
    assert set(kernels) == wanted
    for name, facts in kernels.items():
        assert facts["target"], name
        assert facts["shared_bytes"] <= SHARED_BYTES[capability], name


@pytest.mark.parametrize(("capability", "variant"), PARAMETERS)
def test_attention_uses_the_matrix_instructions_of_its_gpu(compiled, capability, variant):
    facts = compiled(capability)[variant]["attention_kernel"]
    assert facts["wgmma"] == (capability == 90)
    # sm_90 has no wgmma of the 16 rows of small tiles
    assert facts["mma.sync"] == (capability in (80, 89, 90, 120) and variant != "fp32")


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.soak), 90])
def test_as_many_programs_fit_a_multiprocessor_as_are_meant_to(compiled, capability):
    """Otherwise they run one after the other. CUDA keeps a KiB for each of them."""
    programs = shipped_for(divmod(capability, 10)).programs_per_sm
    shared_bytes = compiled(capability)["bf16"]["attention_kernel"]["shared_bytes"]
    assert programs * (shared_bytes + 1024) <= SHARED_BYTES[capability] + 1024


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.soak), 90])
def test_tiles_are_copied_ahead_whether_or_not_tokens_are_hidden(compiled, capability):
    """A branch or an address that Triton cannot compute ahead would make it wait for each copy."""
    kernels = compiled(capability)
    seen, hidden = (kernels[name]["attention_kernel"] for name in ("bf16", "bf16, hidden tokens"))
    assert seen["copies_in_flight"] == hidden["copies_in_flight"] > 1
    # the words of hidden tokens may be copied ahead, too
    assert 0 <= hidden["shared_bytes"] - seen["shared_bytes"] < 1024
    # around what a program adds to a state that it has stored, with tiles of both heights
    assert seen["own_barriers"] == hidden["own_barriers"] == 4
