# SPDX-License-Identifier: Apache-2.0
"""Computing a prompt for what it leaves behind: by an ordinary request for one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_relay.commands.prompts import refusals

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


def compute(
    engine: Any, token_ids: Sequence[int], request_id: str, extra_args: dict[str, Any]
) -> None:
    """Run a request to its end in an LLMEngine that has no others.

    Args:
        extra_args: of its SamplingParams, which say what it is for.

    Raises:
        CommandError: 400 vLLM does not take it.
    """
    with refusals("these tokens"):
        [prompt] = engine.renderer.render_cmpl([{"prompt_token_ids": list(token_ids)}])
        engine.add_request(request_id, prompt, _params(extra_args))
    while engine.has_unfinished_requests():
        engine.step()


async def compute_async(
    engine: Any,
    token_ids: Sequence[int],
    request_id: str,
    extra_args: dict[str, Any],
    rank: int | None = None,
) -> None:
    """:func:`compute` for an AsyncLLM, whatever else it does.

    Args:
        rank: which of its data-parallel ranks is to run it, from 0; None leaves it to vLLM.
    """
    with refusals("these tokens"):
        prompts = [{"prompt_token_ids": list(token_ids)}]
        [prompt] = await engine.renderer.render_cmpl_async(prompts)
        async for _ in engine.generate(
            prompt, _params(extra_args), request_id, data_parallel_rank=rank
        ):
            pass


def _params(extra_args: dict[str, Any]) -> SamplingParams:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra_args)
