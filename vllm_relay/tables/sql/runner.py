# SPDX-License-Identifier: Apache-2.0
"""What SQL asks of jobs."""

from __future__ import annotations

from typing import Protocol

from vllm_relay.tables.jobs.estimates.estimate import Estimate, JobReport
from vllm_relay.tables.question import Question


class Runner(Protocol):
    """What of `GroupRunner` is used."""

    report: JobReport

    def answer(self, source: str, question: Question, target: str) -> None: ...

    def estimate(self, source: str, question: Question) -> Estimate: ...

    def answer_groups(self, source: str, question: Question, target: str) -> None: ...

    def estimate_groups(self, source: str, question: Question) -> Estimate: ...

    def tokens_per_prompt(self, source: str, question: Question) -> float: ...
