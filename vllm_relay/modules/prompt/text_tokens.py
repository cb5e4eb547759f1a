# SPDX-License-Identifier: Apache-2.0
"""How the texts of a model become tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from vllm_relay.modules.prompt.chat_turns import ChatTurns, render_of


class TextTokens:
    """A Hugging Face tokenizer, for pieces of prompts.

    Args:
        chat_template: instead of the tokenizer's own.
        chat_template_kwargs: what else it is given.
    """

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
