# SPDX-License-Identifier: Apache-2.0
"""What a job is expected to take, and what it took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Estimate:
    """
    Attributes:
        num_rows: of the table.
        num_prompts: distinct ones.
        num_known: prompts whose answer is in the checkpoint.
        prompt_tokens: of the prompts that will run.
        cached_tokens: of these, found in the prefix cache; None if the cache is not known.
        output_tokens: of their answers, about.
        order: the name of the chosen order.
        seconds: about; None if the engine's speed is not known.
        tokens_are_exact: whether prompt tokens were counted with the model's tokenizer.
        num_refused: prompts that are too long for the engine.
        num_modular: prompts with modules; these are cached for all prompts but the first.
        warning: why answers may be cut; "" if that is not likely.
    """

    num_rows: int
    num_prompts: int
    num_known: int
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    order: str
    seconds: float | None
    tokens_are_exact: bool
    num_refused: int = 0
    num_modular: int = 0
    warning: str = ""


@dataclass
class JobReport:
    """What was done; one for all questions of a query, added up.

    Attributes:
        num_rows: of the sources.
        num_prompts: distinct ones, as far as the jobs came.
        num_known: of them, whose answer was in the checkpoint.
        num_by_rules: distinct rows that were not asked about only because rules make them equal to
            others.
        num_errors: rows of the sources that have an error.
        num_cut: of them, whose answer ended at its last token.
        num_null: distinct rows that were not asked about because all their fields are NULL.
        prompt_tokens: of the prompts that ran.
        cached_tokens: of these, found in the prefix cache.
        output_tokens: of the answers.
        saved_tokens: of prompts that did not run, because they are equal to others or known, and
            of their answers.
        seconds: of the whole.
        waiting_seconds: of these, for the engine, while nothing was planned.
    """

    num_rows: int = 0
    num_prompts: int = 0
    num_known: int = 0
    num_by_rules: int = 0
    num_errors: int = 0
    num_cut: int = 0
    num_null: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    saved_tokens: int = 0
    seconds: float = 0.0
    waiting_seconds: float = 0.0

    @property
    def planning_seconds(self) -> float:
        """All but waiting for the engine."""
        return self.seconds - self.waiting_seconds

    def since(self, before: JobReport) -> JobReport:
        """What was added to a copy that was made before."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return JobReport(**{name: found[name] - getattr(before, name) for name in found})

    def add(self, other: JobReport) -> None:
        """What another job took."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """What is done within counts among the seconds."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began_s
