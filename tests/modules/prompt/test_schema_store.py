# SPDX-License-Identifier: Apache-2.0
"""How much a store of schemas takes."""

from __future__ import annotations

import tracemalloc

import pytest

from tests.modules.chat_templates import character_tokenizer
from vllm_relay.modules.markup.pml import parse_schema
from vllm_relay.modules.markup.schema import (
    Module,
    Parameter,
    Schema,
    SchemaTooLongError,
    TooManySchemasError,
    Union,
)
from vllm_relay.modules.prompt.schema_store import SchemaStore

LONG = '<schema name="s">{}</schema>'.format(
    "".join(f'<param name="p{n}" len="65536"/>' for n in range(60))
)


def store_of(**limits: int) -> SchemaStore:
    return SchemaStore(character_tokenizer(), block_size=32, **limits)


@pytest.mark.parametrize("limits", [{"max_model_len": 4096}, {"max_tokens": 100_000}])
def test_a_short_schema_of_long_parameters_takes_no_memory(limits: dict[str, int]) -> None:
    store = store_of(**limits)
    tracemalloc.start()
    try:
        with pytest.raises(SchemaTooLongError, match="schema 's': takes"):
            store.add(parse_schema(LONG))
        left, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4_000_000 and left < 400_000, (left, most)
    assert not store.names()


def test_members_of_a_union_take_positions_once() -> None:
    store = store_of(max_model_len=40)
    store.add(Schema("s", Union(*(Module(f"m{n}", "x" * 30) for n in range(5)))))
    with pytest.raises(SchemaTooLongError, match="takes 61 positions or more, the model has 40"):
        store.add(Schema("s", Module("a", "x" * 30), Module("b", "x" * 30)))
    with pytest.raises(SchemaTooLongError, match="takes 51 positions or more, the model has 40"):
        store.add(Schema("s", Parameter("p", 50)))
    assert [each.name for each in store["s"].root.walk()] == ["", "m0", "m1", "m2", "m3", "m4"]


def test_schemas_have_a_number_and_tokens_together() -> None:
    store = store_of(max_schemas=2, max_tokens=500)
    for name in ("a", "b"):
        store.add(Schema(name, "x" * 200))
    with pytest.raises(TooManySchemasError, match="there are 2 schemas, expected at most 2"):
        store.add(Schema("c", "x"))
    store.add(Schema("a", "x" * 290))  # in its own place
    with pytest.raises(TooManySchemasError, match=r"takes 301 tokens, the others 201 of 500"):
        store.add(Schema("a", "x" * 300))
    with pytest.raises(TooManySchemasError, match=r"takes 305 tokens"):
        store.add(Schema("a", *(Module(f"m{n}", "x" * 11) for n in range(4)), "x" * 4))
    assert store["a"].num_tokens == 291
    store.remove("b")
    store.add(Schema("c", "x"))
    assert store.names() == ["a", "c"]
