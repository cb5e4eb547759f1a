# SPDX-License-Identifier: Apache-2.0
"""The engine that answers questions to a long document, seen from outside its process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_process import EngineProcess


@dataclass(frozen=True)
class LongAnswer:
    """What one engine did with one request that it had for itself.

    Attributes:
        token_ids: what it answered.
        prompt_s: until the first token.
        tokens_s: from each token to the next.
        prompt_kv_blocks: the most that the request held on the device until its first token.
        decode_kv_blocks: the most that it held from its second token on.
        kv_block_bytes: size of one of them, all layers together.
    """

    token_ids: list[int]
    prompt_s: float
    tokens_s: list[float]
    prompt_kv_blocks: int
    decode_kv_blocks: int
    kv_block_bytes: int


class LongEngine(EngineProcess):
    """An engine of `engine_main`."""

    def __init__(self, name: str, settings: EngineSettings, log_path: Path) -> None:
        super().__init__(name, "vllm_relay.demo.long_contexts.engine_main", settings, log_path)

    def answer(self, prompt_token_ids: list[int], output_tokens: int) -> LongAnswer:
        """Continue the prompt greedily by exactly `output_tokens`, 3 or more.

        Raises:
            EngineError: the engine failed; the message ends with its log.
        """
        self.order(prompt_token_ids, output_tokens)
        return self.wait()
