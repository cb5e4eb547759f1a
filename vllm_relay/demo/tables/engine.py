# SPDX-License-Identifier: Apache-2.0
"""The engine that both ways of asking a table share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_process import EngineProcess
from vllm_relay.tables.question import Question

Way = Literal["row_by_row", "llm_map", "replicas"]

BLOCK_SIZE_TOKENS = 32
NUM_BLOCKS = 400
"""Of the KV cache, which holds a part of the table only, as that of a GPU does of a large table."""


@dataclass(frozen=True)
class TableAnswers:
    """What one way of asking did with one question.

    Attributes:
        texts: an answer for each row; None where there is none.
        prompts: that ran.
        prompt_tokens, cached_tokens, output_tokens: of these.
        seconds: of the whole job.
        planning_seconds: of these, all but waiting for the engine.
    """

    texts: list[str | None]
    prompts: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    planning_seconds: float


@dataclass(frozen=True)
class ReplicaSettings(EngineSettings):
    """So many engines, all with these settings."""

    num_replicas: int


class TablesEngine(EngineProcess):
    """An engine of `engine_main`; of `replicas_main` if there are replicas."""

    def __init__(self, name: str, settings: EngineSettings, log_path: Path) -> None:
        main = "replicas_main" if isinstance(settings, ReplicaSettings) else "engine_main"
        super().__init__(name, f"vllm_relay.demo.tables.{main}", settings, log_path)

    def ask(self, way: Way, columns: dict[str, list[str]], question: Question) -> TableAnswers:
        """Ask a question of every row, beginning with an empty prefix cache.

        Raises:
            EngineError: the engine failed; the message ends with its log.
        """
        self.order(way, columns, question)
        return self.wait()
