# SPDX-License-Identifier: Apache-2.0
"""The `vllm-relay` command."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Shared-prefix attention for vLLM.", no_args_is_help=True, add_completion=False
)


def print_version(wanted: bool) -> None:
    if wanted:
        from vllm_relay import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None: ...


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="A model folder or hub id; without one, a small model is made here."),
    ] = None,
    num_system_prompts: Annotated[
        int, typer.Option("--system-prompts", min=1, help="Different system prompts.")
    ] = 8,
    system_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Length of each system prompt, in tokens.")
    ] = 4096,
    questions_per_prompt: Annotated[
        int, typer.Option("--questions", min=1, help="Questions asked under each system prompt.")
    ] = 24,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each backend.")] = 2,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    keep: Annotated[
        Path | None, typer.Option(help="Folder to keep the made model in.", file_okay=False)
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="File to write the results to.", dir_okay=False)
    ] = None,
) -> None:
    """Answer the same questions with stock vLLM and with relay, and compare."""
    from vllm_relay.demo.run import run_demo

    # so that the engines are stopped and their files removed, as after Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    status = run_demo(
        model,
        num_system_prompts=num_system_prompts,
        system_prompt_tokens=system_prompt_tokens,
        questions_per_prompt=questions_per_prompt,
        output_tokens=output_tokens,
        rounds=rounds,
        dtype=dtype,
        seed=seed,
        keep=keep,
        json_path=json_path,
    )
    raise typer.Exit(status)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Say whether relay can run here and, where it cannot, what to do.

    Exit status: 0 if it can, 1 if it cannot.
    """
    from vllm_relay.doctor import collect_facts, diagnose, print_report, report_json

    report = diagnose(collect_facts())
    if as_json:
        typer.echo(report_json(report))
    else:
        print_report(report)
    raise typer.Exit(0 if report.can_run else 1)
