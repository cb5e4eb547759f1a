# SPDX-License-Identifier: Apache-2.0
"""What a server takes, as far as it differs between servers: learned from what it refuses.

Only vLLM holds answers to every constraint by itself. Other servers are given a JSON schema, and
answers that are no objects stand in one under `_WRAPPER`; a server without schemas is asked for any
JSON, one without that for text, which is read as it comes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from vllm_relay.tables.outputs import Output

Format = Literal["schema", "object", "none"]

_WRAPPER = "answer"
_DEFINITIONS = ("$defs", "definitions")
_TYPES = {"int": "integer", "float": "number", "bool": "boolean"}
_FORMAT_WORDS = re.compile(
    r"response_?format|json_?schema|json_object|\bschema|structured|guided|grammar|json mode", re.I
)
_LIMIT_WORDS = re.compile(
    r"unsupported|not supported|unrecogni[sz]ed|unknown|unexpected|extra|not permitted|deprecated",
    re.I,
)


@dataclass(frozen=True)
class Dialect:
    """
    Attributes:
        limit_name: the field that limits an answer's tokens.
        format: how the type of an answer is told, beside words.
    """

    limit_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    format: Format = "schema"

    def after_refusal(self, words: str, output: Output) -> Dialect | None:
        """What to try next; None if the words are about something else."""
        if self.limit_name == "max_tokens" and "max_tokens" in words and _LIMIT_WORDS.search(words):
            return replace(self, limit_name="max_completion_tokens")
        if self.response_format(output) and _FORMAT_WORDS.search(words):
            has_less = self.format == "schema" and output.is_json and output.schema_json
            return replace(self, format="object" if has_less else "none")
        return None

    def response_format(self, output: Output) -> dict[str, Any] | None:
        """The field of this name; None if there is none."""
        if self.format == "none" or not output.constraint:
            return None
        if output.is_json and (self.format == "object" or not output.schema_json):
            return {"type": "json_object"}
        schema = _schema_of(output)
        if not _is_object(schema):
            # what it refers to by its place stays there
            definitions = {name: schema.pop(name) for name in _DEFINITIONS if name in schema}
            schema = {
                "type": "object",
                "properties": {_WRAPPER: schema},
                "required": [_WRAPPER],
                "additionalProperties": False,
                **definitions,
            }
        return {"type": "json_schema", "json_schema": {"name": _WRAPPER, "schema": schema}}

    def unwrapped(self, text: str, output: Output) -> str:
        """An answer without the object that it was asked to stand in."""
        is_schema = (self.response_format(output) or {}).get("type") == "json_schema"
        if not is_schema or _is_object(_schema_of(output)):
            return text
        try:
            # numbers as they are written
            found = json.loads(text, parse_float=_Written, parse_int=_Written)
        except (ValueError, RecursionError):
            return text
        if not isinstance(found, dict) or list(found) != [_WRAPPER]:
            return text
        value = found[_WRAPPER]
        if isinstance(value, str) and not output.is_json:
            return value
        return json.dumps(json.loads(text)[_WRAPPER], ensure_ascii=False)


class _Written(str):
    """A number's digits."""


def _schema_of(output: Output) -> dict[str, Any]:
    if output.is_json:
        return json.loads(output.schema_json or "{}")
    if output.choices:
        return {"type": "string", "enum": list(output.choices)}
    return {"type": _TYPES.get(output.type, "string")}


def _is_object(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "object"
