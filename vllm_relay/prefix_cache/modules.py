# SPDX-License-Identifier: Apache-2.0
"""The name under which `vllm_relay.modules` was published first; it stays."""

from __future__ import annotations

from typing import Any

from vllm_relay import modules

__all__ = modules.__all__  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    return getattr(modules, name)
