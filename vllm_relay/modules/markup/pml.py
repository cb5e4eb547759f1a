# SPDX-License-Identifier: Apache-2.0
"""Reads the Prompt Markup Language, strictly: what is not understood is refused, with its place.

Source: Prompt Cache (Gim et al., 2024), section 3.2, and the grammar of its published schemas.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from vllm_relay.modules.markup.schema import (
    MAX_PARAMETER_TOKENS,
    RESERVED,
    ROLES,
    Content,
    Module,
    Parameter,
    Schema,
    SchemaError,
    Scopes,
    Text,
    Turn,
    Union,
)
from vllm_relay.modules.markup.xml_tree import (
    SPACE,
    Document,
    Element,
    Place,
    PmlError,
    TextNode,
    children_without_layout,
    parse_xml,
    preserves,
)

Made = TypeVar("Made")

_PARAMETERS = ("param", "parameter")
_IN_TURNS = ("module", "union", *_PARAMETERS, "scaffold")
_IN_SCHEMAS = ("module", "union", *_PARAMETERS, *ROLES, "scaffold")
_PROMPT_TAG = re.compile(r"<prompt[\s/>]")


@dataclass(frozen=True)
class PromptTurn:
    role: str
    text: str
    place: Place


@dataclass
class Import:
    """A module that a prompt imports; the whole prompt is one without a name."""

    name: str
    arguments: dict[str, str]
    place: Place
    opening: str = ""  # the text in it before the first import
    imports: list[Import] = field(default_factory=list)  # those right in it
    behind: str = ""  # the text behind it, up to the next one beside it

    def add_text(self, text: str) -> None:
        if self.imports:
            self.imports[-1].behind += text
        else:
            self.opening += text


@dataclass(frozen=True)
class PromptMarkup:
    """A prompt as it is written, before it is held against its schema."""

    schema: str
    root: Import  # its imports and the texts beside them
    text: str  # behind the last import
    turns: tuple[PromptTurn, ...]  # behind all else


def read_schema(path: Path) -> Schema:
    """The schema in a file; modules with `src` are read from files beside it.

    Raises:
        PmlError, SchemaError: it cannot be understood; with file, line and column.
        OSError: a file cannot be read.
    """
    return parse_schema(read_text(path), str(path), base=path.parent)


def read_text(path: Path) -> str:
    """
    Raises:
        SchemaError: it is not in UTF-8.
        OSError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SchemaError(f"{path}: expected text in UTF-8: {error}") from None


def parse_schema(text: str, source: str = "schema", *, base: Path | None = None) -> Schema:
    """The schema that a text describes.

    Args:
        source: what errors call the text.
        base: the folder in which files of `src` are looked for; None: `src` is refused.

    Raises:
        PmlError: it cannot be understood; with line and column.
    """
    root = parse_xml(text, source)
    _expect_name(root, ("schema",))
    return _SchemaReader(base).schema(root)


def parse_prompt(text: str, source: str = "prompt", *, schema: str | None = None) -> PromptMarkup:
    """What a prompt imports and says.

    Args:
        source: what errors call the text.
        schema: the name of its schema, if the text is what stands in <prompt>.

    Raises:
        PmlError: it cannot be understood; with line and column.
    """
    if schema is None and _PROMPT_TAG.search(text) is None:
        raise PmlError(
            Place(Document(text, source), 0),
            'expected <prompt schema="NAME">, with modules and text within',
        )
    root = parse_xml(text, source, inside=None if schema is None else "prompt")
    _expect_name(root, ("prompt",))
    if schema is None:
        schema = _attributes(root, ("schema", SPACE), required=("schema",))["schema"]
    prompt, text = Import("", {}, root.place), ""
    turns: list[PromptTurn] = []
    for each in _prompt_content(root, preserves(root, False)):
        if isinstance(each, PromptTurn):
            turns.append(each)
        elif isinstance(each, TextNode) and not turns:
            text += each.text
        elif isinstance(each, Import) and not turns:
            prompt.add_text(text)
            prompt.imports.append(each)
            text = ""
        elif isinstance(each, Import):
            raise PmlError(
                turns[0].place,
                f"<{turns[0].role}> stands before a module, expected turns behind the last",
            )
        elif each.text.strip():
            raise PmlError(
                each.place,
                f"found the text {shortened(each.text)} behind <{turns[-1].role}>, expected it in "
                "a turn",
            )
    return PromptMarkup(schema, prompt, text, tuple(turns))


