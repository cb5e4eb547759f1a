# SPDX-License-Identifier: Apache-2.0
"""A document in parts, and questions to some of the parts, for the demo of prompt modules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_relay.demo.long_contexts.workload import chronicle_workload
from vllm_relay.modules.markup.schema import Module, Schema

SCHEMA_NAME = "chronicle"


@dataclass(frozen=True)
class PartsQuestion:
    """A question to some parts, one of which has the answer.

    Attributes:
        parts: by number, in the order in which they are given.
    """

    parts: list[int]
    text: str
    answer: str

    @property
    def prompt(self) -> str:
        """In PML."""
        imports = "".join(f"<part{number}/>" for number in self.parts)
        return f'<prompt schema="{SCHEMA_NAME}">{imports} {self.text}</prompt>'


@dataclass(frozen=True)
class PartsWorkload:
    parts: list[str]
    questions: list[PartsQuestion]

    @property
    def schema(self) -> Schema:
        modules = [Module(f"part{number}", text) for number, text in enumerate(self.parts)]
        return Schema(SCHEMA_NAME, *modules)


def parts_workload(
    *,
    num_parts: int,
    part_tokens: int,
    parts_per_question: int,
    num_questions: int,
    output_tokens: int,
    seed: int,
) -> PartsWorkload:
    """A chronicle cut between its entries, and questions with known answers.

    Raises:
        ValueError: a number is out of its range.
    """
    if not 1 <= parts_per_question <= num_parts:
        raise ValueError(
            f"parts_per_question is {parts_per_question}, expected 1 to num_parts={num_parts}"
        )
    chronicle = chronicle_workload(
        document_tokens=num_parts * part_tokens,
        num_questions=num_questions,
        output_tokens=output_tokens,
        seed=seed,
    )
    lines = chronicle.system_prompt.split("\n")
    parts = ["\n".join(each) + "\n" for each in np.array_split(np.array(lines, object), num_parts)]
    rng = np.random.default_rng(seed)
    questions = []
    for question in chronicle.questions:
        key = " ".join(question.text.rstrip("?.").split()[-2:])
        [right] = [number for number, part in enumerate(parts) if f"{key}:" in part]
        others = [number for number in range(num_parts) if number != right]
        chosen = [right, *rng.permutation(others)[: parts_per_question - 1].tolist()]
        assert question.continuation is not None
        questions.append(
            PartsQuestion(rng.permutation(chosen).tolist(), question.text, question.continuation)
        )
    return PartsWorkload(parts, questions)
