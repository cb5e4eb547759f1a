# SPDX-License-Identifier: Apache-2.0
"""Routes of servers, and the prompts and responses of vLLM's own routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from vllm_relay.vllm_changes.wrap import wrap


def serve_endpoints(make_endpoints: Callable[[], Sequence[Any]]) -> None:
    """Add the endpoint plugins of ``make_endpoints()`` to every server that generates.

    Reason: vLLM loads endpoint plugins only if VLLM_PLUGINS names them, which would make a server
    start without its routes, its system prompts and its contexts.
    Remove when: endpoint plugins can be selected by the configuration.
    """
    from vllm import plugins

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_endpoint_plugins(supported_tasks: Any = None, *args: Any, **kwargs: Any) -> Any:
            loaded = original(supported_tasks, *args, **kwargs)
            if "generate" not in (supported_tasks or ()):
                return loaded
            return [*loaded, *make_endpoints()]

        return load_endpoint_plugins

    wrap(plugins, "load_endpoint_plugins", make)


def render_prompts_by(tokens_of: Callable[[Any, Any], list[int] | None]) -> None:
    """Let the tokens of completions and chat completions be ``tokens_of(renderer, request)``, where
    it returns any; its ValueError refuses the request.

    Reason: vLLM ignores fields it does not know, and endpoint plug-ins can add routes only.
    Remove when: plug-ins can render prompts.
    """
    from vllm.renderers.online_renderer import OnlineRenderer

    def maker(result: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            async def render(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    token_ids = tokens_of(self, request)
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


def add_to_usage(
    note_of: Callable[[Any], Callable[[Any], None] | None],
    add_usage: Callable[[Any, Any], None],
    with_usage: Callable[[Any, Any], Any],
) -> None:
    """Call ``add_usage(request, usage)`` for each response to a completion or chat completion, and
    send ``with_usage(request, chunks)`` where it is a stream. What ``note_of(request)`` returns is
    given all outputs of the engine before that, if it is not None.

    Reason: nothing on the way from the engine to a response carries data of plug-ins.
    Remove when: it does.
    """
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    async def passed(note: Callable[[Any], None], outputs: Any) -> AsyncIterator[Any]:
        async with aclosing(outputs):
            async for each in outputs:
                note(each[1] if isinstance(each, tuple) else each)
                yield each

    def noted(request: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        note = note_of(request)
        if note is None:
            return args
        return tuple(passed(note, each) if hasattr(each, "__aiter__") else each for each in args)

    def make_completion(original: Callable[..., Any]) -> Callable[..., Any]:
        def to_response(self: Any, outputs: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            if (note := note_of(request)) is not None:
                for output in outputs:
                    note(output)
            response = original(self, outputs, request, *args, **kwargs)
            add_usage(request, getattr(response, "usage", None))
            return response

        return to_response

    def make_chat(original: Callable[..., Any]) -> Callable[..., Any]:
        async def full_generator(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            response = await original(self, request, *noted(request, args), **kwargs)
            add_usage(request, getattr(response, "usage", None))
            return response

        return full_generator

    def make_stream(original: Callable[..., Any]) -> Callable[..., Any]:
        def stream_generator(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            return with_usage(request, original(self, request, *noted(request, args), **kwargs))

        return stream_generator

    completion, chat = OpenAIServingCompletion, OpenAIServingChat
    wrap(completion, "request_output_to_completion_response", make_completion)
    wrap(completion, "completion_stream_generator", make_stream)
    wrap(chat, "chat_completion_full_generator", make_chat)
    wrap(chat, "chat_completion_stream_generator", make_stream)
