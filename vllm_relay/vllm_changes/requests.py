# SPDX-License-Identifier: Apache-2.0
"""What front ends check of a request, and count of its prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_relay.vllm_changes.wrap import wrap


def check_requests(check: Callable[[Any, Any], None]) -> None:
    """Call ``check(vllm_config, request)`` in the front end; its ValueError refuses the request.

    Reason: plans travel in extra_args, which nobody looks at.
    Remove when: plug-ins can check requests; platforms can, but without the configuration.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
            request = original(self, *args, **kwargs)
            if request.sampling_params is not None:
                try:
                    check(self.vllm_config, request)
                except ValueError as error:  # whose message AsyncLLM.generate would drop
                    raise VLLMValidationError(str(error)) from error
            return request

        return process_inputs

    wrap(InputProcessor, "process_inputs", make)


def tell_tokens_without_padding(seen_tokens: Callable[[Any, list[int]], list[int] | None]) -> None:
    """Give the outputs of a prompt only the tokens that ``seen_tokens(sampling_params, token_ids)``
    returns, where it returns any, and count only these as cached.

    Reason: front ends count the tokens of a prompt, and engine cores those found in the cache, with
    the padding between modules.
    Remove when: requests can tell which of their tokens are no text.
    """
    from vllm.v1.engine.output_processor import RequestState

    def make_new(original: Callable[..., Any]) -> Callable[..., Any]:
        def from_new_request(
            cls: type, tokenizer: Any, request: Any, *args: Any, **kwargs: Any
        ) -> Any:
            state = original(cls, tokenizer, request, *args, **kwargs)
            state.relay_hidden_tokens = 0
            seen = seen_tokens(request.sampling_params, request.prompt_token_ids)
            if seen is not None:
                state.prompt_token_ids, state.prompt_len = seen, len(seen)
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


def carry_to_outputs(name: str) -> None:
    """Take what the kv_transfer_params of a request that has ended have under ``name`` out of them,
    and give it to its last output as an attribute of this name, also where that is added to one
    that nobody has taken yet.

    Reason: nothing else that a scheduler says of one request reaches its output.
    Remove when: outputs of engine cores carry data of plug-ins.
    """
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.output_processor import RequestState

    def make_add(original: Callable[..., Any]) -> Callable[..., Any]:
        def add(self: Any, next_output: Any, *args: Any, **kwargs: Any) -> Any:
            if hasattr(next_output, name):
                setattr(self, name, getattr(next_output, name))
            return original(self, next_output, *args, **kwargs)

        return add

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def make_request_output(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            params = getattr(output, "kv_transfer_params", None)
            if params and name in params:
                others = {key: value for key, value in params.items() if key != name}
                setattr(output, name, params[name])
                output.kv_transfer_params = others or None
            return output

        return make_request_output

    wrap(RequestState, "make_request_output", make, mark="_carries_to_outputs")
    wrap(RequestOutput, "add", make_add)
