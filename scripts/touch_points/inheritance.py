# SPDX-License-Identifier: Apache-2.0
"""Which members classes of ours have of vLLM's."""

from __future__ import annotations

import ast

from touch_points.hints import NARROWED
from touch_points.values import Value, Values
from vllm_relay.vllm_changes.contract.python_sources import PythonSources, dotted_name

OURS, THEIRS = "vllm_relay", "vllm"
_CLOSED = frozenset(
    ["ABC", "Generic", "Protocol", "object", "NamedTuple", "Enum", "IntEnum", "msgspec.Struct"]
)


def is_theirs(path: str) -> bool:
    return path == THEIRS or path.startswith(f"{THEIRS}.")


class Inheritance:
    """Of the classes in both packages."""

    def __init__(self, sources: PythonSources) -> None:
        self.sources = sources

    def path_of(self, owner: str, name: str) -> str | None:
        """As an attribute of the class of vLLM that is nearest; None where it is ours."""
        if is_theirs(owner):
            return f"{owner}.{name}" if self.sources.find(f"{owner}.{name}") else None
        base = self.their_base(owner, name)
        return f"{base}.{name}" if base else None

    def their_base(self, ours: str, name: str) -> str | None:
        """The nearest of vLLM's classes that a class of ours has this member of."""
        found = self.sources.find(ours)
        if found is None or not isinstance(found.node, ast.ClassDef):
            return None
        for each in self.sources.with_bases(found):
            if is_theirs(each.path):
                if self.sources.member(each, name) is not None:
                    return each.path
            elif name in self.sources.own_members(each):
                return None
        return None

    def narrowed(self, owners: Values, name: str) -> Values:
        """Instead of a base class that lacks an attribute, those that are asked for it."""
        found: Values = ()
        for each in owners:
            others = NARROWED.get(each.path, ())
            if others and self.path_of(each.path, name) is None:
                have = [other for other in others if self.path_of(other, name)]
                found += tuple(Value(each.kind, other) for other in have)
                continue
            found += (each,)
        return found or owners

    def is_open(self, owner: Value) -> bool:
        """Whether its class extends one of other packages."""
        found = self.sources.find(owner.path)
        if found is None or not isinstance(found.node, ast.ClassDef):
            return False
        return any(
            self.sources.name_in(each.module, name) is None and name not in _CLOSED
            for each in self.sources.with_bases(found)
            if isinstance(each.node, ast.ClassDef)
            for base in each.node.bases
            if (name := dotted_name(base.value if isinstance(base, ast.Subscript) else base))
        )

    def their_base_above(self, ours: str, name: str) -> str | None:
        found = self.sources.find(ours)
        assert found is not None
        for each in self.sources.with_bases(found):
            if is_theirs(each.path) and self.sources.member(each, name) is not None:
                return each.path
        return None
