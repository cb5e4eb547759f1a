# SPDX-License-Identifier: Apache-2.0
"""The engine that answers questions to some modules, seen from outside its process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_process import EngineProcess

BLOCK_SIZE_TOKENS = 32


@dataclass(frozen=True)
class ModulesAnswer:
    """What one engine did with one request that it had for itself.

    Attributes:
        first_token_s: from the request to its first token.
        prompt_tokens, cached_tokens: of its prompt, and those of them that were not computed.
    """

    token_ids: list[int]
    first_token_s: float
    prompt_tokens: int
    cached_tokens: int


class ModulesEngine(EngineProcess):
    """An engine of `engine_main`."""

    def __init__(self, name: str, settings: EngineSettings, log_path: Path) -> None:
        super().__init__(name, "vllm_relay.demo.modules.engine_main", settings, log_path)

    def answer(
        self, prompt_token_ids: list[int], extra_args: dict[str, Any] | None, output_tokens: int
    ) -> ModulesAnswer:
        """Continue the prompt greedily by exactly `output_tokens`.

        Raises:
            EngineError: the engine failed; the message ends with its log.
        """
        self.order(prompt_token_ids, extra_args, output_tokens)
        return self.wait()
