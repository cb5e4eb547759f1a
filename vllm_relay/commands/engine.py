# SPDX-License-Identifier: Apache-2.0
"""Commands of the engine core, and how front ends reach them: arguments and results are of plain
types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_relay.commands.errors import CommandError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Commands = Mapping[str, Callable[..., Any]]
"""By name; each is called with the engine core and its arguments."""


def run(
    commands: Commands, engine_core: Any, name: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Run a command in the engine core.

    Returns:
        ``{"result": ...}``, or ``{"error": {"status": ..., "message": ...}}`` for a CommandError.

    Raises:
        ValueError: there is no command of this name.
    """
    command = commands.get(name)
    if command is None:
        raise ValueError(
            f"command {name!r} was given, which this version of vllm-relay does not know"
        )
    try:
        return {"result": command(engine_core, **arguments)}
    except CommandError as error:
        return {"error": {"status": error.status, "message": str(error)}}


def call(engine: Any, name: str, arguments: dict[str, Any]) -> Any:
    """What the command of this name returns in the engine core of an LLMEngine.

    Raises:
        CommandError: the command's.
    """
    from vllm.v1.engine.core_client import InprocClient

    client = engine.engine_core
    if isinstance(client, InprocClient):
        return result_of(client.engine_core.relay_command(name, arguments))
    return result_of(client.call_utility("relay_command", name, arguments))


async def call_async(engine: Any, name: str, arguments: dict[str, Any]) -> Any:
    """:func:`call` for an AsyncLLM; all its ranks run the command, and the first answers."""
    return result_of(await engine.engine_core.call_utility_async("relay_command", name, arguments))


async def call_ranks_async(
    engine: Any, name: str, arguments: dict[str, Any]
) -> dict[int, Any | CommandError]:
    """What the command returns, or its error, in each data-parallel rank of an AsyncLLM."""
    client = engine.engine_core
    answers = await client.call_utility_all_async("relay_command", name, arguments)
    return dict(zip(client.engine_ranks_managed, map(_result_or_error, answers), strict=True))


def result_of(answer: dict[str, Any]) -> Any:
    """The result in what :func:`run` returned.

    Raises:
        CommandError: the one the command raised.
    """
    result = _result_or_error(answer)
    if isinstance(result, CommandError):
        raise result
    return result


def _result_or_error(answer: dict[str, Any]) -> Any | CommandError:
    return CommandError(**answer["error"]) if "error" in answer else answer["result"]


def check_one_engine(vllm_config: VllmConfig, what: str) -> None:
    """Refuse what one of several engines would know alone.

    Raises:
        CommandError: 501, with `what` cannot be done.
    """
    engines = vllm_config.parallel_config.data_parallel_size
    if engines > 1:
        raise CommandError(501, f"{what} in one engine only, but --data-parallel-size is {engines}")
