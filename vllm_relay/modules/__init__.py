# SPDX-License-Identifier: Apache-2.0
"""Prompt modules: any part of a prompt computed once, reused anywhere (docs/modules.md).

Schemas are read from PML files or built from `Schema`, `Module`, `Parameter`, `Union` and `Turn`.

    markup/              the language of schemas and prompts                           (pure)
    prompt/              their tokens, positions and plans                             (pure)
    engine/              requests wait for modules, and see what plans say             (vLLM)
    check_command.py     vllm-relay modules check
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_relay.modules.markup.pml import parse_schema, read_schema
from vllm_relay.modules.markup.schema import Module, Parameter, Schema, SchemaError, Turn, Union
from vllm_relay.modules.markup.xml_tree import PmlError
from vllm_relay.modules.prompt.schema_store import SchemaStore

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
