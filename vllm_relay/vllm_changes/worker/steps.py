# SPDX-License-Identifier: Apache-2.0
"""What happens in a worker process beside a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_relay.vllm_changes.wrap import wrap


def call_before_each_step(name: str, on_step: Callable[[Any, Any], None]) -> None:
    """Call ``on_step(worker, scheduler_output)`` before a worker executes a step.

    Reason: an attention backend is told the block table of a step, not whose rows these are.
    Called in a worker process only, when its first layers are set up.
    Remove when: attention metadata builders are given the step's requests.

    Args:
        name: of who is told; once is enough.
    """
    from vllm.v1.worker.gpu_worker import Worker

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            on_step(self, scheduler_output)
            return original(self, scheduler_output, *args, **kwargs)

        return execute_model

    wrap(Worker, "execute_model", make, mark=f"_steps_are_reported_to_{name}")


def call_around_attention(
    name: str, on_batch: Callable[[Any], None], on_end: Callable[[], None] = lambda: None
) -> None:
    """Call ``on_batch(input_batch)`` before model runner V2 builds the attention metadata of a
    step, and ``on_end()`` behind it: what it builds outside is of drafts.

    Reason: as for ``call_before_each_step``; V2's batch is new in each step. Batches that are made
    up, to capture graphs and the like, are told of too, and some before the first step.
    Called in a worker process only, when its first layers are set up.
    Remove when: as for ``call_before_each_step``.

    Args:
        name: of who is told; once is enough.
    """
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_attn(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            on_batch(input_batch)
            try:
                return original(self, input_batch, *args, **kwargs)
            finally:
                on_end()

        return prepare_attn

    for state_cls in (DefaultModelState, MambaHybridModelState):  # neither calls the other's
        wrap(state_cls, "prepare_attn", make, mark=f"_batches_are_reported_to_{name}")
