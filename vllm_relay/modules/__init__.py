# SPDX-License-Identifier: Apache-2.0
"""Prompt modules: any part of a prompt computed once, reused anywhere (docs/modules.md).

Schemas are read from PML files or built from `Schema`, `Module`, `Parameter`, `Union` and `Turn`.

    schema.py            what a schema consists of                                     (pure)
    xml_tree.py, white_space.py, pml.py   how it is written                            (pure)
    chat_turns.py, text_tokens.py   in the words and tokens of a model                 (pure)
    layout.py, describe.py   its tokens and positions                                  (pure)
    plan.py              slots, positions and what is seen, of one prompt              (pure)
    import_checks.py, import_texts.py, render.py, schema_store.py
                         a prompt held against its schema becomes a plan               (pure)
    block_hashes.py      names of blocks that do not depend on the rest of the prompt  (pure)
    start_checks.py, requests.py   engines and requests that are refused              (vLLM)
    admission.py         requests wait for their modules                               (vLLM)
    worker.py            positions of tokens, and what they see                        (vLLM)
    check_command.py     vllm-relay modules check
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
