# SPDX-License-Identifier: Apache-2.0
"""Random schemas, and random prompts of them in PML."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import quoteattr

import numpy as np

from vllm_relay.modules.markup.schema import (
    Content,
    Module,
    Parameter,
    Schema,
    Turn,
    Union,
)


def random_words(rng: np.random.Generator, words: list[str], most: int) -> str:
    return " ".join(rng.choice(words, int(rng.integers(1, most + 1))))


class SchemaMaker:
    """
    Args:
        words: each one token.
        most_words: of a text.
    """

    def __init__(self, rng: np.random.Generator, words: list[str], most_words: int) -> None:
        self._rng = rng
        self._words = words
        self._most_words = most_words
        self._num_names = 0
        self._scaffolds: list[tuple[str, ...]] = []

    def schema(self, name: str, *, has_turns: bool = False) -> Schema:
        self._scaffolds = []
        content = self._turns() if has_turns else self._content(depth=0)
        return Schema(name, *content, scaffolds=tuple(self._scaffolds))

    def _turns(self) -> list[Content | str]:
        """Begins with the system's; templates may write one of their own otherwise."""
        content: list[Content | str] = [Turn("system", *self._content(depth=1))]
        for _ in range(int(self._rng.integers(1, 4))):
            kind = self._rng.choice(["turn", "module with turns", "module"])
            if kind == "turn":
                content.append(self._turn("assistant"))
            elif kind == "module":
                content.append(self._module(depth=1))
            else:
                turns = [self._turn("user"), self._module(depth=1), self._turn("assistant")]
                content.append(Module(self._name(), *turns))
        if self._rng.random() < 0.7:
            content.append(self._turn("user"))
        if self._rng.random() < 0.2:
            content.append(self._turn("assistant"))
        return content

    def _turn(self, role: str) -> Turn:
        return Turn(role, *self._content(depth=1))

    def _content(self, depth: int) -> list[Content | str]:
        content: list[Content | str] = []
        kinds = ["text", "parameter", "module", "union", "uncached"]
        chances = [0.35, 0.1, 0.35, 0.15, 0.05] if depth < 3 else [0.7, 0.3, 0, 0, 0]
        for kind in self._rng.choice(kinds, int(self._rng.integers(1, 5)), p=chances):
            if kind == "text":
                if content and isinstance(content[-1], str):
                    continue
                content.append(random_words(self._rng, self._words, self._most_words) + " ")
            elif kind == "parameter":
                content.append(self._parameter())
            elif kind == "module":
                content.append(self._module(depth))
            elif kind == "uncached":
                text = random_words(self._rng, self._words, 5) + " "
                content.append(Module(self._name(), text, self._parameter(), cached=False))
            else:
                members = [self._module(depth) for _ in range(int(self._rng.integers(1, 4)))]
                content.append(Union(*members))
        names = [each.name for each in content if isinstance(each, Module) and each.cached]
        if len(names) > 1 and self._rng.random() < 0.5:
            size = int(self._rng.integers(2, len(names) + 1))
            self._scaffolds.append(tuple(self._rng.permutation(names)[:size].tolist()))
        return content

    def _module(self, depth: int) -> Module:
        return Module(self._name(), *self._content(depth + 1))

    def _parameter(self) -> Parameter:
        placeholder = random_words(self._rng, self._words, 3) if self._rng.random() < 0.5 else None
        return Parameter(self._name(), int(self._rng.integers(1, 7)), placeholder)

    def _name(self) -> str:
        self._num_names += 1
        return f"n{self._num_names}"


def random_prompt(rng: np.random.Generator, schema: Schema, words: list[str]) -> str:
    """A prompt that imports about half of the modules, in any order, with texts between."""
    body = _imports(rng, schema.content, words)
    turns = ""
    if any(isinstance(each, Turn) for each in schema.content) and rng.random() < 0.5:
        turns = f"<assistant>{random_words(rng, words, 3)}</assistant>"
        turns += f"<user>{random_words(rng, words, 3)}</user>"
    text = "" if turns and rng.random() < 0.5 else f" {random_words(rng, words, 6)}"
    return f'<prompt schema="{schema.name}">{body}{text}{turns}</prompt>'


def _imports(rng: np.random.Generator, content: tuple[Content, ...], words: list[str]) -> str:
    chosen: list[Module] = []
    for each in _without_turns(content):
        if isinstance(each, Module) and rng.random() < 0.6:
            chosen.append(each)
        elif isinstance(each, Union) and rng.random() < 0.7:
            chosen.append(each.modules[int(rng.integers(len(each.modules)))])
    parts = []
    for index in rng.permutation(len(chosen)):
        if rng.random() < 0.2:
            parts.append(f" {random_words(rng, words, 4)} ")
        parts.append(_import(rng, chosen[index], words))
    return "".join(parts)


def _import(rng: np.random.Generator, module: Module, words: list[str]) -> str:
    arguments = ""
    for each in _without_turns(module.content):
        if isinstance(each, Parameter) and rng.random() < 0.7:
            # spaces may be tokens too
            value = random_words(rng, words, (each.length_tokens + 1) // 2)
            arguments += f" {each.name}={quoteattr(value)}"
    body = _imports(rng, module.content, words)
    if not body and rng.random() < 0.1:
        body = random_words(rng, words, 3)
    return f"<{module.name}{arguments}>{body}</{module.name}>"


def _without_turns(content: tuple[Content, ...]) -> Iterator[Content]:
    for each in content:
        if isinstance(each, Turn):
            yield from _without_turns(each.content)
        else:
            yield each
