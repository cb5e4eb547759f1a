# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay sql`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sql(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE...",
            help="Tables: .csv, .tsv, .parquet, .json, .jsonl (named as the file), .duckdb.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model folder or hub id; with --server its name there.")
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of a server with OpenAI's API, http://...; again for each further one "
            "with the same model."
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1, help="Start the model so many times, with Ray: here, or at RAY_ADDRESS."
        ),
    ] = None,
    data_parallel_ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of each server: prompts go to the rank of vLLM that knows their beginning."
        ),
    ] = None,
    kv_events: Annotated[
        list[str] | None,
        typer.Option(
            metavar="tcp://HOST:PORT[,tcp://HOST:PORT]",
            help="Of each server in their order, where it publishes KV events, and replays them: "
            "prompts go by what caches hold.",
        ),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option("--command", "-c", help="Statements; read from the input if not said."),
    ] = None,
    output_path: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File for the rows of the last statement: .csv, .parquet, .json, .jsonl. Those of "
            "others are shown. At a terminal each statement's rows take the place of those before.",
            dir_okay=False,
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="File that keeps answers, so that a statement that was interrupted goes on.",
            dir_okay=False,
        ),
    ] = None,
    order: Annotated[str, typer.Option(help="auto, keep, fixed or per_row.")] = "auto",
    modules: Annotated[
        str,
        typer.Option(
            help="off, or modular or repair: long values that rows share become prompt modules, "
            "which may change answers."
        ),
    ] = "off",
    retry_errors: Annotated[
        bool,
        typer.Option(
            help="Ask again where the answer in the checkpoint was cut or is not of the type."
        ),
    ] = True,
    max_total_tokens: Annotated[
        int | None, typer.Option(min=1, help="No more tokens of prompts and answers than these.")
    ] = None,
    on_error: Annotated[
        str, typer.Option(help="What a row without an answer gives: null, column or raise.")
    ] = "null",
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The variable of the environment with the server's API key. Not said: "
            "OPENAI_API_KEY for api.openai.com, VLLM_API_KEY for others.",
        ),
    ] = None,
    api_key_over_http: Annotated[
        bool,
        typer.Option(
            "--api-key-over-http", help="Send it to another machine without encryption too."
        ),
    ] = False,
    server_mode: Annotated[
        str | None,
        typer.Option(help="completions sends tokens, chat messages; auto chooses by the server."),
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option(help="Of a request to the server, in seconds.")
    ] = None,
    max_running: Annotated[
        int | None, typer.Option(min=1, help="Prompts that the engine or server has at once.")
    ] = None,
    image_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder below which paths of images may lead.", exists=True, file_okay=False
        ),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(help="Send OpenTelemetry's spans there, those of a model started here too."),
    ] = None,
    system_prompt: Annotated[
        str | None, typer.Option(help="What the system says before each question.")
    ] = None,
    sampling: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Sampling of all questions: '{\"top_p\": 0.9}'."),
    ] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Variables of the model's chat template."),
    ] = None,
    extra_body: Annotated[
        str | None, typer.Option(metavar="JSON", help="Further fields of requests to a server.")
    ] = None,
) -> None:
    """Run SQL in which llm() asks a model, on files; as a shell if there is no --command.

    A model that is started here takes the options of vLLM's engine too, such as
    --tensor-parallel-size 2, --dtype or --max-model-len.

    Exit status: 1 if a statement is refused or fails.
    """
    from vllm_relay.tables.shell.command import run_sql

    status = run_sql(
        files or [],
        model=model,
        server=server,
        command=command,
        options={
            "order": order,
            "modules": modules,
            "checkpoint": checkpoint,
            "max_total_tokens": max_total_tokens,
            "retry_errors": retry_errors,
            "otlp_traces_endpoint": otlp_traces_endpoint,
        },
        request={
            "system_prompt": system_prompt,
            "sampling": sampling,
            "chat_template_kwargs": chat_template_kwargs,
            "extra_body": extra_body,
        },
        on_error=on_error,
        image_folder=image_folder,
        server_arguments={
            "api_key_env": api_key_env,
            "api_key_over_http": api_key_over_http,
            "kv_events": kv_events,
            "mode": server_mode,
            "timeout_s": timeout_s,
        },
        max_running=max_running,
        output_path=output_path,
        replicas=replicas,
        data_parallel_ranks=data_parallel_ranks,
    )
    raise typer.Exit(status)
