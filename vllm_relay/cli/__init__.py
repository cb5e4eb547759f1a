# SPDX-License-Identifier: Apache-2.0
"""The `vllm-relay` command: what there is of it, and doctor, tune and calibrate.

exit_status.py   how commands end that are refused or interrupted
demo.py, predict.py, sql.py, contexts.py, modules.py   those of these names
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_relay.cli import contexts, modules
from vllm_relay.cli.demo import demo
from vllm_relay.cli.exit_status import Commands
from vllm_relay.cli.predict import predict
from vllm_relay.cli.sql import sql

_HELP = """Serve language models to requests that share text: a plug-in for vLLM.

\b
Shared prefixes read once a step:
    vllm serve MODEL --attention-backend relay
Requests in the order of their prefixes, and a cache that knows the queue:
    ... --additional-config.relay.scheduler true
Long contexts, stored and searched:
    vllm serve MODEL --attention-backend relay_sparse
Parts of prompts computed once, used anywhere:
    the same, and a schema sent to /relay/schemas; vllm-relay modules checks it
A question about every row of a table, in the order that costs least:
    vllm-relay sql TABLE.csv --model MODEL
One address for many replicas, each asked what it knows:
    serve run vllm_relay.cluster.ray.serve:app model=MODEL

\b
Exit status: 0; 1: it failed, or found something; 2: the command line is
refused; 130: Ctrl-C.
"""
_SEE, _USE = "See whether it pays", "Use it"

app = typer.Typer(cls=Commands, help=_HELP, no_args_is_help=True, rich_markup_mode="rich")


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


app.command(rich_help_panel=_SEE)(demo)


@app.command(rich_help_panel=_SEE)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Say whether relay can run here and, where it cannot, what to do.

    Exit status: 1 if it cannot.
    """
    from vllm_relay.doctor import collect_facts, diagnose, print_report, report_json

    report = diagnose(collect_facts())
    if as_json:
        typer.echo(report_json(report))
    else:
        print_report(report)
    raise typer.Exit(0 if report.can_run else 1)


app.command(rich_help_panel=_SEE)(predict)


@app.command(rich_help_panel=_SEE)
def tune(
    num_heads: Annotated[int, typer.Option("--heads", min=1, help="Query heads of one GPU.")] = 32,
    num_kv_heads: Annotated[
        int, typer.Option("--kv-heads", min=1, help="KV heads of one GPU.")
    ] = 8,
    head_size: Annotated[int, typer.Option(help="Size of a head.")] = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    kv_dtype: Annotated[
        str | None, typer.Option(help="Of the KV cache: bfloat16, float16 or fp8; as --dtype.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=16, help="Tokens of a KV block.")] = 16,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where to store it; $VLLM_RELAY_CACHE or the user's cache if not said."),
    ] = None,
    sparse: Annotated[
        bool,
        typer.Option(
            "--sparse", help="Measure searches of key indexes on this CPU instead; minutes."
        ),
    ] = False,
) -> None:
    """Measure the CUDA kernels on this GPU and store the fastest configuration; or with --sparse
    what searches cost on this CPU, which plans of the context database go by.

    Exit status: 1 if there is no GPU.
    """
    from vllm_relay.tune import run_sparse_tune, run_tune

    if sparse:
        raise typer.Exit(run_sparse_tune(folder=folder))
    status = run_tune(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        folder=folder,
    )
    raise typer.Exit(status)


@app.command(context_settings={"ignore_unknown_options": True}, rich_help_panel=_SEE)
def calibrate(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|URL",
            help="A model folder or hub id, or the address of a vLLM server that does nothing else "
            "meanwhile, http://...",
        ),
    ],
    output_path: Annotated[
        Path, typer.Option("--output", "-o", help="JSON file for the costs.", dir_okay=False)
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="OPTIONS", help="Of vLLM's engine.")
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The variable of the environment with the server's API key."
        ),
    ] = None,
) -> None:
    """Measure what a step of an engine takes, and what each token adds, for `predict --costs`.

    About 10,000 prompt tokens and 6,000 of answers are computed. A model that is started here takes
    the options of vLLM's engine, such as --max-model-len.

    Exit status: 1 if the engine fails.
    """
    from vllm_relay.calibrate import run_calibrate

    raise typer.Exit(
        run_calibrate(engine, arguments or [], output_path=output_path, api_key_env=api_key_env)
    )


app.command(context_settings={"ignore_unknown_options": True}, rich_help_panel=_USE)(sql)
app.add_typer(contexts.app, name="contexts", rich_help_panel=_USE)
app.add_typer(modules.app, name="modules", rich_help_panel=_USE)