class _SchemaReader:
    def __init__(self, base: Path | None) -> None:
        self._base = base
        self._scaffolds: list[tuple[Element, tuple[str, ...]]] = []

    def schema(self, element: Element) -> Schema:
        attributes = _attributes(element, ("name", SPACE), required=("name",))
        content = self._content(element, _IN_SCHEMAS, preserves(element, False))
        schema = _at(element, lambda: Schema(attributes["name"], *content))
        scopes = Scopes(schema)
        for scaffold, names in self._scaffolds:
            _at(scaffold, partial(scopes.check_scaffold, names))
        return Schema(schema.name, *content, scaffolds=tuple(names for _, names in self._scaffolds))

    def _content(self, element: Element, allowed: Sequence[str], preserve: bool) -> list[Content]:
        content: list[Content] = []
        for child in children_without_layout(element, _PARAMETERS, preserve=preserve):
            if isinstance(child, TextNode):
                content.append(Text(child.text))
                continue
            _expect_name(child, allowed, inside=element)
            if child.name == "scaffold":
                self._add_scaffold(child)
            else:
                content.append(self._element(child, preserve))
        return content

    def _element(self, element: Element, preserve: bool) -> Content:
        preserve = preserves(element, preserve)
        if element.name == "module":
            return self._module(element, preserve)
        if element.name == "union":
            return self._union(element, preserve)
        if element.name in ROLES:
            _attributes(element, (SPACE,))
            content = self._content(element, _IN_TURNS, preserve)
            return _at(element, lambda: Turn(element.name, *content))
        return _parameter(element)

    def _module(self, element: Element, preserve: bool) -> Module:
        attributes = _attributes(element, ("name", "src", "cache", SPACE), required=("name",))
        cache = attributes.get("cache", "true")
        if cache not in ("true", "false"):
            raise element.error(f'given cache="{cache}", expected true or false')
        content = self._content(element, _IN_SCHEMAS, preserve)
        if "src" in attributes:
            if content:
                raise element.error("it has src and text, expected one of them")
            content = [Text(self._read(element, attributes["src"]))]
        return _at(element, lambda: Module(attributes["name"], *content, cached=cache == "true"))

    def _union(self, element: Element, preserve: bool) -> Union:
        attributes = _attributes(element, ("scaffold", SPACE))
        modules: list[Module] = []
        for child in element.children:
            if isinstance(child, Element):
                _expect_name(child, ("module",), inside=element)
                modules.append(self._module(child, preserves(child, preserve)))
            elif child.text.strip():
                found = f"<union>: found text {shortened(child.text)}"
                raise PmlError(child.place, f"{found}, expected <module>")
        names = [module.name for module in modules]
        default = attributes.get("scaffold")
        if default is not None and default not in names:
            known = ", ".join(names)
            raise element.error(f'given scaffold="{default}", expected one of its modules: {known}')
        return _at(element, lambda: Union(*modules))

    def _add_scaffold(self, element: Element) -> None:
        attributes = _attributes(element, ("modules",), required=("modules",))
        if element.children:
            raise element.error('expected <scaffold modules="NAME NAME"/>')
        self._scaffolds.append((element, tuple(attributes["modules"].split())))

    def _read(self, element: Element, src: str) -> str:
        if self._base is None:
            raise element.error(
                f'given src="{src}", but this schema is not read from a file: send the text instead'
            )
        path = (self._base / src).resolve()
        if not src or not path.is_relative_to(self._base.resolve()):
            raise element.error(f'given src="{src}", expected a file below {self._base}')
        try:
            return path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise element.error(f"cannot read {path}: {error}") from error


