# SPDX-License-Identifier: Apache-2.0
"""What a chat template writes around the turns of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_relay.prefix_cache.modules.schema import SchemaError

Render = Callable[[list[dict[str, str]], bool], str]
"""Messages, and whether a prompt for an answer follows -> text."""

_STAND_IN = "relay{}stands{}in"


class ChatTurns:
    """Opening and closing texts of turns, found by rendering turns with stand-ins for their texts.

    Args:
        render: applies the chat template of the model.
    """

    def __init__(self, render: Render) -> None:
        self._render = render

    def around(self, roles: Sequence[str], *, asks: bool = False) -> list[str]:
        """The texts before, between and after the texts of a conversation's turns.

        Args:
            roles: of the turns.
            asks: whether the last text ends in the prompt for an answer.

        Raises:
            SchemaError: the template refuses these turns, or changes their texts.
        """
        names = [_STAND_IN.format(number, number) for number in range(len(roles))]
        messages = [
            {"role": role, "content": name} for role, name in zip(roles, names, strict=True)
        ]
        turns = ", ".join(roles)
        try:
            text = self._render(messages, asks)
        except Exception as error:  # templates raise what they like
            raise SchemaError(f"the chat template refuses the turns {turns}: {error}") from error
        around = []
        for role, name in zip(roles, names, strict=True):
            before, found, text = text.partition(name)
            if not found or name in text:
                raise SchemaError(
                    f"the chat template does not write a turn of {role} once and in its place: "
                    "leave out the tags of turns and write their markup into the schema"
                )
            around.append(before)
        return [*around, text]

    def openings_and_closings(self, roles: Sequence[str]) -> list[tuple[str, str]]:
        """For each turn, what stands before and behind its text.

        Raises:
            SchemaError: see `around`.
        """
        if not roles:
            return []
        # prompts go on with a question: templates may write no turn without one
        around = self.around([*roles, "user"] if roles[-1] != "user" else roles)
        found: list[tuple[str, str]] = []
        closing = ""
        for number in range(len(roles)):
            opening = around[number].removeprefix(closing)
            closing = self._closing(roles[: number + 1])
            if not around[number + 1].startswith(closing):
                closing = ""  # nothing that belongs to this turn alone
            found.append((opening, closing))
        return found

    def _closing(self, roles: Sequence[str]) -> str:
        """What stands behind the last of these turns, as far as it can be told."""
        try:
            return self.around(roles)[-1]
        except SchemaError:  # as for a system prompt without a question
            return ""


def render_of(tokenizer: Any, chat_template: str | None = None, **keywords: Any) -> Render:
    """Of a Hugging Face tokenizer.

    Args:
        chat_template: instead of the tokenizer's own.
    """

    def render(messages: list[dict[str, str]], asks: bool) -> str:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=asks,
            chat_template=chat_template,
            **keywords,
        )

    return render
