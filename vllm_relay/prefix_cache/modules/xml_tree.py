# SPDX-License-Identifier: Apache-2.0
"""XML with the place of everything, for errors that say where; nothing is repaired but "<" and "&"
that cannot begin markup, as in code: those are text."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from xml.parsers import expat


class PmlError(ValueError):
    """What is wrong in a schema or a prompt, and where: "NAME:LINE:COLUMN: ..."."""

    def __init__(self, place: Place, message: str) -> None:
        super().__init__(f"{place}: {message}")
        self.place = place


@dataclass(frozen=True)
class Place:
    """Where something stands; lines and columns count from 1."""

    source: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}"


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


_NO_MARKUP = re.compile(r"(?P<less><(?![\w/!?:]))|(?P<and>&(?!#?\w{1,31};))")
_VERBATIM = re.compile(r"<!--|<!\[CDATA\[")
_ENDS = {"<!--": "-->", "<![CDATA[": "]]>"}
MAX_DEPTH = 50


def parse_xml(text: str, source: str) -> Element:
    """The root element.

    Args:
        source: what errors call the text: a path, or "schema".

    Raises:
        PmlError: it is not well-formed, or has a document type.
    """
    return _Parser(text, source).parse()


class _Parser:
    def __init__(self, text: str, source: str) -> None:
        self._source = source
        # expat counts columns in the text with entities: (line, column) -> characters too many
        self._inserted: dict[int, list[int]] = {}
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._text = self._with_entities(text)
        self._lines = self._text.split("\n")
        self._open: list[Element] = []
        self._root: Element | None = None
        self._pending: list[str] = []
        self._pending_place: Place | None = None
        parser = self._parser = expat.ParserCreate()
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.StartDoctypeDeclHandler = self._refuse_doctype

    def parse(self) -> Element:
        try:
            self._parser.Parse(self._text, True)
        except expat.ExpatError as error:
            what = expat.errors.messages[error.code]
            hint = ""
            if what == expat.errors.XML_ERROR_TAG_MISMATCH and self._open:
                last = self._open[-1]
                hint = f": <{last.name}> of line {last.place.line} is not closed"
            elif what in (expat.errors.XML_ERROR_INVALID_TOKEN, expat.errors.XML_ERROR_SYNTAX):
                hint = (
                    ': attributes are written name="value", "<" in a text as &lt;, "&" as &amp;, '
                    "and code may stand in <![CDATA[...]]>"
                )
            place = self._place(error.lineno, error.offset)
            raise PmlError(place, f"{what}{hint}") from None
        assert self._root is not None
        return self._root

    def _with_entities(self, text: str) -> str:
        pieces: list[str] = []
        begin = 0
        while (verbatim := _VERBATIM.search(text, begin)) is not None:
            end = text.find(_ENDS[verbatim[0]], verbatim.end())
            if end < 0:
                break  # expat says what is wrong
            pieces += (self._replaced(text, begin, verbatim.start()), text[verbatim.start() : end])
            begin = end
        pieces.append(self._replaced(text, begin, len(text)))
        return "".join(pieces)

    def _replaced(self, text: str, begin: int, end: int) -> str:
        """Part of the text, with entities."""

        def entity(match: re.Match[str]) -> str:
            found = "&lt;" if match["less"] else "&amp;"
            line = bisect_right(self._line_starts, match.start())
            column = match.start() - self._line_starts[line - 1]
            self._inserted.setdefault(line, []).extend([column] * (len(found) - 1))
            return found

        pieces: list[str] = []
        for match in _NO_MARKUP.finditer(text, begin, end):
            pieces += (text[begin : match.start()], entity(match))
            begin = match.end()
        return "".join((*pieces, text[begin:end]))

    def _place(self, line: int, column: int) -> Place:
        # expat counts bytes
        encoded = self._lines[line - 1].encode()[:column]
        column = len(encoded.decode(errors="ignore"))
        for inserted in self._inserted.get(line, ()):
            column -= inserted < column
        return Place(self._source, line, column + 1)

    def _here(self) -> Place:
        return self._place(self._parser.CurrentLineNumber, self._parser.CurrentColumnNumber)

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._flush()
        element = Element(name, attributes, self._here())
        if len(self._open) == MAX_DEPTH:
            raise PmlError(element.place, f"<{name}> is inside {MAX_DEPTH} others, expected fewer")
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
            text = TextNode("".join(self._pending), self._pending_place)
            self._open[-1].children.append(text)
            self._pending, self._pending_place = [], None

    def _refuse_doctype(self, *_: object) -> None:
        raise PmlError(self._here(), "found a document type, expected none: PML has no entities")
