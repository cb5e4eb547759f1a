# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay contexts`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Stored contexts: list, show, verify, delete.", no_args_is_help=True)


def _contexts_path(given: str) -> Path:
    if not given:
        raise typer.BadParameter("given an empty path; the current folder is .")
    return Path(given)


ContextsPath = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="A context, or a folder of *.relayctx files, or of rank-*-of-* folders of them.",
        parser=_contexts_path,
    ),
]
ContextsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


@app.command("list")
def list_contexts(path: ContextsPath, as_json: ContextsJson = False) -> None:
    """One line per context.

    Exit status: 1 if one cannot be opened.
    """
    from vllm_relay.sparse.contexts.contexts_command import run_list

    raise typer.Exit(run_list(path, as_json=as_json))


@app.command("show")
def show_contexts(path: ContextsPath, as_json: ContextsJson = False) -> None:
    """All that is known of a context without reading its keys and values.

    Exit status: 1 if one cannot be opened.
    """
    from vllm_relay.sparse.contexts.contexts_command import run_show

    raise typer.Exit(run_show(path, as_json=as_json))


@app.command("verify")
def verify_contexts(path: ContextsPath, as_json: ContextsJson = False) -> None:
    """Read every byte and compare it with its checksums.

    Exit status: 1 if a context is damaged.
    """
    from vllm_relay.sparse.contexts.contexts_command import run_verify

    raise typer.Exit(run_verify(path, as_json=as_json))


@app.command("delete")
def delete_contexts(
    path: ContextsPath,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: ContextsJson = False,
) -> None:
    """Delete a context, or all of a folder.

    Exit status: 1 if one is left.
    """
    from vllm_relay.sparse.contexts.contexts_command import run_delete

    status = run_delete(
        path,
        confirm=lambda question: yes or _confirm(question),
        as_json=as_json,
    )
    raise typer.Exit(status)


def _confirm(question: str) -> bool:
    # err=True alone leaves the last character of the question on stdout
    with redirect_stdout(sys.stderr):
        return typer.confirm(question, err=True)
