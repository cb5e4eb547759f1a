# SPDX-License-Identifier: Apache-2.0
"""Prompt modules: any part of a prompt computed once, reused anywhere.

Schemas are read from PML files or built from `Schema`, `Module`, `Parameter`, `Union` and `Turn`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_relay.modules.pml import parse_schema, read_schema
from vllm_relay.modules.schema import (
    Module,
    Parameter,
    Schema,
    SchemaError,
    Turn,
    Union,
)
from vllm_relay.modules.schema_store import SchemaStore
from vllm_relay.modules.xml_tree import PmlError

if TYPE_CHECKING:
    from vllm_relay.serving.modular_llm import ModularLLM, ModularOutput

__all__ = [
    "ModularLLM",
    "ModularOutput",
    "Module",
    "Parameter",
    "PmlError",
    "Schema",
    "SchemaError",
    "SchemaStore",
    "Turn",
    "Union",
    "parse_schema",
    "read_schema",
]


def __getattr__(name: str) -> Any:
    """What users import from here and stands above: it needs pins."""
    if name not in ("ModularLLM", "ModularOutput"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_relay.serving import modular_llm

    return getattr(modular_llm, name)
