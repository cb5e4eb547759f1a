# SPDX-License-Identifier: Apache-2.0
"""What a scan finds."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from vllm_relay.vllm_changes.contract.python_sources import Function


@dataclass(frozen=True)
class Call:
    """A call of vLLM's by us; of a function that replaces one of its own: what that takes."""

    file: str
    path: str
    node: ast.Call


@dataclass(frozen=True)
class Replacement:
    """A function of ours that vLLM calls in the place of its own.

    Attributes:
        path: vLLM's.
        passes_on: whether it calls the one it replaces.
    """

    file: str
    path: str
    node: Function
    passes_on: bool


@dataclass
class Scan:
    """What was found.

    Attributes:
        uses: path in vLLM -> file of ours -> how it is used there.
        unknown: attributes of vLLM's objects that its sources do not have, and where.
        bodies: functions of vLLM's that ours do instead -> file of ours -> what is used of them.
    """

    uses: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    replacements: list[Replacement] = field(default_factory=list)
    unknown: dict[str, set[str]] = field(default_factory=dict)
    bodies: dict[str, dict[str, str]] = field(default_factory=dict)

    def note(self, path: str, file: str, how: str) -> None:
        self.uses.setdefault(path, {}).setdefault(file, set()).add(how)

    def adds(self, path: str) -> bool:
        """Whether an attribute, which vLLM's class does not have, is given to it by ours, or to a
        class near to it."""
        owners, _, name = path.rpartition(".")
        return any(
            "added" in how and added.rpartition(".")[2] == name
            for added, files in self.uses.items()
            for how in files.values()
        ) and bool(owners)
