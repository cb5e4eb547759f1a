# SPDX-License-Identifier: Apache-2.0
"""Whole engines on a GPU, each in a process of its own; several are alive at the same time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_relay.demo.engine_process import EngineError, EngineProcess

STOCK, RELAY = "FLASH_ATTN", "RELAY"


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with.

    Attributes:
        arguments: of vLLM's `LLM`.
        environment: variables that are set before vLLM is imported.
    """

    model: str
    arguments: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answers:
    """Of one order.

    Attributes:
        token_ids: that followed each prompt.
        logprobs: of these, if they were asked for.
        counters: increases of relay's metrics, where the engine keeps any.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    took_s: float
    counters: dict[str, int]


class GpuEngine(EngineProcess):
    """An engine of `engine_main`.

    Args:
        folder: for its log.
        patience_s: for it to start, and for each answer.
    """

    def __init__(
        self, name: str, settings: EngineSettings, folder: Path, *, patience_s: float
    ) -> None:
        self.patience_s = patience_s
        file_name = "".join(letter if letter.isalnum() else "_" for letter in name)
        super().__init__(name, "benchmarks.cuda.engine_main", settings, folder / f"{file_name}.log")

    def wait(self) -> Any:
        """What the oldest order returned.

        Raises:
            EngineError: the engine failed, or says nothing; the message ends with its log.
        """
        if not self._connection.poll(self.patience_s):
            self.stop(timeout_s=0.0)
            log = self.log_path.read_text(errors="replace")[-2000:]
            raise EngineError(
                f"{self.name} said nothing for {self.patience_s:.0f} s; the end of its log:\n{log}"
            )
        return super().wait()

    def generate(
        self, prompts: list[list[int]], output_tokens: int, *, logprobs: bool = False
    ) -> Answers:
        """Continues all prompts at once, greedily, by exactly so many tokens.

        Raises:
            EngineError: the engine failed; the message ends with its log.
        """
        self.order("generate", prompts, output_tokens, logprobs)
        answers: Answers = self.wait()
        return answers

    def kernel_shares(self, prompts: list[list[int]], output_tokens: int) -> dict[str, float]:
        """By name, how much of the time in which outputs are decoded kernels run on the GPU.

        Raises:
            EngineError: the engine failed; the message ends with its log.
        """
        self.order("profile", prompts, output_tokens)
        found: dict[str, float] = self.wait()
        return found
