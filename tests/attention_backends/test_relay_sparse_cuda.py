# SPDX-License-Identifier: Apache-2.0
"""RELAY_SPARSE for CUDA as vLLM drives it: Triton's kernels in the interpreter, and copies that
arrive when somebody waits for them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.platforms import current_platform

from tests.attention_backends.fake_device import DelayedCopies, DeviceTensor
from tests.attention_backends.sparse_cuda_worker import Worker
from vllm_relay import compat
from vllm_relay.attention_backends import relay_cuda, relay_sparse_base, relay_sparse_cuda
from vllm_relay.long_context import host_sequence, worker

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="a fake GPU, for where there is none"
)


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker process of its own."""
    monkeypatch.setattr(worker, "state", worker.LongContextWorker())
    monkeypatch.setattr(relay_sparse_base, "_config", [])
    monkeypatch.setattr(compat, "call_before_each_step", lambda on_step: None)
    monkeypatch.setattr(relay_sparse_base.recorder, "take_long_contexts", None)
    monkeypatch.setattr(relay_cuda, "get_num_attention_heads_from_layers", lambda *args: 4)
    monkeypatch.setattr(host_sequence, "GRANULE_TOKENS", 40)
    copies = functools.partial(DelayedCopies, tensor_cls=DeviceTensor)
    monkeypatch.setattr(relay_sparse_cuda, "make_copies", copies)
    yield


readings = pytest.mark.parametrize(
    "options", [{}, {"alpha": 1e-37}], ids=["everything", "retrieved"]
)


@readings
def test_a_long_prompt_is_computed_in_chunks_and_decoded(options: dict[str, Any]) -> None:
    run = Worker(**options)
    long = run.sequence("long", 300, 190)
    run.step((long, 100))
    run.step((long, 90))
    for _ in range(3):
        run.step((long, 1))
    run.check_copy(long)
