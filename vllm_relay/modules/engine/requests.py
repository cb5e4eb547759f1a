# SPDX-License-Identifier: Apache-2.0
"""Requests of vLLM with plans: what they are given, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_relay.modules.engine.start_checks import unsupported_reason
from vllm_relay.modules.prompt.plan import EXTRA_ARG, plan_of
from vllm_relay.modules.prompt.render import RenderedPrompt

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig


def with_plan(
    params: SamplingParams, rendered: RenderedPrompt, max_model_len: int | None
) -> SamplingParams:
    """The sampling parameters of a rendered prompt: with its plan, and with no more tokens than
    there are positions behind it."""
    params = params.clone()
    if rendered.plan is None:
        return params
    params.max_tokens = rendered.limit_output(params.max_tokens, max_model_len)
    params.extra_args = {**(params.extra_args or {}), EXTRA_ARG: rendered.plan.to_argument()}
    return params


def check_request(vllm_config: VllmConfig, request: Any) -> None:
    """Refuse a request with a plan that this engine would not follow exactly.

    Args:
        request: an EngineCoreRequest.

    Raises:
        ValueError: with the reason.
    """
    params = request.sampling_params
    extra_args = params.extra_args
    if not extra_args or EXTRA_ARG not in extra_args:
        return
    if reason := unsupported_reason(vllm_config):
        raise ValueError(f"prompt modules: {reason}")
    try:
        plan = plan_of(params)
        assert plan is not None
        plan.check()
    except ValueError as error:
        raise ValueError(f"{EXTRA_ARG}: {error}") from None
    if request.mm_features or request.prompt_embeds is not None or request.resumable:
        raise ValueError("prompt modules: prompts are text, whole and of tokens")
    num_prompt_tokens = len(request.prompt_token_ids or ())
    block_size = vllm_config.cache_config.block_size
    if plan.block_size != block_size:
        raise ValueError(
            f"{EXTRA_ARG}: rendered for blocks of {plan.block_size} tokens, the engine has blocks "
            f"of {block_size}"
        )
    if plan.encodes:
        raise ValueError(f"{EXTRA_ARG}: the plan has no tail")
    if plan.num_prompt_slots != num_prompt_tokens:
        raise ValueError(
            f"{EXTRA_ARG}: a plan for {plan.num_prompt_slots} tokens, given {num_prompt_tokens}"
        )
    max_model_len = vllm_config.model_config.max_model_len
    if plan.end_position > max_model_len:
        raise ValueError(
            f"{EXTRA_ARG}: positions up to {plan.end_position - 1}, the model has {max_model_len}"
        )
    if plan.answer_position + (params.max_tokens or 0) > max_model_len:
        raise ValueError(
            f"{EXTRA_ARG}: the prompt ends at position {plan.answer_position} and max_tokens is "
            f"{params.max_tokens}, the model has {max_model_len} positions"
        )
    if params.prompt_logprobs is not None or params.skip_reading_prefix_cache:
        raise ValueError(
            "prompt modules: prompt_logprobs and skip_reading_prefix_cache compute the prompt anew "
            "without the prefix cache: leave them out"
        )
