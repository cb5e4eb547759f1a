# SPDX-License-Identifier: Apache-2.0
"""What answers the calls of a query."""

from __future__ import annotations

from typing import Protocol

from vllm_relay.tables.question import Question
from vllm_relay.tables.sql.select_plan import PlannedCall


class Asker(Protocol):
    """What answers calls: a job, or an estimate of one.

    Attributes:
        is_bound: set where a call may be asked about fewer rows, after what others answer.
        reads_answers: set where rows hold answers of other SELECTs.
    """

    is_bound: bool
    reads_answers: bool

    def answer(self, source: str, call: PlannedCall, target: str) -> None:
        """As `JobRunner.answer`."""
        ...

    def cost_per_prompt(self, source: str, question: Question) -> float:
        """Tokens that a prompt takes, its answer included."""
        ...

    @property
    def filters(self) -> bool:
        """Whether answers are real, so that predicates can leave out rows."""
        ...
