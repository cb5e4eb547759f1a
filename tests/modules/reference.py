# SPDX-License-Identifier: Apache-2.0
"""What a modular prompt means, token by token, and its logits from Hugging Face in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.modules.chat_templates import TurnMarkup
from vllm_relay.modules.markup.pml import Import, PromptMarkup
from vllm_relay.modules.markup.schema import Content, Parameter, Schema, Text, Turn, Union


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
class Piece:
    """Tokens of a schema, or the placeholder of a parameter.

    Attributes:
        path: of the module whose text it is.
    """

    path: tuple[str, ...]
    ids: list[int]
    position: int
    is_cached: bool
    parameter: str | None = None


Edge = tuple[str, tuple[str, ...]]
"""Where a module begins, where it ends, and what is behind it: "begin", "end" or "behind", path."""


@dataclass
class Meaning:
    """The tokens of a prompt in the order of its text.

    The whole schema is written down in a line; what is not imported is struck out, and what the
    prompt says is put in at the edges of its modules.
    """

    schema: Schema
    prompt: PromptMarkup
    encode: Callable[[str], list[int]]
    placeholder: int
    beginning: list[int]
    repair_tokens: int = 0
    markup: TurnMarkup | None = None
    tokens: list[Token] = field(default_factory=list)
    imported: set[tuple[str, ...]] = field(default_factory=set)
    end: int = 0

    def __post_init__(self) -> None:
        line: list[Piece | Edge] = []
        beginning = self.encode(self.markup.beginning) if self.markup else self.beginning
        line.append(Piece((), beginning, 0, True))
        self._write(line, self.schema.content, (), len(beginning), True)
        said: dict[Edge, list[str]] = {}
        arguments: dict[tuple[str, ...], dict[str, str]] = {}
        self._read(self.prompt.root, (), said, arguments)
        self.imported = {(), *arguments}
        repairs = dict.fromkeys(arguments, self.repair_tokens)
        for each in line:
            if isinstance(each, Piece):
                if each.path in self.imported:
                    self._piece(each, arguments.get(each.path, {}), repairs)
            else:
                for text in said.get(each, ()):
                    self._new(self.encode(text), self.end)
        self._new(self.encode(self._question(self.prompt.text)), self.end)

    def _write(
        self,
        line: list[Piece | Edge],
        content: tuple[Content, ...],
        path: tuple[str, ...],
        position: int,
        is_cached: bool,
    ) -> int:
        """Write down a part of the schema; returns where it ends."""

        def write_text(text: str) -> None:
            nonlocal position
            ids = self.encode(text)
            line.append(Piece(path, ids, position, is_cached))
            position += len(ids)

        for each in content:
            if isinstance(each, Text):
                write_text(each.text)
            elif isinstance(each, Turn):
                assert self.markup is not None
                opening, closing = self.markup.around(each.role)
                write_text(opening)
                position = self._write(line, each.content, path, position, is_cached)
                if not (self._is_open and each is self.schema.content[-1]):
                    write_text(closing)
            elif isinstance(each, Parameter):
                ids = self.encode(each.placeholder or "")[: each.length_tokens]
                ids += [self.placeholder] * (each.length_tokens - len(ids))
                line.append(Piece(path, ids, position, is_cached, each.name))
                position += each.length_tokens
            else:
                ends = []
                for module in each.modules if isinstance(each, Union) else (each,):
                    inner = (*path, module.name)
                    line.append(("begin", inner))
                    ends.append(self._write(line, module.content, inner, position, module.cached))
                    line += [("end", inner), ("behind", inner)]
                position = max(ends)
        return position

    def _read(
        self,
        found: Import,
        path: tuple[str, ...],
        said: dict[Edge, list[str]],
        arguments: dict[tuple[str, ...], dict[str, str]],
    ) -> None:
        """Note what a prompt says, by edges, and what it imports."""
        edge: Edge = ("begin", (*path, found.imports[0].name)) if found.imports else ("end", path)
        said.setdefault(edge, []).append(found.opening)
        for each in found.imports:
            inner = (*path, each.name)
            arguments[inner] = each.arguments
            self._read(each, inner, said, arguments)
            said.setdefault(("behind", inner), []).append(each.behind)

    def _piece(
        self, piece: Piece, arguments: dict[str, str], repairs: dict[tuple[str, ...], int]
    ) -> None:
        owner = piece.path if piece.is_cached else None
        if piece.parameter is not None:
            if piece.is_cached:
                for offset, token in enumerate(piece.ids):
                    position = piece.position + offset
                    self.tokens.append(Token(token, position, owner, is_placeholder=True))
            self._new(self.encode(arguments.get(piece.parameter, "")), piece.position)
            return
        num_repaired = 0
        if piece.is_cached:
            num_repaired = min(repairs.get(piece.path, 0), len(piece.ids))
        own = [Token(token, piece.position + i, owner) for i, token in enumerate(piece.ids)]
        for token in own[:num_repaired]:
            token.is_replaced = True
            self.tokens.append(token)
            repairs[piece.path] -= 1
        self._new(piece.ids[:num_repaired], piece.position)
        self.tokens += own[num_repaired:]
        if own:
            self.end = max(self.end, own[-1].position + 1)

    def _new(self, ids: list[int], position: int) -> None:
        for offset, token in enumerate(ids):
            self.tokens.append(Token(token, position + offset, None))
            self.end = max(self.end, position + offset + 1)

    @property
    def _is_open(self) -> bool:
        last = self.schema.content[-1]
        return isinstance(last, Turn) and last.role == "user"

    def _question(self, text: str) -> str:
        if self.markup is None:
            return text
        if self._is_open:
            text += self.markup.around("user")[1]
        elif text.strip():
            text = text.strip().join(self.markup.around("user"))
        turns = [turn.text.join(self.markup.around(turn.role)) for turn in self.prompt.turns]
        return "".join((text, *turns, self.markup.answer))

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
