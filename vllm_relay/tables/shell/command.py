# SPDX-License-Identifier: Apache-2.0
"""What `vllm-relay sql` does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
from rich.console import Console

from vllm_relay.arguments import (
    INTERRUPTED,
    check_model,
    check_writable,
    reading_command_line,
)
from vllm_relay.tables.engines.addresses import addresses_of, check_address, key_from_environment
from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.engines.lazy import LazyEngine
from vllm_relay.tables.engines.opening import check_kv_events, open_engine
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.report import JobReport
from vllm_relay.tables.question import RequestOptions
from vllm_relay.tables.shell.engine_arguments import split_arguments
from vllm_relay.tables.shell.files import check_output, open_files, write_relation
from vllm_relay.tables.shell.script import gives_rows, place_of_output, read_statements
from vllm_relay.tables.sql.connection import Connection, connect
from vllm_relay.tables.sql.replay.statement import split
from vllm_relay.tables.sql.result import Result
from vllm_relay.tables.texts import row_text
from vllm_relay.vllm_changes.engine_start import interruptible_start

_ERRORS_SHOWN = 5
# of SQL, engines, budgets and checkpoints too
_FAILURES = (duckdb.Error, ValueError, RuntimeError)


def run_sql(
    arguments: Sequence[str],
    *,
    model: str | None,
    server: str | Sequence[str] | None,
    command: str | None,
    options: dict[str, Any],
    request: dict[str, str | None],
    on_error: Any,
    image_folder: Path | None = None,
    server_arguments: dict[str, Any],
    max_running: int | None,
    output_path: Path | None,
    replicas: int | None = None,
    data_parallel_ranks: int | None = None,
    console: Console | None = None,
) -> int:
    """Run statements from the command line, a pipe or a terminal.

    Args:
        arguments: files that become tables, and options of vLLM's engine.
        server: an address, or several; None starts the model when it is first asked.
        command: statements; None reads them from the standard input.
        options, request: of `JobOptions`, and of its `RequestOptions`, as JSON but for the system
            prompt.
        server_arguments: of `ServerEngine`, ``kv_events`` of `open_engine`, and ``api_key_env``,
            the variable with its key; those that are None are left out.
        output_path: where rows are written instead of shown, see docs/tables.md.

    Returns:
        The exit status, see there; the reason is printed.

    Raises:
        CommandLineError: an argument is refused.
    """
    console = console or Console()
    errors = Console(stderr=True)
    given = {name: value for name, value in server_arguments.items() if value}
    with reading_command_line():
        paths, llm_arguments = split_arguments([str(each) for each in arguments])
        servers = [server] if isinstance(server, str) else list(server or ())
        engine = LazyEngine(lambda: _open(model, servers, opening))
        if servers:
            if replicas is not None:
                raise ValueError(
                    "--replicas given with --server: it starts a model several times; give "
                    "--server once for each server, or --data-parallel-ranks for the ranks of one"
                )
            opening = _of_servers(servers, given, llm_arguments, max_running)
            opening |= {"data_parallel_ranks": data_parallel_ranks}
            check_kv_events(opening.get("kv_events", ()), len(servers), data_parallel_ranks)
        else:
            given |= {"data_parallel_ranks": data_parallel_ranks} if data_parallel_ranks else {}
            if given:
                raise ValueError(f"{_shown(given)} given without --server, which it is for")
            opening = llm_arguments | ({"replicas": replicas} if replicas is not None else {})
            if max_running is not None:
                opening.setdefault("max_num_seqs", max_running)
            if endpoint := options.get("otlp_traces_endpoint"):
                opening.setdefault("otlp_traces_endpoint", endpoint)
            if model is not None:
                check_model(model)
        if output_path is not None:
            check_output(output_path)
            check_writable("--output", output_path)
        job_options = JobOptions(**options, request=_request_options(request))
        connection = connect(
            open_files(paths),
            engine=engine,
            options=job_options,
            on_error=on_error,
            image_folder=image_folder,
        )
    if job_options.checkpoint is not None:
        errors.print(f"answers are kept in {job_options.checkpoint}", style="dim", markup=False)
    is_terminal = command is None and sys.stdin.isatty()
    keeps_answers = is_terminal or job_options.checkpoint is not None
    shell = _Shell(connection, engine, console, errors, output_path, keeps_answers)
    try:
        if is_terminal:
            return shell.run_typed(read_statements(sys.stdin))
        if command is not None:
            return shell.run([command])
        if output_path is not None:
            # which statement is the last is known at the end
            return shell.run(read_statements(sys.stdin))
        return shell.run_piped(read_statements(sys.stdin))
    finally:
        connection.close()
        connection.duckdb_connection.close()
        engine.close()


def _of_servers(
    servers: Sequence[str],
    given: dict[str, Any],
    llm_arguments: dict[str, Any],
    max_running: int | None,
) -> dict[str, Any]:
    arguments = dict(given)
    variable = arguments.pop("api_key_env", None)
    over_http = arguments.get("api_key_over_http", False)
    keys = []
    for server in servers:
        check_address("--server", server)
        keys.append(key_from_environment(server, variable, over_http=over_http))
    addresses_of(servers)
    if len({key.value for key in keys}) > 1:
        raise ValueError(
            "servers that are sent different keys given: give those with the same, or name one "
            "with --api-key-env"
        )
    arguments["api_key"] = keys[0]
    if max_running is not None:
        arguments["max_running"] = max_running
    others = {name: value for name, value in llm_arguments.items() if name != "tokenizer"}
    if others:
        raise ValueError(
            f"{_shown(others)} given with --server: the server's engine has its own options"
        )
    return arguments | llm_arguments


def _shown(arguments: dict[str, Any]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in arguments)


def _request_options(given: dict[str, str | None]) -> RequestOptions:
    found: dict[str, Any] = {}
    for name, text in given.items():
        if text is None or name == "system_prompt":
            found[name] = text or ""
            continue
        try:
            found[name] = json.loads(text)
        except ValueError as error:
            raise ValueError(
                f"{_shown({name: text})} {text!r} given, expected an object of JSON: {error}"
            ) from None
    return RequestOptions(**found)


def _open(model: str | None, servers: Sequence[str], arguments: dict[str, Any]) -> Any:
    if servers:
        return open_engine(list(servers), model=model, **arguments)
    if model is None:
        raise ValueError("a statement calls llm(), but no model is given: give --model or --server")
    # read when vLLM is imported; the standard output is for rows
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    with interruptible_start():
        return open_engine(model, **arguments)


class _Shell:
    """
    Args:
        keeps_answers: whether those of an interrupted statement can be used again.
    """

    def __init__(
        self,
        connection: Connection,
        engine: Engine,
        console: Console,
        errors: Console,
        output: Path | None,
        keeps_answers: bool,
    ) -> None:
        self._connection = connection
        self._engine = engine
        self._console = console
        self._errors = errors
        self._output = output
        self._keeps_answers = keeps_answers

    def run(self, texts: Iterable[str]) -> int:
        """All statements; the rows of the last one go to the output. Returns the exit status: 0, 1
        if one failed, 130 if it was interrupted."""
        return self._status_of(partial(self._run_script, texts))

    def run_piped(self, texts: Iterable[str]) -> int:
        """Texts when they come, until one fails, without an output; returns as `run`."""
        for text in texts:
            status = self._status_of(partial(self._run_each, text))
            if status:
                return status
        return 0

    def run_typed(self, texts: Iterable[str]) -> int:
        """Texts when they come, also after one that failed; all rows go to the output; 0."""
        for text in texts:
            self._status_of(partial(self._run_each, text))
        return 0

    def _run_script(self, texts: Iterable[str]) -> None:
        statements = [each for text in texts for each in split(text)]
        place = None
        if self._output is not None:
            place = place_of_output(self._connection.duckdb_connection, statements)
        for number, each in enumerate(statements):
            self._run(each.text, self._output if number == place else None)

    def _run_each(self, text: str) -> None:
        for each in split(text):
            is_written = self._output is not None and gives_rows(
                self._connection.duckdb_connection, each
            )
            self._run(each.text, self._output if is_written else None)
            if is_written:
                note = f"rows are in {self._output}, in place of those before"
                self._errors.print(note, style="dim", markup=False, highlight=False)

    def _status_of(self, run: Callable[[], None]) -> int:
        try:
            run()
        except KeyboardInterrupt:
            return self._interrupted()
        except _FAILURES as error:
            if _is_interrupt(error):
                return self._interrupted()
            self._errors.print(f"error: {error}", style="red", markup=False, highlight=False)
            return 1
        return 0

    def _interrupted(self) -> int:
        self._engine.close()  # which has unfinished requests
        kept = "answers that came are kept; run the statement again to go on"
        lost = "answers that came are lost; give --checkpoint to keep them"
        self._errors.print(f"interrupted: {kept if self._keeps_answers else lost}")
        return INTERRUPTED

    def _run(self, text: str, output: Path | None) -> None:
        result = self._connection.sql(text)
        if result is None:
            return
        self._show(result, output)
        if result.num_lost:
            raise RuntimeError(
                f"{result.num_lost:,} of {result.num_lost:,} different rows have no answer"
            )

    def _show(self, result: Result, output: Path | None) -> None:
        if result.has_rows:
            if output is not None:
                write_relation(self._connection.duckdb_connection, result.relation, output)
            elif result.columns == ["explain_key", "explain_value"]:
                for _, text in result.fetchall():
                    self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                self._console.print(str(result.relation), markup=False, highlight=False,
                                    soft_wrap=True)  # fmt: skip
        if result.report.num_rows:
            self._errors.print(summary(result.report), style="dim", markup=False, highlight=False)
        for error in result.errors[:_ERRORS_SHOWN]:
            line = f"{error.call} of {row_text(error.fields)}: {error.error}"
            self._errors.print(line, style="red", markup=False, highlight=False)
        if len(result.errors) > _ERRORS_SHOWN:
            self._errors.print(f"and {len(result.errors) - _ERRORS_SHOWN:,} more with an error")


def summary(report: JobReport) -> str:
    """A line on what was asked and what it took."""
    rate = report.cached_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
    parts = [
        f"{report.num_rows:,} rows",
        f"{report.num_prompts:,} different",
        f"{report.num_known:,} known",
        f"{report.prompt_tokens:,} prompt tokens, {rate:.1%} from the prefix cache",
        f"{report.output_tokens:,} output tokens",
        f"{report.saved_tokens:,} tokens not asked",
        f"{report.seconds:.1f} s",
    ]
    if report.num_by_rules:
        parts.append(f"{report.num_by_rules:,} equal by rules")
    if report.num_errors:
        parts.append(f"{report.num_errors:,} errors")
    if report.num_cut:
        parts.append(f"{report.num_cut:,} answers were cut: give more max_tokens")
    return "; ".join(parts)


def _is_interrupt(error: Exception) -> bool:
    """Whether DuckDB made it of Ctrl-C, in a function of Python or in a query."""
    if isinstance(error, duckdb.InvalidInputException):
        return "while executing the UDF: KeyboardInterrupt" in str(error)
    return isinstance(error, RuntimeError) and str(error) == "Query interrupted"
