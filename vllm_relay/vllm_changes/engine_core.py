# SPDX-License-Identifier: Apache-2.0
"""What engine cores can be asked, what they do before requests and at the end, how they name
blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_relay.vllm_changes.wrap import wrap


def add_command(run: Callable[[Any, str, dict[str, Any]], dict[str, Any]]) -> None:
    """Give EngineCore the method ``relay_command(name, arguments)``, for call_utility: what
    ``run(engine_core, name, arguments)`` returns.

    Reason: collective_rpc reaches workers only, and a plugin has no other call to the scheduler.
    Remove when: EngineCore lets schedulers answer utility calls.
    """
    from vllm.v1.engine.core import EngineCore

    def relay_command(self: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return run(self, name, arguments)

    EngineCore.relay_command = relay_command


def call_before_requests(
    before_request: Callable[[Any], None], after_reset: Callable[[Any], None]
) -> None:
    """Call ``before_request(engine_core)`` before each request is added, and
    ``after_reset(engine_core)`` when the prefix cache was reset.

    Reason: the scheduler has no way to the workers, whom it has to ask before its first request.
    Remove when: schedulers of plug-ins can call workers.
    """
    from vllm.v1.engine.core import EngineCore

    def make_add_request(original: Callable[..., Any]) -> Callable[..., Any]:
        def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
            before_request(self)
            return original(self, *args, **kwargs)

        return add_request

    def make_reset(original: Callable[..., Any]) -> Callable[..., Any]:
        def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
            done = original(self, *args, **kwargs)
            after_reset(self)
            return done

        return reset_prefix_cache

    wrap(EngineCore, "add_request", make_add_request)
    wrap(EngineCore, "reset_prefix_cache", make_reset)


def call_before_end(call: Callable[[Any], None]) -> None:
    """Call ``call(engine_core)`` when an engine core ends, before all else that this takes.

    Reason: schedulers are told last, when the workers have ended; a front end that has waited too
    long for that kills the process before.
    Remove when: vLLM tells schedulers first.
    """
    from vllm.v1.engine.core import EngineCore

    def make_shutdown(original: Callable[..., Any]) -> Callable[..., Any]:
        def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
            call(self)
            return original(self, *args, **kwargs)

        return shutdown

    wrap(EngineCore, "shutdown", make_shutdown)


def hash_blocks_by(make_hasher: Callable[[Any, int, Any], Any]) -> None:
    """Let engine cores hash the blocks of requests by
    ``make_hasher(hasher of vLLM, hash_block_size, hash_function)``.

    Reason: vLLM chains each block to all before it, and those of a prompt module depend on nothing
    that stands before them.
    Called before an engine core has a scheduler: it makes its hasher later.
    Remove when: requests can bring a hasher.
    """
    from vllm.v1.engine import core

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_request_block_hasher(
            hash_block_size: int, hash_function: Any, *args: Any, **kwargs: Any
        ) -> Any:
            chained = original(hash_block_size, hash_function, *args, **kwargs)
            return make_hasher(chained, hash_block_size, hash_function)

        return get_request_block_hasher

    wrap(core, "get_request_block_hasher", make)
