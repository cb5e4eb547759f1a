# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay calibrate`: measures what a step of an engine takes, for `vllm-relay predict`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_relay.arguments import check_model, check_writable, reading_command_line
from vllm_relay.prefix_cache.predict.step_costs import fit_costs, write_costs
from vllm_relay.progress import showing_progress
from vllm_relay.tables.engines.addresses import addresses_of, check_address, key_from_environment
from vllm_relay.tables.engines.opening import open_engine
from vllm_relay.tables.engines.step_times import sample_steps
from vllm_relay.tables.shell.engine_arguments import split_arguments
from vllm_relay.vllm_changes.engine_start import interruptible_start


def run_calibrate(
    engine: str,
    arguments: Sequence[str],
    *,
    output_path: Path,
    api_key_env: str | None = None,
    console: Console | None = None,
) -> int:
    """Measure, show and write.

    Args:
        engine: a model, or the address of a server.
        arguments: options of vLLM's engine, for a model.
        output_path: see `write_costs`.
        api_key_env: the variable with the server's key.

    Returns:
        The exit status: 0, or 1 if something fails; the reason is printed.

    Raises:
        CommandLineError: an argument is refused.
    """
    console = console or Console(soft_wrap=True)
    with reading_command_line():
        check_writable("--output", output_path)
        options = _options(engine, arguments, api_key_env)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
    try:
        with (
            showing_progress("starting") as show,
            closing(_open(engine, options)) as opened,
        ):
            samples = sample_steps(opened, show)
        costs = fit_costs(samples)
        write_costs(output_path, costs)
    except (ValueError, RuntimeError, OSError) as error:
        console.print(f"calibrate: {error}", style="red", markup=False, highlight=False)
        return 1
    off = max(
        abs((costs.step_s * each.steps + costs.token_s * each.tokens) / each.seconds - 1)
        for each in samples
        if each.steps > 1
    )
    console.print(
        f"a step takes {1e3 * costs.step_s:.3g} ms, a token adds {1e6 * costs.token_s:.3g} us; "
        f"answers took {off:.0%} more or less than that\nwritten to {output_path}",
        highlight=False,
    )
    return 0


def _options(engine: str, arguments: Sequence[str], api_key_env: str | None) -> dict[str, Any]:
    """What the engine is opened with."""
    paths, options = split_arguments(arguments)
    if paths:
        raise ValueError(f"{paths[0]} given behind {engine}, expected one model or address")
    if addresses_of(engine):
        if options:
            raise ValueError(f"options of an engine given with {engine}, which has its own")
        check_address("calibrate", engine)
        return {"api_key": key_from_environment(engine, api_key_env)}
    if api_key_env is not None:
        raise ValueError(f"--api-key-env {api_key_env} given, which is for servers")
    check_model(engine, "calibrate")
    return options


def _open(engine: str, options: dict[str, Any]) -> Any:
    if addresses_of(engine):
        return open_engine(engine, **options)
    with interruptible_start():
        return open_engine(engine, **options)
