# SPDX-License-Identifier: Apache-2.0
"""Prompts with modules for servers: the field `relay` of completions and chat completions."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_relay.prefix_cache.modules.plan import EXTRA_ARG
from vllm_relay.prefix_cache.modules.render import REPAIR_TOKENS, Mode
from vllm_relay.prefix_cache.modules.schema import SchemaError
from vllm_relay.prefix_cache.modules.xml_tree import PmlError

if TYPE_CHECKING:
    from vllm_relay.prefix_cache.modules.schema_store import SchemaStore

FIELD = "relay"
STORE_ATTRIBUTE = "relay_schemas"
"""Where vLLM's renderer keeps the SchemaStore of its server."""
STAND_IN_PROMPT = "relay"
"""The prompt of completions that leave it out; vLLM demands one."""
_PROMPT_TAG = re.compile(r"\s*<prompt[\s/>]")
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
    repair_tokens: int = Field(default=REPAIR_TOKENS, ge=0)

    @property
    def markup(self) -> str:
        """The whole element.

        Raises:
            ValueError: its schema is not known.
        """
        if _PROMPT_TAG.match(self.prompt):
            if self.schema_name is not None:
                raise ValueError(f"{FIELD}.schema: {FIELD}.prompt is a <prompt>, leave it out")
            return self.prompt
        if self.schema_name is None:
            raise ValueError(
                f"{FIELD}.schema: expected the name of a schema, or {FIELD}.prompt as <prompt "
                'schema="NAME">...</prompt>'
            )
        name = self.schema_name.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
        return f'<prompt schema="{name}">{self.prompt}</prompt>'


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
    store: SchemaStore | None = getattr(renderer, STORE_ATTRIBUTE, None)
    if store is None:
        raise ValueError(f"{FIELD}: this server knows no schemas: {_why_not(renderer)}")
    try:
        modular = ModularPrompt.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, (FIELD, *first["loc"])))
        raise ValueError(f"{where}: {first['msg']}") from None
    _refuse_what_changes_prompts(request)
    try:
        rendered = store.render(
            modular.markup, mode=modular.mode, repair_tokens=modular.repair_tokens
        )
    except (PmlError, SchemaError) as error:
        raise ValueError(f"{FIELD}.prompt: {error}") from None
    object.__setattr__(request, _USAGE_ATTRIBUTE, rendered.module_tokens)
    if rendered.plan is not None:
        request.vllm_xargs = {**(request.vllm_xargs or {}), EXTRA_ARG: rendered.plan.to_argument()}
        if store.max_model_len is not None:
            default = renderer.model_config.get_diff_sampling_param().get("max_tokens")
            _limit_output(request, store.max_model_len - rendered.num_taken, default)
    return rendered.token_ids


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


def _limit_output(request: Any, most: int, default: int | None) -> None:
    """No more tokens than there are positions behind the prompt.

    Args:
        default: the model's, for requests that say nothing.
    """
    given = [
        name
        for name in ("max_completion_tokens", "max_tokens")
        if getattr(request, name, None) is not None
    ]
    for name in given:
        setattr(request, name, min(getattr(request, name), most))
    if not given:
        request.max_tokens = most if default is None else min(most, default)


def _why_not(renderer: Any) -> str:
    return getattr(renderer, "relay_modules_reason", "it has not started yet")


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
