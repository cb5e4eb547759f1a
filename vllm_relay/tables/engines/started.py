# SPDX-License-Identifier: Apache-2.0
"""A model that is started in this process to answer prompts of tables."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from vllm import LLM

from vllm_relay.tables.engines.in_process import InProcessEngine
from vllm_relay.tables.texts import shortened

logger = logging.getLogger("vllm.relay")


class StartedEngine(InProcessEngine):
    """An `InProcessEngine` that owns its LLM."""

    def close(self) -> None:
        """End the model; its memory is free again. More calls do nothing."""
        self.llm.llm_engine.engine_core.shutdown()


def start_engine(model: str, **arguments: Any) -> StartedEngine:
    """
    Args:
        model: a folder or hub id.
        arguments: of ``vllm.LLM``; they win over relay's attention backend and scheduler.

    Raises:
        ValueError: vLLM refuses the model or an argument, or the model is not there.
    """
    try:
        return _start(model, arguments)
    except OSError as error:
        if Path(model).is_dir():
            raise
        # of the hub, which has other classes in each version
        reason = shortened(" ".join(str(error).split()))
        raise ValueError(
            f"model {model!r} cannot be loaded ({reason}): give the folder of a Hugging Face "
            f"model, or the hub id of one that was downloaded or can be from here"
        ) from error


def _start(model: str, arguments: dict[str, Any]) -> StartedEngine:
    chosen = {"enable_prefix_caching": True, "attention_backend": "relay", **arguments}
    if arguments.get("otlp_traces_endpoint"):
        # vLLM's spans hold its statistics
        chosen.setdefault("disable_log_stats", False)
    if "scheduler_cls" not in arguments:
        given = arguments.get("additional_config") or {}
        chosen["additional_config"] = {"relay": {"scheduler": True}, **given}
    try:
        return StartedEngine(LLM(model, **chosen))
    except ValueError as error:
        refusal = _refusal(error)
        if refusal is None or "attention_backend" in arguments:
            raise
    logger.warning("vllm-relay: %s; %s starts with vLLM's own attention backend", refusal, model)
    del chosen["attention_backend"]
    return StartedEngine(LLM(model, **chosen))


def _refusal(error: ValueError) -> str | None:
    """Why relay cannot serve the model; None if it can, as far as the error tells."""
    # vLLM's configurations wrap the message of a RelayUnsupportedError in one of pydantic
    found = re.search(r"relay cannot serve .*?(?= \[type=|$)", str(error), re.MULTILINE)
    return found and found[0]
