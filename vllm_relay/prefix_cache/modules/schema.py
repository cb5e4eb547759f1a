# SPDX-License-Identifier: Apache-2.0
"""What prompts are made of: a schema of modules, and prompts that import some of them.

Source: Prompt Cache (Gim et al., 2024), section 3.2. Schemas are read from PML (`pml.py`) or built
from these classes; texts may be given as str.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

ROLES = ("system", "user", "assistant")
RESERVED = (*ROLES, "schema", "prompt", "module", "union", "param", "parameter", "scaffold")
MAX_PARAMETER_TOKENS = 1 << 16
_NAME = re.compile(r"[^\W\d][\w.\-]*")


class SchemaError(ValueError):
    """A schema that cannot be; what was found, what is allowed."""


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True, init=False)
class Parameter:
    """A place for an argument.

    Attributes:
        length_tokens: the most tokens an argument may have.
        placeholder: text that stands there while the module is encoded; None: the tokenizer's token
            for unknown words.
    """

    name: str
    length_tokens: int
    placeholder: str | None

    def __init__(self, name: str, length_tokens: int, placeholder: str | None = None) -> None:
        check_name("parameter", name)
        if not 1 <= length_tokens <= MAX_PARAMETER_TOKENS:
            raise SchemaError(
                f"parameter {name!r}: given a length of {length_tokens} tokens, expected 1 to "
                f"{MAX_PARAMETER_TOKENS}"
            )
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "length_tokens", length_tokens)
        object.__setattr__(self, "placeholder", placeholder)


@dataclass(frozen=True, init=False)
class Module:
    """Text that is computed once and imported by name, and what it consists of.

    Attributes:
        cached: whether it is kept; if not, every prompt computes it.
    """

    name: str
    content: tuple[Content, ...]
    cached: bool

    def __init__(self, name: str, *content: Content | str, cached: bool = True) -> None:
        check_name("module", name)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "content", _contents(f"module {name!r}", content))
        object.__setattr__(self, "cached", cached)
        if not cached and any(isinstance(each, Module | Union) for each in self.content):
            raise SchemaError(f"module {name!r}: it is not cached, so it cannot contain modules")


@dataclass(frozen=True, init=False)
class Union:
    """Modules of which a prompt imports one at most; they begin at the same position."""

    modules: tuple[Module, ...]

    def __init__(self, *modules: Module) -> None:
        if not modules:
            raise SchemaError("a union has no modules, expected at least one")
        object.__setattr__(self, "modules", modules)


@dataclass(frozen=True, init=False)
class Turn:
    """What a role says, rendered by the chat template of the model."""

    role: str
    content: tuple[Content, ...]

    def __init__(self, role: str, *content: Content | str) -> None:
        if role not in ROLES:
            raise SchemaError(f"given the role {role!r}, expected one of {', '.join(ROLES)}")
        object.__setattr__(self, "role", role)
        object.__setattr__(self, "content", _contents(f"turn of {role}", content))
        if any(isinstance(each, Turn) for each in self.content):
            raise SchemaError(f"a turn of {role} contains a turn: turns follow each other")


@dataclass(frozen=True, init=False)
class Schema:
    """All that prompts of one kind can be made of.

    Attributes:
        scaffolds: sets of names of sibling modules; each sees those before it wherever all of the
            set are imported.
    """

    name: str
    content: tuple[Content, ...]
    scaffolds: tuple[tuple[str, ...], ...]

    def __init__(
        self, name: str, *content: Content | str, scaffolds: tuple[tuple[str, ...], ...] = ()
    ) -> None:
        if not name.strip():
            raise SchemaError(f"schema: given the name {name!r}, expected one with letters")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "content", _contents(f"schema {name!r}", content))
        object.__setattr__(self, "scaffolds", tuple(map(tuple, scaffolds)))
        _check_scaffolds(self)

    def modules(self) -> Iterator[Module]:
        """All of them, in the order of the text."""
        return _modules_in(self.content)


Content = Text | Parameter | Module | Union | Turn


def check_name(what: str, name: str) -> None:
    """
    Raises:
        SchemaError: it cannot be the name of a tag or an attribute of a prompt.
    """
    if not _NAME.fullmatch(name):
        raise SchemaError(
            f"{what}: given the name {name!r}, expected a letter or _, then letters, digits, _ . -"
        )
    if name in RESERVED or name.lower().startswith("xml"):
        raise SchemaError(f"{what}: the name {name!r} has a meaning of its own, take another")


def members(content: tuple[Content, ...]) -> dict[str, tuple[Module, Union | None]]:
    """The modules that can be imported beside each other, through turns, with their unions."""
    found: dict[str, tuple[Module, Union | None]] = {}
    for each in content:
        if isinstance(each, Module):
            found[each.name] = (each, None)
        elif isinstance(each, Union):
            found.update((module.name, (module, each)) for module in each.modules)
        elif isinstance(each, Turn):
            found.update(members(each.content))
    return found


def _contents(where: str, content: tuple[Content | str, ...]) -> tuple[Content, ...]:
    contents = tuple(Text(each) if isinstance(each, str) else each for each in content)
    modules, arguments = list(_names_of_modules(contents)), list(_names_of_parameters(contents))
    for kind, names in (("modules", modules), ("parameters", arguments)):
        for name, number in Counter(names).items():
            if number > 1:
                raise SchemaError(f"{where}: {number} {kind} are called {name!r}, expected one")
    return contents


def _names_of_modules(content: tuple[Content, ...]) -> Iterator[str]:
    for each in content:
        if isinstance(each, Module):
            yield each.name
        elif isinstance(each, Union):
            yield from (module.name for module in each.modules)
        elif isinstance(each, Turn):
            yield from _names_of_modules(each.content)


def _names_of_parameters(content: tuple[Content, ...]) -> Iterator[str]:
    for each in content:
        if isinstance(each, Parameter):
            yield each.name
        elif isinstance(each, Turn):
            yield from _names_of_parameters(each.content)


def _modules_in(content: tuple[Content, ...]) -> Iterator[Module]:
    for each in content:
        if isinstance(each, Module):
            yield each
            yield from _modules_in(each.content)
        elif isinstance(each, Union):
            yield from _modules_in(each.modules)
        elif isinstance(each, Turn):
            yield from _modules_in(each.content)


def _check_scaffolds(schema: Schema) -> None:
    scopes = [schema.content, *(module.content for module in schema.modules())]
    for scaffold in schema.scaffolds:
        if len(set(scaffold)) < 2:
            raise SchemaError(f"scaffold {scaffold}: expected two modules or more")
        if not any(set(scaffold) <= members(scope).keys() for scope in scopes):
            raise SchemaError(
                f"scaffold {' '.join(scaffold)}: expected names of modules that stand beside each "
                "other"
            )
        for scope in scopes:
            found = members(scope)
            for name in scaffold:
                if name in found and not found[name][0].cached:
                    raise SchemaError(f"scaffold {' '.join(scaffold)}: {name} is not cached")
            unions = [found[name][1] for name in scaffold if name in found]
            for union in unions:
                if union is not None and unions.count(union) > 1:
                    raise SchemaError(
                        f"scaffold {' '.join(scaffold)}: two of these are in one union, and no "
                        "prompt can import both"
                    )
