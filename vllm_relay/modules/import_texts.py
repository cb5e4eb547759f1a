# SPDX-License-Identifier: Apache-2.0
"""Where the texts of a prompt belong: beside the modules they are written beside."""

from __future__ import annotations

from vllm_relay.modules.pml import Import


class ImportTexts:
    """The texts of an import, by the modules they stand before and behind.

    Attributes:
        imports: the modules imported right in it.
        before: what stands before the first of these.
        behind: what stands behind each.
        alone: what stands in it without any.
    """

    def __init__(self, found: Import) -> None:
        self.imports: dict[str, Import] = {}
        self.behind: dict[str, str] = {}
        name, first = None, ""
        for each in found.content:
            if isinstance(each, Import):
                name = each.name
                self.imports[name] = each
                self.behind[name] = ""
            elif name is None:
                first += each.text
            else:
                self.behind[name] += each.text
        self.before = dict.fromkeys([*self.imports][:1], first)
        self.alone = "" if self.imports else first
