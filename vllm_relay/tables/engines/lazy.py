# SPDX-License-Identifier: Apache-2.0
"""An engine that is opened when it is first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from vllm_relay.tables.engines.base import (
    Completions,
    Engine,
    Prompt,
    PromptShape,
    generate_scored,
    images_refusal,
    modules_refusal,
)
from vllm_relay.tables.engines.opening import is_engine, open_engine
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.question import Question


def engine_of(given: Any, cleanup: ExitStack, replicas: int | None = None) -> Engine:
    """An engine as it is, or one that is opened when it is needed, see `open_engine`.

    Args:
        cleanup: closes what is opened here.
    """
    if is_engine(given) and replicas is None:
        return given
    opened = LazyEngine(lambda: open_engine(given, replicas=replicas))
    cleanup.callback(opened.close)
    return opened


class LazyEngine:
    """An `Engine`: statements that do not ask need none.

    Args:
        open_engine: is called when an engine is needed and there is none.
    """

    def __init__(self, open_engine: Callable[[], Engine]) -> None:
        self._open_engine = open_engine

    @cached_property
    def _engine(self) -> Engine:
        return self._open_engine()

    def open(self) -> None:
        """Open it now."""
        _ = self._engine

    @property
    def identity(self) -> str:
        return self._engine.identity

    @property
    def tokenizer(self) -> Any | None:
        return self._engine.tokenizer

    @property
    def cache(self) -> BlockCache | None:
        return self._engine.cache

    @property
    def max_model_len(self) -> int | None:
        return self._engine.max_model_len

    @property
    def modules_refusal(self) -> str | None:
        """See `Engine`."""
        return modules_refusal(self._engine)

    @property
    def images_refusal(self) -> str | None:
        """See `Engine`."""
        return images_refusal(self._engine)

    @property
    def model_name(self) -> str:
        """See `Engine`."""
        return getattr(self._engine, "model_name", "")

    @property
    def reasons(self) -> bool:
        """See `Engine`."""
        return getattr(self._engine, "reasons", False)

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        """See `Engine`."""
        return self._engine.generate(prompts, question)

    def generate_scored(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        """See `Engine`."""
        return generate_scored(self._engine, prompts, question)

    def max_answer_tokens(self, question: Question) -> int:
        """See `Engine`."""
        return self._engine.max_answer_tokens(question)

    def prompts_per_s(self, shape: PromptShape, question: Question) -> float | None:
        """See `Engine`."""
        return self._engine.prompts_per_s(shape, question)

    def close(self) -> None:
        """Close the engine, if it was opened; another one is opened when it is needed."""
        if "_engine" in vars(self):
            self._engine.close()
            del self._engine
