# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay modules check`: whether a schema can be understood, and what it takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vllm_relay.arguments import CommandLineError
from vllm_relay.modules.markup.pml import read_schema, read_text
from vllm_relay.modules.markup.schema import Schema
from vllm_relay.modules.prompt.layout import describe_schema
from vllm_relay.modules.prompt.schema_store import SchemaStore

if TYPE_CHECKING:
    from vllm_relay.modules.prompt.render import RenderedPrompt

_COLUMNS = {
    "module": "module",
    "position": "position",
    "positions": "positions",
    "tokens": "tokens",
    "blocks": "KV blocks",
    "padding_tokens": "pads",
}


def run_check(
    path: Path,
    *,
    model: str | None,
    chat_template: Path | None,
    block_size: int,
    prompts: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Print the layout of a schema; 0, or 1 if it or a prompt is refused.

    Raises:
        CommandLineError: a file, or the tokenizer of the model, cannot be read.
    """
    try:
        schema = read_schema(path)
        if model is None:
            _print_names(schema, as_json)
            return 0
        store = _store(model, chat_template, block_size)
        layout = describe_schema(store.add(schema), block_size)
        rendered = {str(each): store.render(read_text(each), source=str(each)) for each in prompts}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        raise CommandLineError(f"cannot read it: {error}") from error
    described = {name: _prompt(each) for name, each in rendered.items()}
    if as_json:
        print(json.dumps({**layout, "prompts": described}))
    else:
        _print_layout(layout, described)
    return 0


def _store(model: str, chat_template: Path | None, block_size: int) -> SchemaStore:
    from transformers import AutoTokenizer

    template = None if chat_template is None else read_text(chat_template)
    tokenizer = AutoTokenizer.from_pretrained(model)
    return SchemaStore(tokenizer, block_size=block_size, chat_template=template)


def _prompt(rendered: RenderedPrompt) -> dict[str, Any]:
    plan = rendered.plan
    assert plan is not None
    return {
        "cached_tokens_by_module": rendered.module_tokens,
        "new_tokens": sum(run.num_tokens for run in plan.tail),
        "tokens_with_padding": len(rendered.token_ids),
        "end_position": rendered.end_position,
    }


def _print_names(schema: Schema, as_json: bool) -> None:
    names = [module.name for module in schema.modules()]
    if as_json:
        print(json.dumps({"name": schema.name, "modules": names}))
        return
    print(f"schema {schema.name}: understood; modules: {', '.join(names) or 'none'}")
    print("with --model its tokens, positions and KV blocks are shown")


def _print_layout(layout: dict[str, Any], prompts: dict[str, dict[str, Any]]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name, title in _COLUMNS.items():
        is_name = name == "module"
        table.add_column(title, justify="left" if is_name else "right", no_wrap=is_name)
    table.add_column("parameters")
    for module in layout["modules"]:
        cells = [str(module[name]) for name in _COLUMNS]
        *parents, last = module["module"].split("/")
        cells[0] = "  " * len(parents) + last if last else "(every prompt)"
        parameters = [f"{name} ({length})" for name, length in module["parameters"].items()]
        note = [] if module["cached"] else ["not cached"]
        table.add_row(*cells, ", ".join([*parameters, *note]))
    console = Console()
    console.print(
        f"schema {layout['name']}: {layout['positions']} positions, KV blocks of "
        f"{layout['block_size']} tokens"
    )
    console.print(table)
    for name, prompt in prompts.items():
        cached = sum(prompt["cached_tokens_by_module"].values())
        console.print(
            f"{name}: {cached} tokens cached, {prompt['new_tokens']} new; "
            f"{prompt['tokens_with_padding']} with padding, ends at position "
            f"{prompt['end_position']}"
        )
