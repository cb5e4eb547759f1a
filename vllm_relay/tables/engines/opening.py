# SPDX-License-Identifier: Apache-2.0
"""An engine from what there is: an LLM, a server's address or a model."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllm_relay.tables.engines.base import Engine

# its other attributes may open it
_ENGINE_METHODS = ("generate", "max_answer_tokens", "prompts_per_s", "close")

_SCHEMES = ("http://", "https://")
_HOST_AND_PORT = re.compile(r"[^/\s]+:\d+(/.*)?")


def is_engine(value: Any) -> bool:
    """Whether a value is an `Engine`, as far as its methods tell."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in _ENGINE_METHODS)


def open_engine(engine: Any, **arguments: Any) -> Engine:
    """
    Args:
        engine: an `Engine`, which is given back; a ``vllm.LLM``; the address of a server with
            OpenAI's API, "http://..." or "https://..."; or a model, a folder or hub id, which is
            started in this process with prefix caching, and with relay where that can serve it.
        arguments: of a server, see `ServerEngine`, or of a model, those of ``vllm.LLM``.

    Returns:
        An engine. Its `close` ends a model that was started here, and leaves an LLM alone.

    Raises:
        TypeError: `engine` is nothing of these.
        ValueError: there are arguments without effect, or the model or the server refuses them.
        EngineError: the server does not answer.
    """
    if isinstance(engine, (str, Path)) and not str(engine).strip():
        raise ValueError(
            "an empty engine was given, expected a model or a server's address, http://..."
        )
    if isinstance(engine, str) and _is_address(engine):
        from vllm_relay.tables.engines.server.engine import ServerEngine

        return ServerEngine(engine, **arguments)
    if isinstance(engine, (str, Path)):
        _check_model(str(engine), arguments)
        from vllm_relay.tables.engines.started import start_engine

        return start_engine(str(engine), **arguments)
    if arguments:
        raise ValueError(
            f"{sorted(arguments)} given with a {type(engine).__name__}: they are for a model or a "
            f"server that is opened here; leave them out"
        )
    if _is_llm(engine):
        from vllm_relay.tables.engines.in_process import InProcessEngine

        return InProcessEngine(engine)
    if is_engine(engine):
        return engine
    raise TypeError(
        f"engine {engine!r} given, expected a model (a folder or hub id), a server's address "
        f"(http://...), a vllm.LLM or an Engine"
    )


def check_address(name: str, address: str) -> None:
    """
    Args:
        name: of the argument, for the message.
        address: of a server.

    Raises:
        ValueError: it is none.
    """
    given = f"{name} {address!r} given, expected an address that begins with http:// or https://"
    if not _is_address(address):
        better = f"http://{address}" if _HOST_AND_PORT.fullmatch(address) else "http://host:8000"
        raise ValueError(f"{given}: give {better}")
    try:
        parts = urlsplit(address)
        is_whole = bool(parts.hostname) and parts.port != 0 and not parts.query
    except ValueError:
        is_whole = False
    if not is_whole:
        raise ValueError(f"{given} and a host, as in http://localhost:8000")


def _is_address(text: str) -> bool:
    return text.lower().startswith(_SCHEMES)


def _check_model(model: str, arguments: dict[str, Any]) -> None:
    """Refuse what is a server's address but for its beginning."""
    is_address = _HOST_AND_PORT.fullmatch(model) and not Path(model).exists()
    if is_address or "model" in arguments:
        raise ValueError(
            f"engine {model!r} given"
            + (f" with model={arguments['model']!r}" if "model" in arguments else "")
            + f", expected a model alone, or a server's address, which begins with http:// or "
            f"https://: for a server give {f'http://{model}'!r}"
        )


def _is_llm(value: Any) -> bool:
    # whoever has an LLM has imported vLLM
    vllm = sys.modules.get("vllm")
    return vllm is not None and isinstance(value, vllm.LLM)
