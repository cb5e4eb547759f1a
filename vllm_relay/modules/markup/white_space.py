# SPDX-License-Identifier: Apache-2.0
"""Which white space of a PML file is text and which only lays the file out.

- The indentation that all lines of an element have in common is layout.
- So are blank lines and spaces around the text of an element, and where a module, union or turn
  begins or ends; but if a line break ends a text, one line break stays.
- Everything else is text: line breaks and further indentation, as code has them.
- `xml:space="preserve"` makes all of it text, in an element and those within.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from vllm_relay.modules.markup.xml_tree import Element, PmlError, TextNode

SPACE = "xml:space"
_INDENTATION = re.compile(r"\n([^\S\n]*)(?=[^\s])")
_OPENING = re.compile(r"\A(?:[^\S\n]*\n)+")


def preserves(element: Element, inherited: bool) -> bool:
    """Whether all white space in an element is text.

    Raises:
        PmlError: its attribute says neither.
    """
    value = element.attributes.get(SPACE)
    if value not in (None, "preserve", "default"):
        raise PmlError(
            element.place,
            f'<{element.name}>: given {SPACE}="{value}", expected preserve or default',
        )
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
