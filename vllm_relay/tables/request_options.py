# SPDX-License-Identifier: Apache-2.0
"""What a request holds beside the prompt and the type of its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

_OWN_PARAMETERS = ("max_tokens", "temperature", "seed")
# with these, a reply would hold something else than one answer of the question's type
_RESERVED = (
    *("model", "prompt", "messages", "n", "best_of", "stream", "stream_options", "echo"),
    *("logprobs", "prompt_logprobs", "max_completion_tokens", "response_format"),
    *("structured_outputs", "output_kind"),
)


@dataclass(frozen=True)
class RequestOptions:
    """
    Attributes:
        system_prompt: what the system says before the user; "" says nothing.
        sampling: parameters of sampling by their names in vLLM and OpenAI's API: top_p, top_k,
            min_p, presence_penalty, stop, ...
        chat_template_kwargs: variables of the model's chat template, such as enable_thinking.
        extra_body: further fields of the requests that a server gets. A model in this process has
            no requests: those that vLLM's SamplingParams has are taken, others are refused.

    Mappings hold what JSON can hold.

    Raises:
        ValueError: a name is reserved, or a value is none of JSON.
    """

    system_prompt: str = ""
    sampling: Mapping[str, Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    extra_body: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("sampling", "chat_template_kwargs", "extra_body"):
            given = getattr(self, name)
            try:
                if not isinstance(given or {}, Mapping):
                    raise ValueError("it is no object")
                copied = json.loads(json.dumps(dict(given or {}), sort_keys=True, allow_nan=False))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{name}={given!r} given, expected an object of JSON: {error}"
                ) from None
            object.__setattr__(self, name, copied)
        for name in ("sampling", "extra_body"):
            for key in getattr(self, name):
                _check_name(name, key)

    def __hash__(self) -> int:
        return hash(json.dumps(self.as_json(), sort_keys=True))

    def as_json(self) -> dict[str, Any]:
        """Those that are given, by name."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in named.items() if value}

    def over(self, defaults: RequestOptions) -> RequestOptions:
        """These, and what else the defaults say."""
        return RequestOptions(
            self.system_prompt or defaults.system_prompt,
            {**(defaults.sampling or {}), **(self.sampling or {})},
            {**(defaults.chat_template_kwargs or {}), **(self.chat_template_kwargs or {})},
            {**(defaults.extra_body or {}), **(self.extra_body or {})},
        )

    @property
    def body(self) -> dict[str, Any]:
        """Fields of a request's body."""
        return {**(self.sampling or {}), **(self.extra_body or {})}


def _check_name(option: str, key: str) -> None:
    if key in _OWN_PARAMETERS:
        raise ValueError(f"{option} with {key!r} given, which is a parameter of its own: give that")
    if key == "chat_template_kwargs":
        raise ValueError(f"{option} with {key!r} given, which is a parameter of its own: give that")
    if key in _RESERVED:
        raise ValueError(
            f"{option} with {key!r} given, which follows from the question: leave it out"
        )