def _parameter(element: Element) -> Parameter:
    attributes = _attributes(element, ("name", "len", "length", "scaffold"), required=("name",))
    given = [name for name in ("len", "length") if name in attributes]
    if len(given) != 1:
        raise element.error("expected len, the most tokens it takes")
    length = attributes[given[0]]
    if not length.isdecimal() or len(length) > 9 or int(length) < 1:
        raise element.error(
            f'given {given[0]}="{length[:20]}", expected a number of tokens from 1 to '
            f"{MAX_PARAMETER_TOKENS}"
        )
    if element.children:
        raise element.error(f"expected it empty, <{element.name} .../>")
    placeholder = attributes.get("scaffold")
    return _at(element, lambda: Parameter(attributes["name"], int(length), placeholder))


def _prompt_content(element: Element, preserve: bool) -> Iterator[TextNode | Import | PromptTurn]:
    for child in children_without_layout(element, preserve=preserve):
        if isinstance(child, TextNode):
            if child.text.strip() or preserve:
                yield child
        elif child.name in ROLES:
            yield _prompt_turn(child, preserve)
        elif child.name in RESERVED:
            raise PmlError(
                child.place,
                f"found <{child.name}>, which schemas have: prompts import modules by their names",
            )
        else:
            yield _import(child, preserve)


def _import(element: Element, preserve: bool) -> Import:
    arguments = {k: v for k, v in element.attributes.items() if k != SPACE}
    found = Import(element.name, arguments, element.place)
    for each in _prompt_content(element, preserves(element, preserve)):
        if isinstance(each, PromptTurn):
            where = f"<{each.role}>: found inside <{element.name}>"
            raise PmlError(each.place, f"{where}, expected turns in <prompt> only")
        if isinstance(each, Import):
            found.imports.append(each)
        else:
            found.add_text(each.text)
    return found


def _prompt_turn(element: Element, preserve: bool) -> PromptTurn:
    _attributes(element, (SPACE,))
    preserve = preserves(element, preserve)
    for child in element.children:
        if isinstance(child, Element):
            raise child.error(
                f"found inside <{element.name}> of a prompt, expected text only: modules are "
                "imported before it, by the names the schema gives them"
            )
    cleaned = children_without_layout(element, preserve=preserve)
    text = "".join(each.text for each in cleaned if isinstance(each, TextNode))
    return PromptTurn(element.name, text if preserve else text.strip(), element.place)


def _attributes(
    element: Element, allowed: Sequence[str], required: Sequence[str] = ()
) -> dict[str, str]:
    for name in element.attributes:
        if name not in allowed:
            known = ", ".join(allowed) + did_you_mean(name, allowed)
            raise element.error(f"found the attribute {name!r}, allowed are {known}")
    for name in required:
        if name not in element.attributes:
            raise element.error(f"expected the attribute {name!r}")
    return element.attributes


def _expect_name(element: Element, allowed: Sequence[str], inside: Element | None = None) -> None:
    if element.name not in allowed:
        where = f" inside <{inside.name}>" if inside else ""
        tags = ", ".join(f"<{name}>" for name in allowed)
        raise PmlError(
            element.place,
            f"found <{element.name}>{where}, expected {tags}{did_you_mean(element.name, allowed)}",
        )


def _at(element: Element, make: Callable[[], Made]) -> Made:
    try:
        return make()
    except SchemaError as error:
        raise PmlError(element.place, str(error)) from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint, if there is one."""
    # comparing takes long, and there may be thousands
    alike = [each for each in known if abs(len(each) - len(name)) < 3 and len(name) < 50]
    close = difflib.get_close_matches(name, alike[:100], 1)
    return f"; did you mean {close[0]}?" if close else ""


def listed(names: Sequence[str]) -> str:
    """The first of many names."""
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(names[:20]) + more


def shortened(text: str) -> str:
    """For an error."""
    text = " ".join(text.split())
    return repr(text if len(text) <= 40 else text[:37] + "...")
