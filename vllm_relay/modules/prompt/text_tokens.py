# SPDX-License-Identifier: Apache-2.0
"""How the texts of a model become tokens, and what its chat template writes around turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from vllm_relay.modules.markup.schema import SchemaError

Render = Callable[[list[dict[str, str]], bool], str]
"""Messages, and whether a prompt for an answer follows -> text."""

MAX_TURNS = 500
"""Of a conversation: templates are programs, and may take long for many."""
_STAND_IN = "relay{}stands{}in"
_STAND_INS = re.compile(r"relay(\d+)stands\1in")


class ChatTurns:
    """Opening and closing texts of turns, found by rendering turns with stand-ins for their
    texts."""

    def __init__(self, render: Render) -> None:
        self._render = render

    def texts_between(self, roles: Sequence[str], *, asks: bool = False) -> list[str]:
        """The texts before, between and behind the texts of a conversation's turns.

        Args:
            roles: of the turns.
            asks: whether the last text ends in the prompt for an answer.

        Raises:
            SchemaError: there are too many turns, or the template refuses them or changes their
                texts.
        """
        if len(roles) > MAX_TURNS:
            raise SchemaError(f"found {len(roles)} turns, expected {MAX_TURNS} at most")
        messages = [
            {"role": role, "content": _STAND_IN.format(number, number)}
            for number, role in enumerate(roles)
        ]
        try:
            text = self._render(messages, asks)
        except SchemaError:
            raise
        except Exception as error:  # templates raise what they like
            raise SchemaError(
                f"the chat template refuses the turns {', '.join(roles)}: {error}"
            ) from error
        pieces = _STAND_INS.split(text)
        found = pieces[1::2]
        for number, role in enumerate(roles):
            if found[number : number + 1] != [str(number)] or len(found) > len(roles):
                raise SchemaError(
                    f"the chat template does not write a turn of {role} once and in its place: "
                    "leave out the tags of turns and write their markup into the schema"
                )
        return pieces[::2]

    def openings_and_closings(self, roles: Sequence[str]) -> list[tuple[str, str]]:
        """For each turn, what stands before and behind its text; raises as `texts_between`."""
        if not roles:
            return []
        # prompts go on with a question: templates may write no turn without one
        all_roles = [*roles, "user"] if roles[-1] != "user" else [*roles]
        between = self.texts_between(all_roles)
        found: list[tuple[str, str]] = []
        closings: dict[tuple[str, str], str] = {}
        closing = ""
        for number, role in enumerate(roles):
            opening = between[number].removeprefix(closing)
            behind = between[number + 1]
            if (role, behind) not in closings:  # few differ, however many turns there are
                closings[role, behind] = self._closing(roles[: number + 1], behind)
            closing = closings[role, behind]
            found.append((opening, closing))
        return found

    def _closing(self, roles: Sequence[str], behind: str) -> str:
        """What belongs to the last of these turns, as far as it can be told; `behind` stands behind
        it where turns follow."""
        try:
            closing = self.texts_between(roles)[-1]
        except SchemaError:  # as for a system prompt without a question
            return ""
        return closing if behind.startswith(closing) else ""

    def continuation(
        self,
        written: Sequence[tuple[str, str, str]],
        text: str,
        turns: Sequence[tuple[str, str]],
        *,
        is_open: bool,
    ) -> str:
        """What follows turns that are written already, up to the prompt for an answer.

        Args:
            written: role, opening and closing text of each of these.
            text: what is still to stand in the last one, if that is open.
            turns: role and text of those behind them.
            is_open: whether the closing text of the last one is not written yet.

        Raises:
            SchemaError: see `texts_between`; or the template writes them in another way here.
        """
        roles = [*(role for role, _, _ in written), *(role for role, _ in turns)]
        between = self.texts_between(roles, asks=True)
        closing = ""
        for number, (_, opening, next_closing) in enumerate(written):
            if between[number] != closing + opening:
                raise SchemaError(
                    "the chat template writes the turns of this prompt in another way than those "
                    f"of its schema: expected {closing + opening!r} before turn {number + 1}, "
                    f"found {between[number]!r}"
                )
            closing = next_closing
        first, *others = between[len(written) :]
        if not is_open:
            if not first.startswith(closing):
                raise SchemaError(
                    f"the chat template does not write {closing!r} behind the last turn of the "
                    "schema"
                )
            first = first.removeprefix(closing)
        behind = [a + b for (_, a), b in zip(turns, others, strict=True)]
        return "".join((text, first, *behind))


def render_of(tokenizer: Any, chat_template: str | None = None, **keywords: Any) -> Render:
    """Of a Hugging Face tokenizer, with a template instead of its own; where there is neither, what
    is made raises a SchemaError."""

    def render(messages: list[dict[str, str]], asks: bool) -> str:
        if chat_template is None and tokenizer.chat_template is None:
            raise SchemaError(
                "the model has no chat template, as the tags of turns need: give one with "
                "--chat-template, or leave them out and write the markup of turns into the schema"
            )
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=asks,
            chat_template=chat_template,
            **keywords,
        )

    return render


class TextTokens:
    """A Hugging Face tokenizer, for pieces of prompts; see `render_of`."""

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        render = render_of(tokenizer, chat_template, **(chat_template_kwargs or {}))
        self.turns = ChatTurns(render)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a piece of a prompt."""
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []

    @cached_property
    def beginning(self) -> list[int]:
        """What every prompt begins with that no chat template is applied to."""
        return list(self._tokenizer.encode("", add_special_tokens=True))

    def of_prompt(self, text: str, *, has_turns: bool) -> list[int]:
        """The tokens of a whole prompt; chat templates write its first ones themselves."""
        return list(self._tokenizer.encode(text, add_special_tokens=not has_turns))

    @cached_property
    def placeholder(self) -> int:
        """The token that stands for what is not known yet."""
        tokenizer = self._tokenizer
        blank = self(" ")
        for token in (tokenizer.unk_token_id, blank[0] if len(blank) == 1 else None):
            if token is not None:
                return int(token)
        return int(tokenizer.pad_token_id or tokenizer.eos_token_id or 0)
