# SPDX-License-Identifier: Apache-2.0
"""Positions of tokens that are not those of their slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_relay.vllm_changes.wrap import wrap


def call_after_inputs(on_inputs: Callable[[Any, Any], None]) -> None:
    """Call ``on_inputs(model_runner, num_scheduled_tokens)`` when the inputs of a step are there.

    Reason: positions are computed from slots, and slots from positions; tokens of modules have
    positions of their own, which nobody may see before the slots are found.
    Called in a worker process only, when its first RELAY layers are set up.
    Remove when: requests can give the positions of their tokens.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def _prepare_inputs(
            self: Any, scheduler_output: Any, num_scheduled_tokens: Any, *args: Any, **kwargs: Any
        ) -> Any:
            prepared = original(self, scheduler_output, num_scheduled_tokens, *args, **kwargs)
            on_inputs(self, num_scheduled_tokens)
            return prepared

        return _prepare_inputs

    wrap(GPUModelRunner, "_prepare_inputs", make)


def give_positions_to_model(on_inputs: Callable[[Any, Any], None]) -> None:
    """Let model runner V2 give models positions in a buffer of their own, written by
    ``on_inputs(batch, positions)`` when those of the slots are there.

    Reason: as for ``call_after_inputs``; V2 keeps slots in the positions it samples with.
    CUDA graphs keep the address of the buffer, so dummy inputs have it from the first one on.
    Called in a worker process only, when its first RELAY layers are set up.
    Remove when: as for ``call_after_inputs``.
    """
    import torch
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    def positions_of(state: Any) -> Any:
        if not hasattr(state, "relay_positions"):
            state.relay_positions = torch.zeros(
                state.max_num_tokens, dtype=torch.int64, device=state.device
            )
        return state.relay_positions

    def make_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_inputs(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            positions = positions_of(self)[: input_batch.num_tokens_after_padding]
            positions.copy_(input_batch.positions)
            on_inputs(input_batch, positions)
            return {"positions": positions, **original(self, input_batch, *args, **kwargs)}

        return prepare_inputs

    def make_dummy(original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_dummy_inputs(
            self: Any, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any
        ) -> Any:
            inputs = original(self, num_reqs, num_tokens, *args, **kwargs)
            return {"positions": positions_of(self)[:num_tokens], **inputs}

        return prepare_dummy_inputs

    wrap(DefaultModelState, "prepare_inputs", make_inputs)
    wrap(DefaultModelState, "prepare_dummy_inputs", make_dummy)


def gives_positions(model_runner: Any) -> bool:
    """Whether ``give_positions_to_model`` reaches the model of a V2 runner: models may bring a
    model state of their own."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    names = ("prepare_inputs", "prepare_dummy_inputs", "prepare_attn")
    state_cls = type(model_runner.model_state)
    return all(getattr(state_cls, name, None) is getattr(DefaultModelState, name) for name in names)
