# SPDX-License-Identifier: Apache-2.0
"""Positions of tokens with plans on both model runners, and on which devices plans are followed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from vllm_relay.modules.engine import requests
from vllm_relay.modules.engine.worker import ModuleWorker
from vllm_relay.modules.prompt.plan import ModulePlan, Segment, TailRun
from vllm_relay.vllm_changes.worker.positions import give_positions_to_model, gives_positions

# 20 tokens in a block of 32, and five of a tail whose positions leave a gap
PLAN = ModulePlan(
    block_size=32,
    segments=(Segment(name="", num_tokens=20, position_runs=((0, 0),)),),
    tail=(
        TailRun(num_tokens=2, position=50, sees=((0, 20),)),
        TailRun(num_tokens=3, position=70),
    ),
)


@pytest.fixture
def unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the methods that the test wraps."""
    for name in ("prepare_inputs", "prepare_dummy_inputs", "prepare_attn"):
        original = getattr(DefaultModelState, name)
        original = getattr(original, "__wrapped__", original)
        monkeypatch.setattr(DefaultModelState, name, original)


def model_state() -> Any:
    state = DefaultModelState.__new__(DefaultModelState)
    state.max_num_tokens, state.device = 16, torch.device("cpu")
    state.rope_state = state.prompt_embeds_state = None
    state.supports_mm_inputs = False
    return state


def batch(num_computed: list[int], num_scheduled: list[int], padding: int = 0) -> Any:
    positions = [
        slot
        for first, count in zip(num_computed, num_scheduled, strict=True)
        for slot in range(first, first + count)
    ]
    return SimpleNamespace(
        req_ids=["plain", "modular"],
        num_computed_tokens_np=np.array(num_computed),
        num_scheduled_tokens=np.array(num_scheduled),
        num_tokens_after_padding=len(positions) + padding,
        positions=torch.tensor(positions + [0] * padding),
    )


@pytest.mark.usefixtures("unwrapped")
def test_v2_gives_models_positions_in_one_buffer() -> None:
    """Graphs keep its address, and slots are sampled with."""
    worker = ModuleWorker({"modular": PLAN})
    give_positions_to_model(worker.move_batch_positions)
    state = model_state()
    captured = state.prepare_dummy_inputs(2, 8)["positions"]
    step = batch([4, 33], [2, 3], padding=1)
    given = state.prepare_inputs(step, None)["positions"]
    assert given.tolist() == [4, 5, 51, 70, 71, 0]
    assert step.positions.tolist() == [4, 5, 33, 34, 35, 0]
    assert given.data_ptr() == captured.data_ptr() and len(captured) == 8
    # the prompt's last token, and one behind it
    assert state.prepare_inputs(batch([6, 36], [1, 2]), None)["positions"].tolist() == [6, 72, 73]
    assert gives_positions(SimpleNamespace(model_state=state))


@pytest.mark.usefixtures("unwrapped")
def test_models_with_a_model_state_of_their_own_are_refused() -> None:
    class OwnState(DefaultModelState):
        def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
            return {"positions": torch.zeros(1)}

    worker = ModuleWorker()
    params = SimpleNamespace(extra_args={"relay_modules": PLAN.to_argument()})
    new = SimpleNamespace(req_id="modular", sampling_params=params)
    step = SimpleNamespace(finished_req_ids=(), scheduled_new_reqs=[new])
    state = OwnState.__new__(OwnState)
    own = SimpleNamespace(model_runner=SimpleNamespace(model_state=state))
    with pytest.raises(RuntimeError, match="OwnState gives the model positions of its own"):
        worker.begin_step(own, step)
    plain = SimpleNamespace(model_runner=SimpleNamespace(model_state=model_state()))
    worker.begin_step(plain, step)
    assert set(worker.requests) == {"modular"}


def test_v1_moves_positions_where_they_are() -> None:
    worker = ModuleWorker({"modular": PLAN})
    step = batch([4, 33], [2, 3])
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=step.req_ids, num_computed_tokens_cpu=step.num_computed_tokens_np
        ),
        positions=step.positions,
    )
    worker.move_positions(runner, step.num_scheduled_tokens)
    assert runner.positions.tolist() == [4, 5, 51, 70, 71]


@pytest.mark.parametrize(
    ("device", "changes", "refusal"),
    [
        ("cpu", {}, None),
        ("cuda", {}, "add additional_config.relay.cuda_kernels=triton"),
        ("cuda", {"additional_config": {"relay": {"cuda_kernels": "triton"}}}, None),
        ("rocm", {}, "NVIDIA GPUs only"),
        ("cpu", {"speculative_config": object()}, "remove --speculative-config"),
        ("cpu", {"kv_transfer_config": object()}, "remove --kv-transfer-config"),
        ("cpu", {"is_hybrid": True}, "state-space layers keep no keys and values of a module"),
        ("cpu", {"sliding_window": 64}, "layers with a sliding window"),
        ("cpu", {"attention_chunk_size": 64}, "layers with chunked local attention"),
    ],
)
def test_engines_that_can_use_modules(
    monkeypatch: pytest.MonkeyPatch, device: str, changes: dict[str, Any], refusal: str | None
) -> None:
    changes = dict(changes)
    window = changes.pop("sliding_window", None)
    platform = SimpleNamespace(is_cpu=lambda: device == "cpu", is_cuda=lambda: device == "cuda")
    monkeypatch.setattr("vllm.platforms.current_platform", platform, raising=False)
    monkeypatch.setattr("vllm_relay.config.scheduler_is_selected", lambda vllm_config: True)
    config: Any = SimpleNamespace(
        attention_config=SimpleNamespace(
            backend=SimpleNamespace(name="RELAY"), backend_per_kind={}
        ),
        additional_config={},
        speculative_config=None,
        kv_transfer_config=None,
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        use_v2_model_runner=True,
        model_config=SimpleNamespace(
            uses_mrope=False,
            is_hybrid=changes.pop("is_hybrid", False),
            is_attention_free=False,
            get_sliding_window=lambda: window,
            attention_chunk_size=changes.pop("attention_chunk_size", None),
        ),
    )
    vars(config).update(changes)
    reason = requests.unsupported_reason(config)
    assert (reason is None) if refusal is None else refusal in str(reason)
