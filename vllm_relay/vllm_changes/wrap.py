# SPDX-License-Identifier: Apache-2.0
"""How functions of vLLM are replaced."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_MARK = "_replaced_by_vllm_relay"


def wrap(
    owner: Any,
    name: str,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    mark: str = _MARK,
) -> None:
    """Replace ``owner.name`` by ``make(original)`` once; classmethods stay classmethods.

    Args:
        mark: tells two replacements of one function apart; the later one wraps the earlier one.
    """
    original = inspect.getattr_static(owner, name)
    is_classmethod = isinstance(original, classmethod)
    function = original.__func__ if is_classmethod else original
    if getattr(function, mark, False):
        return
    replacement = functools.wraps(function)(make(function))  # with the marks of `function`
    setattr(replacement, mark, True)
    setattr(owner, name, classmethod(replacement) if is_classmethod else replacement)
