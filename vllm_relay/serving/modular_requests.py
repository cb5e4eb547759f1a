# SPDX-License-Identifier: Apache-2.0
"""Prompts with modules for servers: the field `relay` of completions and chat completions."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_relay.modules.markup.xml_tree import PmlError
from vllm_relay.modules.prompt.plan import EXTRA_ARG, MISSED
from vllm_relay.modules.prompt.render import Mode

if TYPE_CHECKING:
    from typing_extensions import Self

    from vllm_relay.modules.prompt.render import RenderedPrompt
    from vllm_relay.modules.prompt.schema_store import SchemaStore

FIELD = "relay"
_STORE_ATTRIBUTE = "relay_schemas"
_PROMPT_TAG = re.compile(r"\s*<prompt[\s/>]")
STAND_IN_PROMPT = "relay"
"""The prompt of completions that leave it out; vLLM demands one."""
_USAGE_ATTRIBUTE = "_relay_module_tokens"


class ModularPrompt(BaseModel):
    """The field `relay` of a request.

    Attributes:
        prompt: PML; a `<prompt schema="...">` element, or what stands in one.
        schema_name: the name of its schema, if the prompt does not say it.
    """

    model_config = ConfigDict(extra="forbid")

    prompt: str
    schema_name: str | None = Field(default=None, alias="schema")
    mode: Mode = "modular"
    repair_tokens: int | None = Field(default=None, ge=0, strict=True)

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        is_element = _PROMPT_TAG.match(self.prompt) is not None
        if is_element and self.schema_name is not None:
            raise ValueError("the prompt is a <prompt>, leave schema out")
        if not is_element and self.schema_name is None:
            raise ValueError(
                "schema: expected the name of a schema, or prompt as "
                '<prompt schema="NAME">...</prompt>'
            )
        return self

    def render(self, store: SchemaStore, *, to_pin: bool = False) -> RenderedPrompt:
        """What the engine computes.

        Args:
            to_pin: see `SchemaStore.render`.

        Raises:
            ValueError: the prompt cannot be rendered; with the reason.
        """
        try:
            return store.render(
                self.prompt,
                schema=self.schema_name,
                mode=self.mode,
                repair_tokens=self.repair_tokens,
                to_pin=to_pin,
            )
        except PmlError as error:
            raise ValueError(f"{FIELD}.prompt: {error}") from None
        except ValueError as error:  # begins with the name of a field
            raise ValueError(f"{FIELD}.{error}") from None


def keep_store(renderer: Any, store: SchemaStore | str) -> None:
    """Let a renderer of vLLM render with the schemas of its server.

    Args:
        store: or why there is none.
    """
    setattr(renderer, _STORE_ATTRIBUTE, store)


def store_of(renderer: Any) -> SchemaStore:
    """
    Raises:
        ValueError: there is none; with the reason.
    """
    store: SchemaStore | str = getattr(renderer, _STORE_ATTRIBUTE, "the server has not started")
    if isinstance(store, str):
        raise ValueError(f"prompt modules: {store}")
    return store


def apply_modular_prompt(renderer: Any, request: Any) -> list[int] | None:
    """Render the field `relay` of a request and give the request its plan.

    Returns:
        The tokens of its prompt; None: it has no such field.

    Raises:
        ValueError: the prompt cannot be rendered; with the reason.
    """
    given = (request.model_extra or {}).get(FIELD)
    if given is None:
        return None
    store = store_of(renderer)
    try:
        modular = ModularPrompt.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, (FIELD, *first["loc"])))
        raise ValueError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None
    _refuse_what_changes_prompts(request)
    rendered = modular.render(store)
    object.__setattr__(request, _USAGE_ATTRIBUTE, dict(rendered.module_tokens))
    if rendered.plan is not None:
        request.vllm_xargs = {**(request.vllm_xargs or {}), EXTRA_ARG: rendered.plan.to_argument()}
        _limit_output(request, rendered, renderer, store.max_model_len)
    return rendered.token_ids


def _limit_output(
    request: Any, rendered: RenderedPrompt, renderer: Any, max_model_len: int | None
) -> None:
    """No more tokens than there are positions behind the prompt.

    Raises:
        ValueError: the request wants more.
    """
    if max_model_len is None:
        return
    most = rendered.limit_output(None, max_model_len)
    for name in ("max_completion_tokens", "max_tokens"):  # the first counts
        given = getattr(request, name, None)
        if given is None:
            continue
        if given > most:
            raise ValueError(
                f"{name}: given {given}, but the prompt leaves {most} tokens: it takes "
                f"{rendered.min_model_len} of {max_model_len}, with padding and the gaps of what "
                "it does not import"
            )
        return
    default = renderer.model_config.get_diff_sampling_param().get("max_tokens")
    request.max_tokens = rendered.limit_output(default, max_model_len)


def _refuse_what_changes_prompts(request: Any) -> None:
    for name in ("prompt", "prompt_embeds", "messages", "suffix", "tools"):
        value = getattr(request, name, None)
        if value and not (name == "prompt" and value == STAND_IN_PROMPT):
            raise ValueError(
                f"{name}: given beside {FIELD}, whose prompt is the whole prompt: leave it out"
            )
    unused = ("chat_template", "chat_template_kwargs", "documents", "continue_final_message")
    for name in ("use_beam_search", "echo", "truncate_prompt_tokens", *unused):
        if getattr(request, name, None):
            raise ValueError(f"{name}: not with {FIELD}")
    for name in ("add_special_tokens", "add_generation_prompt"):
        if name in request.model_fields_set:
            raise ValueError(f"{name}: not with {FIELD}: leave it out")


def note_of(request: Any) -> Callable[[Any], None] | None:
    """What takes the modules that were computed for a request, which its last output names, out of
    those that were cached."""
    tokens = getattr(request, _USAGE_ATTRIBUTE, None)
    if not tokens:
        return None
    names = list(tokens)

    def note(output: Any) -> None:
        for place in getattr(output, MISSED, ()):
            tokens[names[place]] = 0

    return note


def add_usage(request: Any, usage: Any) -> None:
    """Tell in the usage of a response how many tokens of each module were cached."""
    tokens = getattr(request, _USAGE_ATTRIBUTE, None)
    if tokens is not None and usage is not None:
        usage.relay = {"cached_tokens_by_module": tokens}


def with_usage(request: Any, chunks: AsyncIterator[str]) -> AsyncIterator[str]:
    """The same in the chunks of a stream that have a usage."""
    tokens = getattr(request, _USAGE_ATTRIBUTE, None)
    return chunks if tokens is None else _with_usage(tokens, chunks)


async def _with_usage(tokens: dict[str, int], chunks: AsyncIterator[str]) -> AsyncIterator[str]:
    async for chunk in chunks:
        if '"usage":{' in chunk:
            data = json.loads(chunk.removeprefix("data: "))
            data["usage"]["relay"] = {"cached_tokens_by_module": tokens}
            chunk = f"data: {json.dumps(data, separators=(',', ':'), ensure_ascii=False)}\n\n"
        yield chunk
