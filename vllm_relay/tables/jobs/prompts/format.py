# SPDX-License-Identifier: Apache-2.0
"""How a question and the fields of a row become a prompt."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_relay.tables.question import Question

_MARKS = frozenset("\"'<[(-*#|")
_MARK = "\N{REPLACEMENT CHARACTER}fields\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class PromptTemplate:
    """What stands around the question and the fields.

    The question comes first, so that the prompts of a table begin alike, and every field is text of
    its own, the same wherever it stands.

    Attributes:
        before: with ``{question}``, ``{names}`` (a sentence on braces, where the question has some)
            and ``{answer}`` (a sentence on the answer's type, where it has one).
        field: with ``{name}``, and ``{json}`` or ``{text}`` for the value.
        after: follows the fields.
        base_after: instead of `after` where no chat template is applied.
        chat: whether the model's chat template is applied, if it has one.

    Raises:
        ValueError: ``{question}`` or the value of a field is missing.
    """

    before: str = "{question}{names}{answer}\n\n"
    field: str = '"{name}": {json}\n'
    after: str = ""
    base_after: str = "\nAnswer:"
    chat: bool = True

    def __post_init__(self) -> None:
        if "{question}" not in self.before:
            raise ValueError(f"before={self.before!r} given, expected {{question}} in it")
        if "{json}" not in self.field and "{text}" not in self.field:
            raise ValueError(f"field={self.field!r} given, expected {{json}} or {{text}} in it")

    def render_field(self, name: str, value: str) -> str:
        """
        Args:
            value: as JSON.
        """
        return "".join(
            name
            if part == "{name}"
            else value
            if part == "{json}"
            else text_of(value)
            if part == "{text}"
            else part
            for part in self._field_parts
        )

    @cached_property
    def _field_parts(self) -> list[str]:
        return re.split(r"(\{name\}|\{json\}|\{text\})", self.field)


def text_of(value: str) -> str:
    """A JSON value as text: strings without quotes, all else as it is."""
    return json.loads(value) if value.startswith('"') else value


class PromptFormat:
    """Prompts of one question.

    Args:
        tokenizer: a Hugging Face tokenizer; None counts about four bytes as a token.
        template: what stands around the question and the fields.

    Attributes:
        template: what stands around the question and the fields.
        before, after: the text in front of the fields and behind the last one, which ends without
            its newline.
        before_tokens, after_tokens: their tokens.
        field_end: what every field ends with but the last one of a prompt.
        field_mark: the character that every field begins with, if it ends with a newline; "" if
            that is not known.
    """

    def __init__(self, question: Question, tokenizer: Any | None, template: PromptTemplate) -> None:
        self.template = template
        self._tokenizer = tokenizer
        self._request = question.request
        self._has_turns = bool(
            template.chat and tokenizer is not None and getattr(tokenizer, "chat_template", None)
        )
        output = question.output.description
        parts = {
            "{question}": question.prompt_text,
            "{names}": "\nNames in braces are fields of the record." * bool(question.placeholders),
            "{answer}": f"\n{output}" if output else "",
        }
        self._before = _replaced(template.before, parts)
        is_base = tokenizer is not None and not self._has_turns
        self._after = template.base_after if is_base else template.after
        self.field_end = "\n" if template.field.endswith("\n") else ""
        self._head, self._tail = self._surroundings(_MARK)
        # some chat templates leave out spaces around what the user says
        self._is_trimmed = self._surroundings(f" \n{_MARK}\n ") == (self._head, self._tail)
        # the last line of fields ends where the prompt goes on
        self.before = self._head + self._before
        self.after = self._after + self._tail
        mark = template.field[0]
        self.field_mark = mark if self.field_end and mark in _MARKS else ""
        self.before_tokens = self.tokens_of([self.before], whole=True)[0]
        self.after_tokens = self.tokens_of([self.after])[0]

    def message(self, fields: Iterable[str]) -> str:
        """What the user says, of the rendered fields in their order."""
        message = (self._before + "".join(fields)).removesuffix(self.field_end) + self._after
        return message.strip() if self._is_trimmed else message

    @property
    def beginning(self) -> str:
        """`before`, as it stands in prompts."""
        return self._head + (self._before.lstrip() if self._is_trimmed else self._before)

    def ending(self, fields: str) -> str:
        """The last of the rendered fields, and what stands behind them."""
        end = fields.removesuffix(self.field_end) + self._after
        return (end.rstrip() if self._is_trimmed else end) + self._tail

    def token_ids(self, messages: Sequence[str]) -> list[list[int]]:
        """The tokens of whole prompts."""
        return self.tokens_of([self._head + each + self._tail for each in messages], whole=True)

    def tokens_of(self, texts: Sequence[str], *, whole: bool = False) -> list[list[int]]:
        """The tokens of texts.

        Args:
            whole: prompts from their beginning, or what stands somewhere within.
        """
        if self._tokenizer is None:
            return [text_pieces(text).tolist() for text in texts]
        if not texts:
            return []
        special = whole and not self._has_turns
        encoded = self._tokenizer(
            list(texts), add_special_tokens=special, return_attention_mask=False, verbose=False
        )
        return encoded["input_ids"]

    def packed_tokens(self, texts: Sequence[str]) -> Iterator[array[int]]:
        """As `tokens_of`, of texts somewhere within a prompt, in little memory."""
        if self._tokenizer is None:
            return map(text_pieces, texts)
        return (array("I", token_ids) for token_ids in self.tokens_of(texts))

    @property
    def vocabulary(self) -> Sequence[str]:
        """The model's tokens; none without a tokenizer."""
        return [] if self._tokenizer is None else list(self._tokenizer.get_vocab())

    def begins_with_special_token(self, text: str) -> bool:
        """Whether it begins with a token that is found in the text before all others."""
        assert self._tokenizer is not None
        added = self._tokenizer.added_tokens_decoder.values()
        return any(text.startswith(token.content) and not token.lstrip for token in added)

    def _surroundings(self, message: str) -> tuple[str, str]:
        """What the chat template puts in front of a message and behind it."""
        system = self._request.system_prompt
        if not self._has_turns:
            # without a tokenizer this only counts: the server puts the messages together
            head, _, tail = message.partition(_MARK)
            return (f"{system}\n\n{head}" if system else head), tail
        assert self._tokenizer is not None
        from jinja2 import TemplateError

        try:
            rendered = self._tokenizer.apply_chat_template(
                conversation(system, message),
                add_generation_prompt=True,
                tokenize=False,
                **(self._request.chat_template_kwargs or {}),
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the model's chat template refuses its messages: {error}") from error
        head, mark, tail = rendered.partition(_MARK)
        if not mark:
            raise ValueError(
                "the model's chat template leaves the user's message out: give "
                "PromptTemplate(chat=False)"
            )
        return head, tail


def conversation(system_prompt: str, message: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a prompt.

    Args:
        message: of the user, a text or parts of text and images.
    """
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": message}]


def text_pieces(text: str) -> array[int]:
    """Four bytes of a text each, as numbers: equal pieces are equal."""
    encoded = text.encode("utf-8", "surrogatepass")
    return array("I", encoded + bytes(-len(encoded) % 4))


def _replaced(template: str, parts: dict[str, str]) -> str:
    """Each part put in once: what comes with a part is text."""
    return re.sub("|".join(map(re.escape, parts)), lambda found: parts[found[0]], template)
