# SPDX-License-Identifier: Apache-2.0
"""What answers the prompts of a table: vLLM in this process, or a server."""

from vllm_relay.tables.engines.base import Completion, Engine, EngineError, Prompt

__all__ = ["Completion", "Engine", "EngineError", "Prompt"]
