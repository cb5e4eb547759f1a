# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay demo`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

_NOT_WITH_LONG = ["model", "num_system_prompts", "system_prompt_tokens", "rounds"]
_NOT_WITH_TABLES = [*_NOT_WITH_LONG, "output_tokens", "document_tokens"]


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
            why = "has no effect with --model smollm2, whose system prompt is a text"
            _refuse_given(context, why, ["system_prompt_tokens"])
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
