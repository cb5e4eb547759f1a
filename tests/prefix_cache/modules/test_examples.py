# SPDX-License-Identifier: Apache-2.0
"""Every schema of examples/modules has a prompt that fits it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prefix_cache.modules.chat_templates import TEMPLATES
from vllm_relay.demo.tokenizer import build_tokenizer
from vllm_relay.prefix_cache.modules.schema_store import SchemaStore

FOLDER = Path(__file__).parents[3] / "examples" / "modules"
FILES = sorted(FOLDER.glob("*.xml"))
SCHEMAS = [path for path in FILES if not path.stem.endswith("_prompt")]


def test_files_are_schemas_and_their_prompts() -> None:
    assert SCHEMAS
    prompts = [path.with_stem(f"{path.stem}_prompt") for path in SCHEMAS]
    assert sorted([*SCHEMAS, *prompts]) == FILES


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_an_example_renders(path: Path, template: str) -> None:
    tokenizer = build_tokenizer(8192)  # of words, as the lengths of parameters are meant
    store = SchemaStore(tokenizer, block_size=32, chat_template=TEMPLATES[template])
    schema = store.add(path)
    assert schema.schema.name == path.stem
    prompt = path.with_stem(f"{path.stem}_prompt").read_text()
    rendered = store.render(prompt)
    assert rendered.plan is not None and len(rendered.plan.segments) > 1
    assert store.render(prompt, mode="exact").token_ids
