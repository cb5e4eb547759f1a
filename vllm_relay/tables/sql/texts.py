# SPDX-License-Identifier: Apache-2.0
"""Texts that are written out in a statement."""

from __future__ import annotations

from sqlglot import exp


def text_of(node: exp.Expr) -> str | None:
    """The text of ``'...'``, ``$$...$$`` or ``E'...'``; None if the node is none of them."""
    is_text = isinstance(node, (exp.RawString, exp.ByteString)) or (
        isinstance(node, exp.Literal) and node.is_string
    )
    return node.name if is_text else None
