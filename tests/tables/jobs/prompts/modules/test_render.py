# SPDX-License-Identifier: Apache-2.0
"""Modules of tables are rendered as those of schemas are."""

from __future__ import annotations

import pytest

from tests.tables.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from vllm_relay.modules import Module, Schema, SchemaStore, Turn, Union
from vllm_relay.modules.prompt.render import REPAIR_TOKENS, Mode
from vllm_relay.tables.jobs.prompts.modules.layout import PlacedModule
from vllm_relay.tables.jobs.prompts.modules.prompts import ModuleRenderer

TOKENIZER = byte_tokenizer(CHAT_TEMPLATE)


@pytest.mark.parametrize("mode", ["modular", "repair"])
def test_prompts_are_those_of_a_schema(mode: Mode) -> None:
    schema = Schema(
        "rows",
        Turn(
            "user",
            "Question?\n\n",
            Union(Module("a1", "first of a" * 3), Module("a2", "second of a" * 4)),
            Union(Module("b1", "short"), Module("b2", "second of b" * 9)),
        ),
    )
    store = SchemaStore(TOKENIZER, block_size=8)
    root = store.add(schema).root
    placed = {
        member.name: PlacedModule(number, member.name, "", member.tokens, member.position)
        for number, member in enumerate(root.children())
    }
    renderer = ModuleRenderer(root.tokens, 8, REPAIR_TOKENS if mode == "repair" else 0)
    for first, second in (("a1", "b1"), ("a1", "b2"), ("a2", "b1"), ("a2", "b2")):
        expected = store.render(
            f'<prompt schema="rows"><{first}/>between<{second}/> behind</prompt>', mode=mode
        )
        end = store.text_tokens(" behind<|end|>\n<|assistant|>\n")
        parts = [placed[first], store.text_tokens("between"), placed[second], end]
        assert renderer.render(parts) == expected
