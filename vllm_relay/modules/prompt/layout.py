# SPDX-License-Identifier: Apache-2.0
"""The tokens of a schema and their positions.

The text that a module has itself, without the modules in it, is one segment; so is the text that
every prompt has. A token's position is its place in the text of the whole schema, in which a union
is as long as its longest member and a parameter as long as it may get. Modules see what stands
before them in the modules around them, up to the text that every prompt has; what stands beside
them is seen only in a scaffold.

Source: Prompt Cache (Gim et al., 2024), section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from vllm_relay.modules.markup.schema import (
    Content,
    Module,
    Parameter,
    Schema,
    SchemaError,
    SchemaTooLongError,
    Text,
    Turn,
    Union,
)
from vllm_relay.modules.prompt.plan import Segment
from vllm_relay.modules.prompt.text_tokens import TextTokens


@dataclass(eq=False)
class ModuleTokens:
    """A module, or the text that every prompt has; equal to itself only."""

    path: tuple[str, ...]  # names from the outermost module on; empty for what every prompt has
    position: int  # where it begins
    context: tuple[tuple[ModuleTokens, int], ...]
    """The modules around it and how many of their tokens stand before it."""
    is_cached: bool  # whether its tokens are stored
    union: int = 0  # of the modules beside each other with the same a prompt imports one at most
    size_tokens: int = 0  # how many positions it takes
    tokens: list[int] = field(default_factory=list)  # of its own text, placeholders included
    position_runs: list[tuple[int, int]] = field(default_factory=list)  # see `Segment`
    placeholders: list[tuple[int, int]] = field(default_factory=list)  # ranges of its tokens
    parts: list[Part] = field(default_factory=list)  # its own text and what stands in it, in order
    scaffolds: list[tuple[str, ...]] = field(default_factory=list)
    """Names of modules right in it that are computed together."""

    @property
    def name(self) -> str:
        return "/".join(self.path)

    @property
    def end_position(self) -> int:
        return self.position + self.size_tokens

    def parameters(self) -> list[Parameter]:
        """Those of its own text."""
        return [part.parameter for part in self.parts if isinstance(part, ParameterTokens)]

    def children(self) -> list[ModuleTokens]:
        """The modules right in it, in the order of the text."""
        return [part for part in self.parts if isinstance(part, ModuleTokens)]

    def walk(self) -> Iterator[ModuleTokens]:
        """Itself and all modules in it, in the order of the text."""
        yield self
        for child in self.children():
            yield from child.walk()

    @cached_property
    def segment(self) -> Segment:
        """For a plan, which knows what it sees."""
        return Segment(
            name=self.name,
            num_tokens=len(self.tokens),
            position_runs=tuple(self.position_runs),
            placeholders=tuple(self.placeholders),
            placeholder_tokens=tuple(
                token for begin, end in self.placeholders for token in self.tokens[begin:end]
            ),
        )


@dataclass(frozen=True)
class OwnText:
    """Tokens begin..end of a module."""

    text: str
    position: int
    begin: int
    end: int


@dataclass(frozen=True)
class ParameterTokens:
    """The placeholder at tokens begin..end of a module."""

    parameter: Parameter
    position: int
    begin: int
    end: int


Part = OwnText | ParameterTokens | ModuleTokens


@dataclass(frozen=True)
class TurnText:
    """What a chat template writes around a turn."""

    role: str
    path: tuple[str, ...]  # of the module the turn stands in
    opening: str
    closing: str


@dataclass(frozen=True)
class SchemaTokens:
    """A schema in the tokens of a model."""

    schema: Schema
    root: ModuleTokens  # what every prompt has
    turns: tuple[TurnText, ...]  # in the order of the text
    turn_is_open: bool
    """Whether the last turn is the user's: text at the end of a prompt continues it."""
    num_tokens: int  # of all modules, each counted as `MODULE_TOKENS` besides its text


def tokenize_schema(
    schema: Schema,
    text_tokens: TextTokens,
    *,
    max_positions: int | None = None,
    max_tokens: int | None = None,
) -> SchemaTokens:
    """Lay a schema out.

    Args:
        max_positions, max_tokens: that it may take; None: any number.

    Raises:
        SchemaTooLongError: it takes more.
        SchemaError: the chat template cannot render its turns.
    """
    layout = _Layout(schema, text_tokens, max_positions, max_tokens)
    root = layout.root()
    return SchemaTokens(schema, root, layout.turns, layout.turn_is_open, layout.num_tokens)


def describe_schema(schema: SchemaTokens, block_size: int) -> dict[str, Any]:
    """For JSON: name, positions, and each module's path ("" for what every prompt has), first
    position, positions, tokens of its own text, whether they are stored, the KV blocks (of
    `block_size` tokens) and padding tokens this takes, and parameters."""
    return {
        "name": schema.schema.name,
        "positions": schema.root.size_tokens,
        "block_size": block_size,
        "modules": [_describe(module, block_size) for module in schema.root.walk()],
    }


