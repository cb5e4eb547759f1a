# SPDX-License-Identifier: Apache-2.0
"""Prompt modules: any part of a prompt computed once, reused anywhere.

Schemas are read from PML files or built from `Schema`, `Module`, `Parameter`, `Union` and `Turn`.
"""

from vllm_relay.modules.llm import ModularLLM, ModularOutput
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
