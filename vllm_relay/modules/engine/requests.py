# SPDX-License-Identifier: Apache-2.0
"""What engines and requests with plans are refused, and what such requests are given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_relay.modules.markup.pml import read_schema
from vllm_relay.modules.prompt.plan import EXTRA_ARG, plan_of
from vllm_relay.modules.prompt.render import RenderedPrompt

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

    from vllm_relay.config import RelayConfig


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
    """Refuse an EngineCoreRequest, by a ValueError, with a plan that this engine would not follow
    exactly."""
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


def check_schemas(vllm_config: VllmConfig, options: RelayConfig) -> None:
    """Refuse configured schemas, by a ValueError, that cannot be read or used by this engine."""
    if not options.schemas:
        return
    if reason := unsupported_reason(vllm_config):
        raise ValueError(f"additional_config.relay.schemas: {reason}")
    for path in options.schemas:
        try:
            read_schema(Path(path))
        except OSError as error:
            raise ValueError(f"additional_config.relay.schemas: {path}: {error}") from None
        except ValueError as error:
            raise ValueError(f"additional_config.relay.schemas: {error}") from None


def unsupported_reason(vllm_config: VllmConfig) -> str | None:
    """Why this engine cannot use stored modules; None: it can."""
    from vllm.platforms import current_platform

    from vllm_relay.attention_backends.cuda.relay_choice import kernels_for
    from vllm_relay.config import scheduler_is_selected
    from vllm_relay.limits import relay_is_selected, sparse_is_selected

    if not relay_is_selected(vllm_config) or sparse_is_selected(vllm_config):
        return "only the RELAY backend masks their padding: use --attention-backend relay"
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        return "their padding is masked on CPUs and NVIDIA GPUs only"
    if current_platform.is_cuda() and kernels_for(vllm_config) != "triton":
        return (
            "vLLM's kernels see all tokens of a block: add "
            "additional_config.relay.cuda_kernels=triton"
        )
    if not scheduler_is_selected(vllm_config):
        return "only RelayScheduler waits for them: add additional_config.relay.scheduler=true"
    if not vllm_config.cache_config.enable_prefix_caching:
        return "they live in the prefix cache: leave --no-enable-prefix-caching out"
    if vllm_config.speculative_config is not None:
        return (
            "drafts of speculative decoding know nothing of their positions, and may be part of "
            "the names of blocks: remove --speculative-config"
        )
    if vllm_config.kv_transfer_config is not None:
        return "KV connectors know nothing of their blocks: remove --kv-transfer-config"
    return _model_reason(vllm_config)


def _model_reason(vllm_config: VllmConfig) -> str | None:
    model_config = vllm_config.model_config
    if model_config.uses_mrope or getattr(model_config, "uses_xdrope_dim", 0):
        return "positions of several dimensions (M-RoPE)"
    if model_config.is_hybrid or model_config.is_attention_free:
        return "state-space layers keep no keys and values of a module"
    if getattr(model_config, "uses_alibi", False):
        return "ALiBi takes distances from slots, not from positions"
    if model_config.attention_chunk_size is not None:
        return "layers with chunked local attention see nothing of modules in other chunks"
    if model_config.get_sliding_window() is not None:
        return "layers with a sliding window see nothing of modules further away"
    return None