def _describe(module: ModuleTokens, block_size: int) -> dict[str, Any]:
    stored = len(module.tokens) if module.is_cached else 0
    blocks = -(-stored // block_size)
    return {
        "module": module.name,
        "position": module.position,
        "positions": module.size_tokens,
        "tokens": len(module.tokens),
        "cached": module.is_cached,
        "blocks": blocks,
        "padding_tokens": blocks * block_size - stored,
        "parameters": {each.name: each.length_tokens for each in module.parameters()},
    }


def _roles(
    content: Sequence[Content], path: tuple[str, ...], *, in_union: bool
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Of all turns, with the module each stands in."""
    for each in content:
        if isinstance(each, Turn):
            if in_union:
                raise SchemaError(
                    f"module {path[-1]!r}: a turn of {each.role} in a member of a union: which "
                    "turns follow it must not depend on the choice; put the union into the turn"
                )
            yield each.role, path
            yield from _roles(each.content, path, in_union=in_union)
        elif isinstance(each, Module):
            yield from _roles(each.content, (*path, each.name), in_union=in_union)
        elif isinstance(each, Union):
            for module in each.modules:
                yield from _roles(module.content, (*path, module.name), in_union=True)


MODULE_TOKENS = 64
"""What a module takes in memory besides its tokens, in tokens."""


class _Layout:
    """What a schema may take is asked before it is taken."""

    def __init__(
        self,
        schema: Schema,
        text_tokens: TextTokens,
        max_positions: int | None,
        max_tokens: int | None,
    ) -> None:
        self._schema = schema
        self._text_tokens = text_tokens
        self._scaffolds: dict[str, list[tuple[str, ...]]] = {}
        for scaffold in schema.scaffolds:
            self._scaffolds.setdefault(scaffold[0], []).append(scaffold)
        content = schema.content
        roles = list(_roles(content, (), in_union=False))
        texts = text_tokens.turns.openings_and_closings([role for role, _ in roles])
        self.turns = tuple(
            TurnText(role, path, *text) for (role, path), text in zip(roles, texts, strict=True)
        )
        is_open = bool(roles) and roles[-1] == ("user", ()) and isinstance(content[-1], Turn)
        self.turn_is_open = is_open
        self._turns = iter(self.turns)  # in the order in which they are met
        self._max_positions, self._max_tokens = max_positions, max_tokens
        self.num_tokens = 0

    def root(self) -> ModuleTokens:
        """What every prompt has; without turns it begins with what comes before all text."""
        root = ModuleTokens((), 0, (), is_cached=True)
        if not self.turns and (tokens := self._text_tokens.beginning):
            self._add_tokens(root, tokens)
            root.parts.append(OwnText("", 0, 0, len(tokens)))
        self._fill(root, self._schema.content)
        return root

    def _take(self, num_tokens: int, end_position: int) -> None:
        self.num_tokens += num_tokens
        if self._max_positions is not None and end_position > self._max_positions:
            raise SchemaTooLongError(
                f"schema {self._schema.name!r}: takes {end_position} positions or more, the model "
                f"has {self._max_positions}: members of a <union> share theirs, and parameters "
                "take as many as len says"
            )
        if self._max_tokens is not None and self.num_tokens > self._max_tokens:
            raise SchemaTooLongError(
                f"schema {self._schema.name!r}: takes more than {self._max_tokens} tokens, the "
                "most for all schemas (max_schema_tokens)"
            )

    def _fill(self, module: ModuleTokens, content: Sequence[Content]) -> None:
        """Lay out what a module consists of, behind what it has already."""
        texts: list[str] = []
        self._visit(module, content, texts)
        self._add_text(module, texts)
        names = {child.path[-1]: None for child in module.children()}
        module.scaffolds = [
            scaffold
            for name in names
            for scaffold in self._scaffolds.get(name, ())
            if names.keys() >= set(scaffold)
        ]

    def _visit(self, module: ModuleTokens, content: Sequence[Content], texts: list[str]) -> None:
        """`texts` is what has been read since the last part."""
        for each in content:
            if isinstance(each, Text):
                texts.append(each.text)
            elif isinstance(each, Turn):
                turn = next(self._turns)
                texts.append(turn.opening)
                self._visit(module, each.content, texts)
                if not (self.turn_is_open and turn is self.turns[-1]):
                    texts.append(turn.closing)
            else:
                self._add_text(module, texts)
                self._add(module, each)

    def _add_text(self, module: ModuleTokens, texts: list[str]) -> None:
        text = "".join(texts)
        texts.clear()
        if text:
            begin, position = len(module.tokens), module.end_position
            self._add_tokens(module, self._text_tokens(text))
            module.parts.append(OwnText(text, position, begin, len(module.tokens)))

    def _add(self, module: ModuleTokens, each: Module | Union | Parameter) -> None:
        position = module.end_position
        if isinstance(each, Parameter):
            length = each.length_tokens
            self._take(0, position + length)
            tokens = self._text_tokens(each.placeholder or "")[:length]
            tokens += [self._text_tokens.placeholder] * (length - len(tokens))
            begin = len(module.tokens)
            self._add_tokens(module, tokens)
            module.placeholders.append((begin, begin + length))
            module.parts.append(ParameterTokens(each, position, begin, begin + length))
        else:
            members = each.modules if isinstance(each, Union) else (each,)
            union = len(module.parts)
            children = [self._child(module, member, position, union) for member in members]
            module.parts += children
            module.size_tokens += max(child.size_tokens for child in children)

    def _add_tokens(self, module: ModuleTokens, tokens: list[int]) -> None:
        self._take(len(tokens), module.end_position + len(tokens))
        runs = module.position_runs
        moved = not runs or runs[-1][1] + len(module.tokens) - runs[-1][0] != module.end_position
        if tokens and moved:
            runs.append((len(module.tokens), module.end_position))
        module.tokens += tokens
        module.size_tokens += len(tokens)

    def _child(
        self, parent: ModuleTokens, module: Module, position: int, union: int
    ) -> ModuleTokens:
        self._take(MODULE_TOKENS, position)
        before = [(parent, len(parent.tokens))] if parent.tokens else []
        child = ModuleTokens(
            (*parent.path, module.name),
            position,
            (*parent.context, *before),
            is_cached=module.cached,
            union=union,
        )
        self._fill(child, module.content)
        return child
