# SPDX-License-Identifier: Apache-2.0
"""One SELECT with calls of llm(), taken apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlglot import exp

from vllm_relay.tables.question import Question
from vllm_relay.tables.sql.expressions import RESERVED, stage_names


@dataclass
class PlannedCall:
    """
    Attributes:
        name: of the stage's column of answers.
        text: of the call, for people.
        question: of every row.
        fields: their expressions over the stage, in the order of the question's.
        guards: per place of the call, the conditions without which it does not matter there.
    """

    name: str
    text: str
    question: Question
    fields: tuple[exp.Expr, ...]
    guards: list[list[exp.Expr]] = field(default_factory=list)

    @property
    def reads_answers(self) -> bool:
        """Whether a field holds the answer of another call."""
        prefix = f"{RESERVED}a"
        return any(name.startswith(prefix) for part in self.fields for name in stage_names(part))

    @property
    def error(self) -> str:
        """The stage's column of errors."""
        return f"{self.name}_error"


@dataclass(frozen=True)
class Predicate:
    """
    Attributes:
        condition: over the stage.
        calls: that it needs, in the order in which they can be answered.
    """

    condition: exp.Expr
    calls: tuple[str, ...]


@dataclass
class SelectPlan:
    """
    Attributes:
        stage: the SELECT whose rows the calls are about; its columns are what is needed later.
        calls: by name.
        predicates: conditions with calls, all of which a row has to pass.
        late_calls: asked of the rows that passed, in the order in which they can be answered.
        cut: offset and limit, where the result's rows are rows of the stage in their order and
            calls decide which; the last SELECT has none then.
        final: the SELECT over the last stage, which is named `STAGE`.
        bare_calls: position in the select list and name of calls that stand there alone.
        keeps_rows: each row of the result is one of the stage, without grouping.
    """

    stage: exp.Select
    calls: dict[str, PlannedCall]
    predicates: list[Predicate]
    late_calls: list[str]
    cut: tuple[int, int] | None
    final: exp.Select
    bare_calls: list[tuple[int, str]]
    keeps_rows: bool
