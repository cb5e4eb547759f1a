# SPDX-License-Identifier: Apache-2.0
"""Every schema of examples/modules has a prompt that fits it; schemas of others, in the folder that
RELAY_PML_FOLDER names, render too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.modules.chat_templates import TEMPLATES
from vllm_relay.demo.tokenizer import build_tokenizer
from vllm_relay.modules.markup.schema import Content, Module, Turn, Union
from vllm_relay.modules.prompt.schema_store import SchemaStore

FOLDER = Path(__file__).parents[2] / "examples" / "modules"
FILES = sorted(FOLDER.glob("*.xml"))
SCHEMAS = [path for path in FILES if not path.stem.endswith("_prompt")]
FOLDER_OF_OTHERS = os.environ.get("RELAY_PML_FOLDER")


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


@pytest.mark.skipif(FOLDER_OF_OTHERS is None, reason="RELAY_PML_FOLDER names no schemas of others")
@pytest.mark.parametrize("template", TEMPLATES)
def test_schemas_of_others_render(template: str) -> None:
    store = SchemaStore(build_tokenizer(8192), block_size=32, chat_template=TEMPLATES[template])
    paths = sorted(Path(FOLDER_OF_OTHERS or "").glob("*.xml"))
    assert paths
    for path in paths:
        schema = store.add(path).schema
        prompt = f"{_all_imports(schema.content)} Go on."
        rendered = store.render(prompt, schema=schema.name)
        assert rendered.plan is not None and len(rendered.plan.segments) > 1
        assert store.render(prompt, schema=schema.name, mode="exact").token_ids


def _all_imports(content: tuple[Content, ...]) -> str:
    """Every module, of unions the last."""
    imports = ""
    for each in content:
        if isinstance(each, Turn):
            imports += _all_imports(each.content)
        elif isinstance(each, Module | Union):
            module = each if isinstance(each, Module) else each.modules[-1]
            imports += f"<{module.name}>{_all_imports(module.content)}</{module.name}>"
    return imports
