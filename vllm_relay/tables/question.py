# SPDX-License-Identifier: Apache-2.0
"""What is asked of every row, and what a request holds beside the prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vllm_relay.arguments import check_count
from vllm_relay.tables.images import ImageFields
from vllm_relay.tables.outputs import Output, well_formed

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


DEFAULT_MAX_TOKENS = 64
"""Of an answer, where nobody has chosen by the model and the type of the answers."""

BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
"""In a question's text: those that are text, or the name of a field in those around it."""

_SHOWN_CHARS = 20


@dataclass(frozen=True)
class Question:
    """
    Attributes:
        text: the same for every row; ``{name}`` refers to the row's field of that name, whatever
            it holds but braces; ``{{`` and ``}}`` are braces.
        fields: names of the fields that the prompt holds, in the caller's order.
        output: what the answers are.
        max_tokens: of an answer; None lets jobs choose, see `with_max_tokens`.
        temperature: 0 answers greedily.
        seed: of a temperature above 0.
        set_fields: those of `fields` whose value is a list, and whose elements may be put in any
            order.
        request: what else the model is told.
        images: those of `fields` that are images, whose values are references; None without any.

    Raises:
        ValueError: there is no text or no field, a text stands for a list, a name is there twice,
            a text cannot be UTF-8, a brace has no other one, the text, `set_fields` or `images`
            refer to a field that is not there, or a number is out of its range.
    """

    text: str
    fields: tuple[str, ...]
    output: Output = field(default_factory=Output)
    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int | None = None
    set_fields: tuple[str, ...] = ()
    request: RequestOptions = RequestOptions()
    images: ImageFields | None = None

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError("an empty question was given, expected a text")
        for what in ("fields", "set_fields"):
            given = getattr(self, what)
            if isinstance(given, str):
                raise ValueError(
                    f"{what}={given!r} given, expected a list of names: give {[given]}"
                )
        if not self.fields:
            raise ValueError(f"question {self.text!r} has no fields, expected at least one")
        twice = {name for name in self.fields if self.fields.count(name) > 1}
        if twice:
            raise ValueError(
                f"fields {sorted(twice)} given twice: give one of them another name, as in "
                f"{{name: expression}}"
            )
        for text in (self.text, *self.fields):
            if text != well_formed(text):
                raise ValueError(
                    f"{text!r} given as question or field, expected a text that can be UTF-8"
                )
        images = self.images.names if self.images is not None else []
        named = (("text", self.placeholders), ("set_fields", self.set_fields), ("images", images))
        for what, names in named:
            unknown = [name for name in names if name not in self.fields]
            if unknown:
                braces = "; braces that are no field are written {{ and }}" * (what == "text")
                raise ValueError(
                    f"{what} of question {self.text!r} names {unknown}, expected some of its "
                    f"fields {list(self.fields)}{braces}"
                )
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens)
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature={self.temperature} given, expected 0 to 2")

    @property
    def placeholders(self) -> list[str]:
        """The fields that the text refers to."""
        return placeholders_of(self.text)

    @property
    def prompt_text(self) -> str:
        """The text as the model reads it."""
        return BRACES.sub(lambda found: found[0][:1] if found[1] is None else found[0], self.text)

    @property
    def most_tokens(self) -> int:
        """Of an answer."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


def placeholders_of(text: str) -> list[str]:
    """The names that a question's text refers to, each once.

    Raises:
        ValueError: a brace opens or closes nothing, or a name is empty.
    """
    names, end = [], 0
    for found in BRACES.finditer(text):
        _check_no_brace(text, end, found.start())
        names.append(found[1])
        end = found.end()
    _check_no_brace(text, end, len(text))
    if "" in names:
        raise ValueError(
            f"text of question {text!r} names [''], expected names of fields in its braces: "
            f"a field is written {{name}}, and braces that are text {{{{ and }}}}"
        )
    return list(dict.fromkeys(name for name in names if name is not None))


def _check_no_brace(text: str, begin: int, end: int) -> None:
    lone = re.compile("[{}]").search(text, begin, end)
    if lone is None:
        return
    other = "}" if lone[0] == "{" else "{"
    place = max(lone.start() - _SHOWN_CHARS, 0)
    raise ValueError(
        f"question {text!r} has a {lone[0]!r} without its {other!r} in "
        f"{text[place : lone.end() + _SHOWN_CHARS]!r}: a field is written {{name}}, and braces "
        f"that are text {{{{ and }}}}"
    )
