# SPDX-License-Identifier: Apache-2.0
"""vLLM's own server as a replica: its application, asked by messages in place of connections."""

from __future__ import annotations

import io
import json
import logging
import os
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, redirect_stderr
from types import SimpleNamespace
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.exceptions import VLLMValidationError
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

from vllm_relay.cluster.ray.asked import CACHE_TOKENS, application_for
from vllm_relay.cluster.ray.tunnel import HttpAnswer, HttpRequest, answer_of

logger = logging.getLogger("vllm.relay")


def serve_arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as `vllm serve` takes them: ``max_model_len=512`` is ``--max-model-len 512``,
    ``enforce_eager=true`` is ``--enforce-eager``, and false ``--no-enforce-eager``; a list follows
    its name, item by item, and None is left out. What is behind a dot is a key in an option's
    JSON, and has a value in any case."""
    found = []
    for name, value in options.items():
        option, dot, key = name.partition(".")
        option = option.replace("_", "-") + dot + key
        if value is None:
            continue
        if isinstance(value, list) and not key:
            found += [f"--{option}", *map(_text, value)]
        elif (text := _text(value)).lower() in ("true", "false") and not key:
            found.append(f"--{option}" if text.lower() == "true" else f"--no-{option}")
        else:
            found += [f"--{option}", text]
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def parsed(arguments: list[str]) -> Namespace:
    """What vLLM makes of them.

    Raises:
        ValueError: it refuses them.
    """
    serve = ServeSubcommand()
    parser = serve.subparser_init(FlexibleArgumentParser().add_subparsers())
    refusal = io.StringIO()
    try:
        with redirect_stderr(refusal):
            found = parser.parse_args(arguments)
            serve.validate(found)
            if found.tool_parser_plugin:
                ToolParserManager.import_tool_parser(found.tool_parser_plugin)
            if found.reasoning_parser_plugin:
                ReasoningParserManager.import_reasoning_parser(found.reasoning_parser_plugin)
            if found.enable_auto_tool_choice:
                ToolParserManager.get_tool_parser(found.tool_call_parser)
            for name in (found.reasoning_parser, found.structured_outputs_config.reasoning_parser):
                if name:
                    ReasoningParserManager.get_reasoning_parser(name)
    except (SystemExit, OSError, LookupError, TypeError, ValueError, VLLMValidationError) as error:
        reason = refusal.getvalue().strip().rpartition("error: ")[2] or repr(error)
        raise ValueError(f"{' '.join(arguments)} given, which vLLM refuses: {reason}") from error
    return found


class VllmReplica:
    """A deployment: vLLM's OpenAI-compatible server without its socket.

    Args:
        arguments: of `vllm serve`.
    """

    _engine: Any = None
    _lifespan: Any = None

    # Ray Serve waits for it
    async def __init__(self, arguments: list[str]) -> None:  # type: ignore[misc]
        given = parsed(arguments)
        engine_arguments = AsyncEngineArgs.from_cli_args(given)
        self._engine = AsyncLLM.from_vllm_config(
            engine_arguments.create_engine_config(UsageContext.OPENAI_API_SERVER),
            stat_loggers=[RayPrometheusStatLogger],
            enable_log_requests=engine_arguments.enable_log_requests,
            disable_log_stats=engine_arguments.disable_log_stats,
        )
        await self._engine.reset_mm_cache()
        tasks = await self._engine.get_supported_tasks()
        self._app = build_app(given, tasks, self._engine.model_config)
        await init_app_state(self._engine, self._app.state, given, tasks)
        # vLLM tells a server to end when its engine has failed
        self._app.state.server = SimpleNamespace(should_exit=False)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()

    async def ask(self, request: HttpRequest, to: str | None) -> AsyncIterator[HttpAnswer | bytes]:
        """See `answer_of`.

        Args:
            to: the id of the replica that is meant; None: any.
        """
        try:
            async with aclosing(answer_of(application_for(to, self._app), request)) as answer:
                async for each in answer:
                    self._end_if_dead()
                    yield each
        except Exception:
            self._end_if_dead()
            raise

    def record_replica_metadata(self) -> dict[str, Any]:
        """For the router."""
        cache = self._engine.vllm_config.cache_config
        return {CACHE_TOKENS: (cache.num_gpu_blocks or 0) * cache.block_size or None}

    async def check_health(self) -> None:
        """For Ray Serve."""
        self._end_if_dead()

    async def __del__(self) -> None:
        if self._lifespan is not None:
            await self._lifespan.__aexit__(None, None, None)
        if self._engine is not None:
            self._engine.shutdown()

    def _end_if_dead(self) -> None:
        """Ray Serve starts another one, and what this one has not answered is asked elsewhere."""
        if self._engine.errored:
            logger.error("vllm-relay: the engine of this replica has failed: the replica ends")
            os._exit(1)
