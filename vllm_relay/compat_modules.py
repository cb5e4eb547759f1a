# SPDX-License-Identifier: Apache-2.0
"""The changes to vLLM that prompt modules need, as `compat.py` makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_relay.compat_wrap import wrap


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


def give_positions_to_model(
    on_batch: Callable[[Any], None], on_inputs: Callable[[Any, Any], None]
) -> None:
    """Let model runner V2 give models positions in a buffer of their own, written by
    ``on_inputs(batch, positions)`` when those of the slots are there, and call ``on_batch(batch)``
    before attention metadata is built.

    Reason: as for ``call_after_inputs``; V2 keeps slots in the positions it samples with, and its
    batch is new in each step.
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

    def make_attn(original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_attn(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            on_batch(input_batch)
            return original(self, input_batch, *args, **kwargs)

        return prepare_attn

    wrap(DefaultModelState, "prepare_inputs", make_inputs)
    wrap(DefaultModelState, "prepare_dummy_inputs", make_dummy)
    wrap(DefaultModelState, "prepare_attn", make_attn)


def gives_positions(model_runner: Any) -> bool:
    """Whether ``give_positions_to_model`` reaches the model of a V2 runner: models may bring a
    model state of their own."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    names = ("prepare_inputs", "prepare_dummy_inputs", "prepare_attn")
    state_cls = type(model_runner.model_state)
    return all(getattr(state_cls, name, None) is getattr(DefaultModelState, name) for name in names)


def check_modular_requests() -> None:
    """Refuse requests with modules that their engine would not compute exactly, in the front end.

    Reason: plans travel in extra_args, which nobody looks at.
    Remove when: plug-ins can check requests; platforms can, but without the configuration.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_relay.modules.requests import check_request

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
            request = original(self, *args, **kwargs)
            if request.sampling_params is not None:
                try:
                    check_request(self.vllm_config, request)
                except ValueError as error:  # whose message AsyncLLM.generate would drop
                    raise VLLMValidationError(str(error)) from error
            return request

        return process_inputs

    wrap(InputProcessor, "process_inputs", make)


def tell_tokens_without_padding() -> None:
    """Give the outputs of modular prompts the tokens that are seen, and count only these as cached.

    Reason: front ends count the tokens of a prompt, and engine cores those found in the cache, with
    the padding between modules.
    Remove when: requests can tell which of their tokens are no text.
    """
    from vllm.v1.engine.output_processor import RequestState

    from vllm_relay.modules.plan import plan_of

    def make_new(original: Callable[..., Any]) -> Callable[..., Any]:
        def from_new_request(
            cls: type, tokenizer: Any, request: Any, *args: Any, **kwargs: Any
        ) -> Any:
            state = original(cls, tokenizer, request, *args, **kwargs)
            state.relay_hidden_tokens = 0
            plan = plan_of(request.sampling_params)
            if plan is not None:
                state.prompt_token_ids = plan.seen_tokens(request.prompt_token_ids)
                state.prompt_len = len(state.prompt_token_ids)
                state.relay_hidden_tokens = len(request.prompt_token_ids) - state.prompt_len
            return state

        return from_new_request

    def make_output(original: Callable[..., Any]) -> Callable[..., Any]:
        def make_request_output(self: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self, "relay_hidden_tokens", 0) and self.num_cached_tokens:
                self.num_cached_tokens -= self.relay_hidden_tokens
                self.relay_hidden_tokens = 0
            return original(self, *args, **kwargs)

        return make_request_output

    wrap(RequestState, "from_new_request", make_new)
    wrap(RequestState, "make_request_output", make_output)


def hash_modules_apart() -> None:
    """Let engine cores hash the blocks of modules without what stands before them.

    Reason: vLLM chains each block to all before it; see `block_hashes.py`.
    Called when EngineCore asks for its scheduler class: it makes its hasher later.
    Remove when: requests can bring a hasher.
    """
    from vllm.v1.engine import core

    from vllm_relay.modules.block_hashes import module_block_hasher

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_request_block_hasher(
            hash_block_size: int, hash_function: Any, *args: Any, **kwargs: Any
        ) -> Any:
            chained = original(hash_block_size, hash_function, *args, **kwargs)
            return module_block_hasher(chained, hash_block_size, hash_function)

        return get_request_block_hasher

    wrap(core, "get_request_block_hasher", make)


def render_modular_prompts() -> None:
    """Let the field ``relay`` of completions and chat completions be their prompt.

    Reason: vLLM ignores fields it does not know, and endpoint plug-ins can add routes only.
    Remove when: plug-ins can render prompts.
    """
    from vllm.renderers.online_renderer import OnlineRenderer

    from vllm_relay.modules.online import apply_modular_prompt

    def maker(result: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            async def render(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    token_ids = apply_modular_prompt(self, request)
                except ValueError as error:
                    return self.create_error_response(str(error), param="relay")
                if token_ids is None:
                    return await original(self, request, *args, **kwargs)
                inputs = await self.preprocess_completion(
                    request, prompt_input=token_ids, prompt_embeds=None
                )
                return result(inputs)

            return render

        return make

    wrap(OnlineRenderer, "render_completion", maker(lambda inputs: inputs))
    wrap(OnlineRenderer, "render_chat", maker(lambda inputs: ([], inputs)))


def tell_usage_by_module() -> None:
    """Tell in the usage of completions and chat completions what was cached of each module.

    Reason: nothing on the way from the engine to a response carries data of plug-ins.
    Remove when: it does.
    """
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    from vllm_relay.modules.online import add_usage, with_usage

    def make_completion(original: Callable[..., Any]) -> Callable[..., Any]:
        def to_response(self: Any, outputs: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            response = original(self, outputs, request, *args, **kwargs)
            add_usage(request, getattr(response, "usage", None))
            return response

        return to_response

    def make_chat(original: Callable[..., Any]) -> Callable[..., Any]:
        async def full_generator(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            response = await original(self, request, *args, **kwargs)
            add_usage(request, getattr(response, "usage", None))
            return response

        return full_generator

    def make_stream(original: Callable[..., Any]) -> Callable[..., Any]:
        def stream_generator(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            return with_usage(request, original(self, request, *args, **kwargs))

        return stream_generator

    completion, chat = OpenAIServingCompletion, OpenAIServingChat
    wrap(completion, "request_output_to_completion_response", make_completion)
    wrap(completion, "completion_stream_generator", make_stream)
    wrap(chat, "chat_completion_full_generator", make_chat)
    wrap(chat, "chat_completion_stream_generator", make_stream)
