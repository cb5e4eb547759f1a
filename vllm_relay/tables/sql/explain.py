# SPDX-License-Identifier: Apache-2.0
"""What a query with llm() would take: its calls are estimated, none is asked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import duckdb

from vllm_relay.tables.identifiers import ANSWER, ERROR, literal, quoted
from vllm_relay.tables.jobs.estimate import Estimate
from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import Question
from vllm_relay.tables.sql.expressions import sql_of
from vllm_relay.tables.sql.predicates import MIN_SAMPLED_ROWS, SAMPLE_ROWS
from vllm_relay.tables.sql.runner import Runner
from vllm_relay.tables.sql.select_plan import PlannedCall, SelectPlan


@dataclass(frozen=True)
class CallEstimate:
    """
    Attributes:
        call: its text.
        estimate: of its job.
        is_bound: predicates that ask the model may leave out rows of it.
    """

    call: str
    estimate: Estimate
    is_bound: bool


@dataclass(frozen=True)
class Explanation:
    """
    Attributes:
        calls: in the order in which they would be asked.
        before: the query as it was given.
        steps: what is done instead, a line each.
    """

    calls: list[CallEstimate]
    before: str
    steps: list[str]

    @property
    def num_rows(self) -> int:
        return sum(call.estimate.num_rows for call in self.calls)

    @property
    def num_tokens(self) -> int:
        """Of the prompts that would run, and of their answers."""
        return sum(call.estimate.prompt_tokens + call.estimate.output_tokens for call in self.calls)

    @property
    def seconds(self) -> float | None:
        """Of all calls; None if the speed of the engine is not known."""
        known = [call.estimate.seconds for call in self.calls]
        return sum(second for second in known if second is not None) if None not in known else None

    def __str__(self) -> str:
        lines: list[str] = []
        for number, call in enumerate(self.calls, 1):
            lines += [f"call {number}: {call.call}", *_estimate_lines(call)]
        bound = "at most " if any(call.is_bound for call in self.calls) else ""
        seconds = "" if self.seconds is None else f", about {self.seconds:.1f} s"
        lines.append(
            f"total: {bound}{self.num_rows:,} rows, {bound}{self.num_tokens:,} tokens{seconds}"
        )
        lines += ["", "as given:", _indented(self.before), "", "as run:"]
        lines += [_indented(step) for step in self.steps]
        return "\n".join(lines)


def _estimate_lines(call: CallEstimate) -> list[str]:
    found = call.estimate
    bound = "at most " if call.is_bound else ""
    exact = "" if found.tokens_are_exact else "about "
    cached = "not known" if found.cached_tokens is None else f"{found.cached_tokens:,}"
    seconds = "not known" if found.seconds is None else f"about {found.seconds:.1f}"
    return [
        f"  rows:           {bound}{found.num_rows:,}",
        f"  prompts:        {bound}{found.num_prompts:,} different, {found.num_known:,} known",
        f"  prompt tokens:  {bound}{exact}{found.prompt_tokens:,}, of which cached: {cached}",
        f"  output tokens:  about {found.output_tokens:,}",
        f"  order:          {found.order}",
        f"  seconds:        {seconds}",
        *([f"  warning:        {found.warning}"] if found.warning else []),
    ]


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


@dataclass
class EstimateAsker:
    """Estimates calls, and answers them with something of the right type.

    Predicates that ask leave out no rows then, so that numbers of rows are upper bounds. Tokens of
    prompts that hold answers are not exact.
    """

    connection: duckdb.DuckDBPyConnection
    runner: Runner
    calls: list[CallEstimate] = field(default_factory=list)
    is_bound: bool = False
    reads_answers: bool = False

    filters = False

    def answer(self, source: str, call: PlannedCall, target: str) -> None:
        estimate = self.runner.estimate(source, call.question)
        if self.reads_answers or call.reads_answers:
            estimate = replace(estimate, tokens_are_exact=False)
        self.calls.append(CallEstimate(call.text, estimate, self.is_bound))
        fields = ", ".join(quoted(name) for name in call.question.fields)
        self.connection.execute(
            f"CREATE TEMP TABLE {target} AS SELECT *, {_stand_in(call.question.output, fields)} "
            f"AS {ANSWER}, NULL::VARCHAR AS {ERROR} FROM (SELECT DISTINCT * FROM ({source}))"
        )

    def cost_per_prompt(self, source: str, question: Question) -> float:
        raise AssertionError("an estimate takes no samples")


def _stand_in(output: Output, fields: str) -> str:
    """An expression of some answer, another one for other fields where that is possible."""
    number = f"hash({fields})"
    if output.choices:
        listed = ", ".join(map(literal, output.choices))
        return f"[{listed}][1 + ({number} % {len(output.choices)})::BIGINT]"
    return {
        "text": f"{number}::VARCHAR",
        "int": f"({number} % 10)::BIGINT",
        "float": f"({number} % 10)::DOUBLE",
        "bool": f"({number} % 2 = 0)",
        "json": f"('{{\"number\": ' || {number}::VARCHAR || '}}')::JSON",
    }[output.type]


def plan_steps(plans: list[SelectPlan]) -> list[str]:
    """What the plans do, in the order in which it is done."""
    steps: list[str] = []
    for number, plan in enumerate(plans, 1):
        name = f"stage {number}" if len(plans) > 1 else "stage"
        steps.append(f"{name}: {sql_of(plan.stage)}")
        if len(plan.predicates) > 1:
            steps.append(
                f"the {len(plan.predicates)} predicates that ask go in the order that a sample of "
                f"{SAMPLE_ROWS} rows suggests, if there are {MIN_SAMPLED_ROWS} rows or more"
            )
        for predicate in plan.predicates:
            steps += [_ask_step(plan.calls[call]) for call in predicate.calls]
            steps.append(f"keep rows where {sql_of(predicate.condition)}")
        if plan.cut is not None:
            offset, limit = plan.cut
            steps.append(f"the above in chunks, until there are {offset + limit:,} rows")
        steps += [_ask_step(plan.calls[call]) for call in plan.late_calls]
        steps.append(f"result of {name}: {sql_of(plan.final)}")
    return steps


def _ask_step(call: PlannedCall) -> str:
    guards = [" AND ".join(sql_of(term) for term in terms) for terms in call.guards]
    where = f" where {' OR '.join(guards)}" if guards and all(guards) else ""
    return f"ask {call.text} as {call.name}{where}"
