# SPDX-License-Identifier: Apache-2.0
"""What a modular prompt means, token by token, and its logits from Hugging Face in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_relay.prefix_cache.modules.pml import Import, PromptMarkup, PromptText
from vllm_relay.prefix_cache.modules.schema import Content, Module, Parameter, Schema, Text, Union


@dataclass
class Token:
    """
    Attributes:
        owner: the module whose text it is; () for what every prompt has, None for what is new.
        is_placeholder: only its own module sees it.
        is_replaced: only its own module and what was computed with that sees it.
    """

    id: int
    position: int
    owner: tuple[str, ...] | None
    is_placeholder: bool = False
    is_replaced: bool = False


@dataclass
class Meaning:
    """The tokens of a prompt in the order of its text."""

    schema: Schema
    prompt: PromptMarkup
    encode: Callable[[str], list[int]]
    placeholder: int
    beginning: list[int]
    repair_tokens: int = 0
    tokens: list[Token] = field(default_factory=list)
    imported: set[tuple[str, ...]] = field(default_factory=set)
    end: int = 0

    def __post_init__(self) -> None:
        for position, token in enumerate(self.beginning):
            self.tokens.append(Token(token, position, ()))
        self.end = len(self.beginning)
        items = list(self.prompt.content)
        behind: list[Any] = []
        while items and not isinstance(items[-1], Import):
            behind.insert(0, items.pop())
        root = Import("", {}, tuple(items), self.prompt.place)
        self._walk(self.schema.content, root, (), True, len(self.beginning))
        self._new("".join(each.text for each in behind), self.end)

    def size(self, content: tuple[Content, ...]) -> int:
        total = 0
        for each in content:
            if isinstance(each, Text):
                total += len(self.encode(each.text))
            elif isinstance(each, Parameter):
                total += each.length_tokens
            elif isinstance(each, Module):
                total += self.size(each.content)
            elif isinstance(each, Union):
                total += max(self.size(module.content) for module in each.modules)
        return total

    def _new(self, text: str, position: int) -> None:
        for offset, token in enumerate(self.encode(text)):
            self.tokens.append(Token(token, position + offset, None))
            self.end = max(self.end, position + offset + 1)

    def _walk(
        self,
        content: tuple[Content, ...],
        found: Import,
        path: tuple[str, ...],
        cached: bool,
        position: int,
    ) -> None:
        repair = self.repair_tokens if path else 0
        before: dict[str, str] = {}
        behind: dict[str, str] = {}
        alone, last = "", None
        names = [each.name for each in found.content if isinstance(each, Import)]
        for item in found.content:
            if isinstance(item, Import):
                last = item.name
            elif isinstance(item, PromptText):
                if last:
                    behind[last] = behind.get(last, "") + item.text
                elif names:
                    before[names[0]] = before.get(names[0], "") + item.text
                else:
                    alone += item.text
        imports = {each.name: each for each in found.content if isinstance(each, Import)}
        self.imported.add(path)
        for each in content:
            if isinstance(each, Text):
                ids = self.encode(each.text)
                if cached and repair and ids:
                    for offset, token in enumerate(ids[:repair]):
                        self.tokens.append(Token(token, position + offset, path, is_replaced=True))
                    self._new_ids(ids[:repair], position)
                    rest = range(repair, len(ids))
                    repair = 0
                else:
                    rest = range(len(ids))
                for offset in rest:
                    owner = path if cached else None
                    self.tokens.append(Token(ids[offset], position + offset, owner))
                position += len(ids)
                self.end = max(self.end, position)
            elif isinstance(each, Parameter):
                ids = self.encode(each.placeholder or "")[: each.length_tokens]
                ids += [self.placeholder] * (each.length_tokens - len(ids))
                if cached:
                    for offset, token in enumerate(ids):
                        token_of = Token(token, position + offset, path, is_placeholder=True)
                        self.tokens.append(token_of)
                self._new(found.arguments.get(each.name, ""), position)
                position += each.length_tokens
            else:
                members = each.modules if isinstance(each, Union) else (each,)
                for member in members:
                    if member.name in imports:
                        self._new(before.get(member.name, ""), self.end)
                        self._walk(
                            member.content,
                            imports[member.name],
                            (*path, member.name),
                            member.cached,
                            position,
                        )
                        self._new(behind.get(member.name, ""), self.end)
                position += max(self.size(member.content) for member in members)
        self._new(alone, self.end)

    def _new_ids(self, ids: list[int], position: int) -> None:
        for offset, token in enumerate(ids):
            self.tokens.append(Token(token, position + offset, None))

    def sees(self, one: Token, other: Token) -> bool:
        """Whether a token sees one that stands before it in the text."""
        if one.owner is None:
            return not (other.is_placeholder or other.is_replaced)
        if other.owner == one.owner:
            return True
        if other.owner is None or other.is_placeholder:
            return False
        if other.owner == one.owner[: len(other.owner)]:
            return True
        beside = one.owner[:-1] == other.owner[:-1] and bool(one.owner) and bool(other.owner)
        if not beside:
            return False
        for scaffold in self.schema.scaffolds:
            paths = {(*one.owner[:-1], name) for name in scaffold}
            if {one.owner, other.owner} <= paths <= self.imported:
                return True
        return False


@dataclass
class PlainMeaning:
    """Of a prompt without modules."""

    tokens: list[Token]

    @classmethod
    def of(cls, token_ids: list[int]) -> PlainMeaning:
        return cls([Token(token, place, None) for place, token in enumerate(token_ids)])

    def sees(self, one: Token, other: Token) -> bool:
        return True


def logits(model: Any, meaning: Meaning | PlainMeaning) -> torch.Tensor:
    """Float32 [vocabulary], of what follows the prompt."""
    tokens = meaning.tokens
    count = len(tokens)
    mask = torch.full((count, count), torch.finfo(torch.float32).min)
    for row, one in enumerate(tokens):
        for column, other in enumerate(tokens[: row + 1]):
            if row == column or meaning.sees(one, other):
                mask[row, column] = 0.0
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor([[token.id for token in tokens]]),
            position_ids=torch.tensor([[token.position for token in tokens]]),
            attention_mask=mask[None, None],
            use_cache=False,
        )
    return output.logits[0, -1]
