# SPDX-License-Identifier: Apache-2.0
"""Markup and bodies of requests that are nearly right."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np

from tests.modules.random_prompts import SchemaMaker, random_prompt
from vllm_relay.modules.markup.schema import (
    Content,
    Module,
    Parameter,
    Schema,
    Turn,
    Union,
)

WORDS = ["a", "of", "boat", "&", "1 < 2", "é", "\t", "  ", "\n", "𝕏"]
PIECES = [
    "<", ">", "</", "/>", "&", "&lt;", "&#0;", "&#x10ffff;", "&unknown;", "<![CDATA[", "]]>",
    "<!--", "-->", "<?x?>", "<!DOCTYPE x>", '"', "'", "=", "\x00", "\ud800", "\uffff", "\r\n",
    "<schema>", "</schema>", '<schema name="x">', "<prompt>", '<prompt schema="s">', "</prompt>",
    '<module name="m">', "</module>", '<module name="m" src="x"/>', '<module name="m" cache="no"/>',
    "<union>", "</union>", '<param name="p" len="5"/>', '<param name="p" len="65536"/>',
    '<param name="p" len="99999999999"/>', '<param name="p" len="-1"/>', "<system>", "</system>",
    "<user>", "</user>", "<assistant>x</assistant>", '<scaffold modules="n1 n2"/>',
    'xml:space="preserve"', ' xml:space="x"', ' name="n1"', ' len="3"', "<n1>", "<n1/>", "</n1>",
    "<n2 n3='a b'/>", " ", "\n    ", "\t",
]  # fmt: skip


class Fuzz:
    """Inputs by their number."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._maker = SchemaMaker(np.random.default_rng(seed), WORDS, most_words=8)
        self._numbers = np.random.default_rng(seed)

    def schema(self) -> Schema:
        """One that is right."""
        return self._maker.schema("s", has_turns=self.rng.random() < 0.3)

    def prompt(self, schema: Schema) -> str:
        """One that may be right."""
        return random_prompt(self._numbers, schema, WORDS)

    def markup(self, text: str) -> str:
        """A text with a few mistakes, or with many."""
        for _ in range(self.rng.choice((0, 1, 1, 2, 3, 10))):
            text = self._mistake(text)
        return text[:20_000]

    def _mistake(self, text: str) -> str:
        rng = self.rng
        begin, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        kind = rng.randrange(8)
        if kind == 0:
            return text[:begin] + text[end:]
        if kind == 1:
            return text[:end] + text[begin:end] * rng.choice((1, 1, 2, 30)) + text[end:]
        if kind == 2:
            return text[:begin] + rng.choice(PIECES) * rng.choice((1, 1, 3, 100)) + text[begin:]
        if kind == 3:
            return text[:begin] + text[begin:end][::-1] + text[end:]
        if kind == 4:
            return text[:begin] + chr(rng.choice((rng.randrange(128), rng.randrange(0x110000))))
        if kind == 5:
            tags = rng.choices(("module", "user", "n1", "union", "x"), k=rng.choice((3, 60)))
            opened = "".join(f'<{tag} name="{tag}">' for tag in tags)
            return text[:begin] + opened + "".join(f"</{tag}>" for tag in tags[::-1]) + text[begin:]
        if kind == 6:
            parts = text.split(">")
            rng.shuffle(parts)
            return ">".join(parts)
        old = rng.choice(("n1", "n2", "name", "module", "/", " "))
        return text.replace(old, rng.choice(PIECES))

    def relay_field(self, prompt: str) -> Any:
        """The field `relay` of a request, and what may stand there instead."""
        field: dict[str, Any] = {"schema": "s", "prompt": prompt}
        if prompt.startswith("<prompt"):
            del field["schema"]
        for _ in range(self.rng.choice((0, 0, 1, 2))):
            name = self.rng.choice(("schema", "prompt", "mode", "repair_tokens", "sceham"))
            field[name] = self.value()
        return field if self.rng.random() < 0.95 else self.value()

    def value(self) -> Any:
        values: list[Any] = [
            None, True, 0, -1, 2**70, 1e308, float("nan"), "", "s", "modular", "repair", "exact",
            "\ud800", "x" * 3000, [], [[]], {}, {"": {}}, [None] * 50,
        ]  # fmt: skip
        return self.rng.choice(values)

    def body(self, prompt: str) -> bytes:
        """Of a completion or chat completion."""
        request: dict[str, Any] = {"model": "m", "relay": self.relay_field(prompt)}
        for _ in range(self.rng.choice((0, 0, 1, 2))):
            name = self.rng.choice(("prompt", "messages", "max_tokens", "tools", "model", "echo"))
            request[name] = self.value()
        text = json.dumps(request)
        if self.rng.random() < 0.2:
            text = self._mistake(text)
        return text.encode(errors="replace")


def pml_of(schema: Schema) -> str:
    """A schema as it may be written."""
    scaffolds = "".join(f'<scaffold modules="{" ".join(names)}"/>' for names in schema.scaffolds)
    return f'<schema name="{schema.name}">{_content(schema.content)}{scaffolds}</schema>'


def _content(content: tuple[Content, ...]) -> str:
    return "".join(map(_written, content))


def _written(each: Content) -> str:
    if isinstance(each, Parameter):
        scaffold = "" if each.placeholder is None else ' scaffold="a b"'
        return f'<param name="{each.name}" len="{each.length_tokens}"{scaffold}/>'
    if isinstance(each, Module):
        cache = "" if each.cached else ' cache="false"'
        return f'<module name="{each.name}"{cache}>{_content(each.content)}</module>'
    if isinstance(each, Union):
        return f"<union>{_content(each.modules)}</union>"
    if isinstance(each, Turn):
        return f"<{each.role}>{_content(each.content)}</{each.role}>"
    return each.text.replace("<", "&lt;")
