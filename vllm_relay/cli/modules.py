# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay modules`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Prompt modules: check a schema.", no_args_is_help=True)


@app.callback()
def modules() -> None: ...  # so that "check" stays a command of its own


@app.command("check")
def check_modules(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="A schema in PML.", exists=True, dir_okay=False)
    ],
    model: Annotated[
        str | None, typer.Option(help="A model folder or hub id, whose tokenizer counts tokens.")
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="A chat template instead of the model's.", exists=True, dir_okay=False),
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 128,
    prompt: Annotated[
        list[Path] | None,
        typer.Option(help="A prompt in PML, to check against it.", exists=True, dir_okay=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Whether a schema of prompt modules is understood; with a model, its positions, tokens, KV
    blocks and padding.

    Exit status: 1 if the schema or a prompt is refused.
    """
    from vllm_relay.modules.check_command import run_check

    if prompt and model is None:
        raise typer.BadParameter("needs --model", param_hint="--prompt")
    status = run_check(
        path,
        model=model,
        chat_template=chat_template,
        block_size=block_size,
        prompts=tuple(prompt or ()),
        as_json=as_json,
    )
    raise typer.Exit(status)
