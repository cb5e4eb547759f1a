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

from vllm_relay.arguments import is_integer

ROLES = ("system", "user", "assistant")
RESERVED = (*ROLES, "schema", "prompt", "module", "union", "param", "parameter", "scaffold")
MAX_PARAMETER_TOKENS = 1 << 16
MAX_NAME_LENGTH = 128
MAX_SCAFFOLD_MODULES = 100
"""Each sees all before it, so what a plan says of them grows with the square."""
_NAME = re.compile(r"[^\W\d][\w.\-]*")


class SchemaError(ValueError):
    """A schema that cannot be; what was found, what is allowed."""


class SchemaTooLongError(SchemaError):
    """A schema that no prompt of the model could use as a whole."""


class TooManySchemasError(SchemaError):
    """A schema for which there is no room beside the others."""


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Parameter:
    """A place for an argument."""

    name: str
    length_tokens: int  # the most tokens an argument may have
    placeholder: str | None = None
    """Text that stands there while the module is encoded; None: the token for unknown words."""

    def __post_init__(self) -> None:
        _check_name("parameter", self.name)
        length = self.length_tokens
        if not (is_integer(length) and 1 <= length <= MAX_PARAMETER_TOKENS):
            raise SchemaError(
                f"parameter {self.name!r}: given a length of {length} tokens, expected 1 to "
                f"{MAX_PARAMETER_TOKENS}"
            )
        if not isinstance(self.placeholder, str | None):
            raise SchemaError(
                f"parameter {self.name!r}: given {self.placeholder!r}, expected a text"
            )


@dataclass(frozen=True, init=False)
class Module:
    """Text that is computed once and imported by name, and what it consists of."""

    name: str
    content: tuple[Content, ...]
    cached: bool  # whether it is kept; if not, every prompt computes it

    def __init__(self, name: str, *content: Content | str, cached: bool = True) -> None:
        _check_name("module", name)
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
        for each in modules:
            if not isinstance(each, Module):
                raise SchemaError(f"union: given {_type_of(each)}, expected modules")
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
    """All that prompts of one kind can be made of."""

    name: str
    content: tuple[Content, ...]
    scaffolds: tuple[tuple[str, ...], ...]
    """Names of sibling modules: each sees those before it wherever all of a set are imported."""

    def __init__(
        self, name: str, *content: Content | str, scaffolds: tuple[tuple[str, ...], ...] = ()
    ) -> None:
        _check_schema_name(name)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "content", _contents(f"schema {name!r}", content))
        object.__setattr__(self, "scaffolds", tuple(map(tuple, scaffolds)))
        scopes = Scopes(self)
        for scaffold in self.scaffolds:
            scopes.check_scaffold(scaffold)

    def modules(self) -> Iterator[Module]:
        """All of them, in the order of the text."""
        return _modules_in(self.content)


Content = Text | Parameter | Module | Union | Turn


class Scopes:
    """Which modules of a schema can be imported beside each other."""

    def __init__(self, schema: Schema) -> None:
        self._by_name: dict[str, list[dict[str, tuple[Module, Union | None]]]] = {}
        for content in (schema.content, *(module.content for module in schema.modules())):
            scope = {module.name: (module, union) for module, union in _beside(content)}
            for name in scope:
                self._by_name.setdefault(name, []).append(scope)

    def check_scaffold(self, names: tuple[str, ...]) -> None:
        """Refuse names that no prompt can import beside each other, or of what is not cached."""
        where = f"scaffold {' '.join(names)}"
        distinct = dict.fromkeys(names)
        if len(distinct) < 2:
            raise SchemaError(f"{where}: expected two modules or more")
        if len(distinct) > MAX_SCAFFOLD_MODULES:
            raise SchemaError(
                f"scaffold {' '.join(names[:3])} ...: given {len(distinct)} modules, expected "
                f"{MAX_SCAFFOLD_MODULES} at most"
            )
        scopes = [
            scope for scope in self._by_name.get(names[0], ()) if scope.keys() >= distinct.keys()
        ]
        if not scopes:
            raise SchemaError(f"{where}: expected names of modules that stand beside each other")
        for scope in scopes:
            if others := [name for name in distinct if not scope[name][0].cached]:
                raise SchemaError(f"{where}: {others[0]} is not cached")
            unions = Counter(id(union) for name in distinct if (union := scope[name][1]))
            if any(number > 1 for number in unions.values()):
                raise SchemaError(
                    f"{where}: two of these are in one union, and no prompt can import both"
                )


def _check_name(what: str, name: str) -> None:
    """Refuse what cannot be the name of a tag or an attribute of a prompt."""
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH:
        given = _type_of(name) if not isinstance(name, str) else f"{len(name)} letters"
        raise SchemaError(f"{what}: given {given}, expected a name of at most {MAX_NAME_LENGTH}")
    if not _NAME.fullmatch(name):
        raise SchemaError(
            f"{what}: given the name {name!r}, expected a letter or _, then letters, digits, _ . -"
        )
    if name in RESERVED or name.lower().startswith("xml"):
        raise SchemaError(f"{what}: the name {name!r} has a meaning of its own, take another")


def _check_schema_name(name: str) -> None:
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME_LENGTH:
        given = repr(name[:40]) if isinstance(name, str) else _type_of(name)
        raise SchemaError(
            f"schema: given {given}, expected a name of at most {MAX_NAME_LENGTH} letters"
        )
    if "/" in name or name in (".", "..") or not name.isprintable():
        raise SchemaError(
            f"schema: given the name {name!r}, expected a segment of a URL's path: printable, "
            "without /"
        )


def _beside(content: tuple[Content, ...]) -> Iterator[tuple[Module, Union | None]]:
    """The modules that can be imported beside each other, through turns, with their unions."""
    for each in content:
        if isinstance(each, Module):
            yield each, None
        elif isinstance(each, Union):
            yield from ((module, each) for module in each.modules)
        elif isinstance(each, Turn):
            yield from _beside(each.content)


def _contents(where: str, content: tuple[Content | str, ...]) -> tuple[Content, ...]:
    for each in content:
        if not isinstance(each, str | Content):
            raise SchemaError(
                f"{where}: given {_type_of(each)}, expected texts, parameters, modules, unions and "
                "turns"
            )
    contents = tuple(Text(each) if isinstance(each, str) else each for each in content)
    modules = [module.name for module, _ in _beside(contents)]
    for kind, names in (("modules", modules), ("parameters", _names_of_parameters(contents))):
        for name, number in Counter(names).items():
            if number > 1:
                raise SchemaError(f"{where}: {number} {kind} are called {name!r}, expected one")
    return contents


def _type_of(value: object) -> str:
    return f"a {type(value).__name__}"


def _names_of_parameters(content: tuple[Content, ...]) -> Iterator[str]:
    for each in content:
        if isinstance(each, Parameter):
            yield each.name
        elif isinstance(each, Turn):
            yield from _names_of_parameters(each.content)


def _modules_in(content: tuple[Content, ...]) -> Iterator[Module]:
    for module, _ in _beside(content):
        yield module
        yield from _modules_in(module.content)
