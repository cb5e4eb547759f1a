# SPDX-License-Identifier: Apache-2.0
"""XML with the place of everything, for errors that say where; nothing is repaired but "<" and "&"
that cannot begin markup, as in code: those are text.

White space of a PML file is text, or only lays the file out:

- The indentation that all lines of an element have in common is layout.
- So are blank lines and spaces around the text of an element, and where a module, union or turn
  begins or ends; but if a line break ends a text, one line break stays.
- Everything else is text: line breaks and further indentation, as code has them.
- `xml:space="preserve"` makes all of it text, in an element and those within.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.parsers import expat


class PmlError(ValueError):
    """What is wrong in a schema or a prompt, and where: "NAME:LINE:COLUMN: ..."."""

    def __init__(self, place: Place, message: str) -> None:
        short = message if len(message) < 1000 else f"{message[:997]}..."
        # surrogates are no text
        super().__init__(f"{place}: {short}".encode(errors="backslashreplace").decode())
        self.place = place


class Document:
    """A text as it is given, and as the parser gets it: with stand-ins for what is no markup.

    Args:
        source: what errors call the text.
        inside: the name of an element that the text is the content of; None: the text has its own.
    """

    def __init__(self, text: str, source: str, inside: str | None = None) -> None:
        self.source = source
        self.has_root = inside is None
        opening, closing = (f"<{inside}>", f"</{inside}>") if inside else ("", "")
        self._num_opening_bytes = len(opening)
        used = set(html.unescape(text))  # references may stand for them, too
        unused = (each for each in map(chr, _PRIVATE_USE) if each not in used)
        stand_ins = self._stand_ins = dict(zip("<&", unused, strict=False))
        replaced = _NO_MARKUP.sub(lambda match: stand_ins.get(match[0], match[0]), text)
        # no surrogates: the parser says that they are no characters, and where
        self._bytes = replaced.encode(errors="surrogatepass")
        self.markup = opening.encode() + self._bytes + closing.encode()

    def as_given(self, text: str) -> str:
        """What the parser has found, without stand-ins."""
        for given, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, given)
        return text

    def line_and_column(self, byte: int) -> tuple[int, int]:
        """From 1, in the given text, of a byte of the markup."""
        num_bytes = max(byte - self._num_opening_bytes, 0)
        before = self._bytes[:num_bytes].decode(errors="ignore")
        return before.count("\n") + 1, len(before) - before.rfind("\n")


@dataclass(frozen=True)
class Place:
    """Where something stands. Line and column are counted when they are asked for: a document has
    many places, and few of them are ever shown."""

    document: Document = field(repr=False)
    byte: int

    @property
    def line(self) -> int:
        """From 1."""
        return self.document.line_and_column(self.byte)[0]

    def __str__(self) -> str:
        line, column = self.document.line_and_column(self.byte)
        return f"{self.document.source}:{line}:{column}"


@dataclass(frozen=True)
class TextNode:
    text: str
    place: Place


@dataclass(frozen=True)
class Element:
    name: str
    attributes: dict[str, str]
    place: Place
    children: list[Element | TextNode] = field(default_factory=list)

    def error(self, message: str) -> PmlError:
        """What is wrong with it."""
        return PmlError(self.place, f"<{self.name}>: {message}")


_NO_MARKUP = re.compile(
    r"<!--.*?(?:-->|\Z)|<!\[CDATA\[.*?(?:\]\]>|\Z)|<\?.*?(?:\?>|\Z)"
    r"|<(?![\w/!?:])|&(?!#?\w{1,31};)",
    re.DOTALL,
)
"""What stays as it is, comments, CDATA and processing instructions; and what begins no markup."""
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
MAX_DEPTH = 50
MAX_ELEMENTS = 100_000
"""Of a document: each takes memory, however short it is."""


def parse_xml(text: str, source: str, *, inside: str | None = None) -> Element:
    """The root element.

    Args:
        source: what errors call the text: a path, or "schema".
        inside: the name of the root element, if the text is only what stands within.

    Raises:
        PmlError: it is not well-formed, or has a document type.
    """
    return _Parser(Document(text, source, inside)).parse()


class _Parser:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._open: list[Element] = []
        self._root: Element | None = None
        self._num_elements = 0
        self._pending: list[str] = []
        self._pending_place: Place | None = None
        parser = self._parser = expat.ParserCreate("utf-8")
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.StartDoctypeDeclHandler = self._refuse_doctype

    def parse(self) -> Element:
        try:
            self._parser.Parse(self._document.markup, True)
        except expat.ExpatError as error:
            what = expat.errors.messages[error.code]
            hint = ""
            given = self._open if self._document.has_root else self._open[1:]
            if what == expat.errors.XML_ERROR_TAG_MISMATCH and given:
                last = given[-1]
                hint = f": <{last.name}> of line {last.place.line} is not closed"
            elif what == expat.errors.XML_ERROR_UNDEFINED_ENTITY:
                hint = ': write "&" in a text as &amp;'
            elif what in (expat.errors.XML_ERROR_INVALID_TOKEN, expat.errors.XML_ERROR_SYNTAX):
                hint = (
                    ': attributes are written name="value", "<" in a text as &lt;, "&" as &amp;, '
                    "and code may stand in <![CDATA[...]]>"
                )
            place = Place(self._document, self._parser.ErrorByteIndex)
            raise PmlError(place, f"{what}{hint}") from None
        assert self._root is not None
        return self._root

    def _here(self) -> Place:
        return Place(self._document, self._parser.CurrentByteIndex)

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._flush()
        given = {key: self._document.as_given(value) for key, value in attributes.items()}
        element = Element(name, given, self._here())
        if len(self._open) == MAX_DEPTH:
            raise PmlError(element.place, f"<{name}> is inside {MAX_DEPTH} others, expected fewer")
        self._num_elements += 1
        if self._num_elements > MAX_ELEMENTS:
            raise PmlError(
                element.place, f"found {MAX_ELEMENTS} elements before it, expected fewer"
            )
        if self._open:
            self._open[-1].children.append(element)
        else:
            self._root = element
        self._open.append(element)

    def _end(self, name: str) -> None:
        self._flush()
        self._open.pop()

    def _characters(self, text: str) -> None:
        if self._pending_place is None:
            self._pending_place = self._here()
        self._pending.append(text)

    def _flush(self) -> None:
        if self._pending_place is not None:
            text = self._document.as_given("".join(self._pending))
            self._open[-1].children.append(TextNode(text, self._pending_place))
            self._pending, self._pending_place = [], None

    def _refuse_doctype(self, *_: object) -> None:
        raise PmlError(self._here(), "found a document type, expected none: PML has no entities")


SPACE = "xml:space"
_INDENTATION = re.compile(r"\n([^\S\n]*)(?=[^\s])")
_OPENING = re.compile(r"\A(?:[^\S\n]*\n)+")


def preserves(element: Element, inherited: bool) -> bool:
    """Whether all white space in an element is text."""
    value = element.attributes.get(SPACE)
    if value not in (None, "preserve", "default"):
        raise element.error(f'given {SPACE}="{value}", expected preserve or default')
    return inherited if value is None else value == "preserve"


def children_without_layout(
    element: Element, inline: Sequence[str] = (), *, preserve: bool
) -> list[Element | TextNode]:
    """The children of an element, without the white space that only lays it out.

    Args:
        inline: the names of elements that stand in a line of text; others begin and end texts.
        preserve: whether there is no such white space.
    """
    children = element.children
    if preserve:
        return children

    def is_edge(number: int) -> bool:
        """Whether texts begin or end there."""
        if not 0 <= number < len(children):
            return True
        child = children[number]
        return isinstance(child, Element) and child.name not in inline

    indentations: list[str] = []  # of all lines that begin in its texts
    for number, child in enumerate(children):
        if isinstance(child, TextNode):
            goes_on = "" if is_edge(number + 1) else "x"
            indentations += _INDENTATION.findall(child.text + goes_on)
    indentation = os.path.commonprefix(indentations)
    cleaned: list[Element | TextNode] = []
    for number, child in enumerate(children):
        if isinstance(child, Element):
            cleaned.append(child)
            continue
        begins, ends = is_edge(number - 1), is_edge(number + 1)
        if text := _without_layout(child.text, indentation, begins, ends):
            cleaned.append(TextNode(text, child.place))
    return cleaned


def _without_layout(text: str, indentation: str, begins: bool, ends: bool) -> str:
    text = re.sub(rf"\n(?:{re.escape(indentation)}|[^\S\n]+(?=\n|\Z))", "\n", text)
    if begins and ends and not text.strip():
        return "" if "\n" in text else text
    if begins:
        text = _OPENING.sub("", text)
    if ends:
        kept = text.rstrip()
        if "\n" in text[len(kept) :]:
            text = kept + "\n"
    return text
