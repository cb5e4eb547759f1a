# SPDX-License-Identifier: Apache-2.0
"""What the demo found out, as numbers, as a table and as a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from rich.table import Table

from vllm_relay.demo.engine import RoundResult
from vllm_relay.demo.requests import Request

ANSWER_TOKENS = 2


@dataclass(frozen=True)
class EngineReport:
    """One engine over all timed rounds.

    `None` stands for what is not known: no ground truth, or a metric the engine does not have.
    """

    requests: int
    answers_right: int | None
    recited_tokens: int | None
    recited_tokens_right: int | None
    prefix_cache_hit_rate: float | None
    kv_tokens_logical: int | None
    kv_tokens_read: int | None
    output_tokens: int
    output_tokens_per_s: float
    generation_s: float
    generation_s_by_round: list[float]


@dataclass(frozen=True)
class Comparison:
    """Stock vLLM against vLLM with relay on the same requests."""

    stock: EngineReport
    relay: EngineReport
    identical_outputs: int

    @property
    def speedup(self) -> float:
        return self.stock.generation_s / self.relay.generation_s

    @property
    def has_ground_truth(self) -> bool:
        return self.stock.answers_right is not None

    @property
    def may_round_apart(self) -> bool:
        """Whether outputs differ that are not wrong."""
        return not self.has_ground_truth and self.identical_outputs < self.relay.requests

    def problems(self) -> list[str]:
        """Why the comparison is not a success, in words; empty if it is one.

        Without a ground truth there is nothing to fail: two good kernels may round differently.
        """
        if not self.has_ground_truth:
            return []
        problems = [
            f"{name} answered {report.requests - right} of {report.requests} questions wrong"
            for name, report in [("stock vLLM", self.stock), ("relay", self.relay)]
            if (right := report.answers_right or 0) < report.requests
        ]
        different = self.relay.requests - self.identical_outputs
        if different:
            problems.append(
                f"{different} of {self.relay.requests} outputs of relay differ from stock vLLM's"
            )
        return problems

    def as_dict(self) -> dict[str, Any]:
        """All numbers, ready for JSON."""
        return {
            "stock": asdict(self.stock),
            "relay": asdict(self.relay),
            "identical_outputs": self.identical_outputs,
            "speedup": self.speedup,
            "passed": not self.problems(),
            "problems": self.problems(),
        }


def compare(
    requests: Sequence[Request],
    stock_rounds: Sequence[RoundResult],
    relay_rounds: Sequence[RoundResult],
) -> Comparison:
    """Judge both engines; `requests` are those of all rounds, in order.

    Stock vLLM has no counters of KV tokens: it reads every KV token that a request attends to,
    which is what relay counts as logical.
    """
    logical = _counter(relay_rounds, "relay:kv_tokens_logical")
    read = _counter(relay_rounds, "relay:kv_tokens_read")
    stock_outputs, relay_outputs = _outputs(stock_rounds), _outputs(relay_rounds)
    return Comparison(
        stock=_report(requests, stock_rounds, kv_tokens_logical=logical, kv_tokens_read=logical),
        relay=_report(requests, relay_rounds, kv_tokens_logical=logical, kv_tokens_read=read),
        identical_outputs=sum(
            stock == relay for stock, relay in zip(stock_outputs, relay_outputs, strict=True)
        ),
    )


def comparison_table(comparison: Comparison) -> Table:
    """The comparison for the terminal."""
    stock, relay = comparison.stock, comparison.relay
    both = stock, relay
    table = Table("", title="The same questions, answered by")
    table.add_column("stock vLLM", justify="right")
    table.add_column("with relay", justify="right")
    table.add_column("relay / stock", justify="right")
    if comparison.has_ground_truth:
        table.add_row("answers right", *(_of(r.answers_right, r.requests) for r in both))
        table.add_row(
            "recited tokens right", *(_of(r.recited_tokens_right, r.recited_tokens) for r in both)
        )
    table.add_row(
        "outputs identical to stock", "", _of(comparison.identical_outputs, relay.requests)
    )
    table.add_row("prefix-cache hit rate", *(_percent(r.prefix_cache_hit_rate) for r in both))
    table.add_row("KV tokens attended to", *(_count(r.kv_tokens_logical) for r in both))
    table.add_row(
        "KV tokens read",
        *(_count(r.kv_tokens_read) for r in both),
        _ratio(relay.kv_tokens_read, stock.kv_tokens_read),
    )
    table.add_row(
        "output tokens per second",
        *(f"{r.output_tokens_per_s:,.0f}" for r in both),
        _ratio(relay.output_tokens_per_s, stock.output_tokens_per_s),
    )
    table.add_row(
        "generation wall time",
        *(f"{r.generation_s:.2f} s" for r in both),
        _ratio(relay.generation_s, stock.generation_s),
    )
    return table


def _report(
    requests: Sequence[Request],
    rounds: Sequence[RoundResult],
    *,
    kv_tokens_logical: int | None,
    kv_tokens_read: int | None,
) -> EngineReport:
    outputs = _outputs(rounds)
    answers_right, recited, recited_right = _marks(requests, outputs)
    queried = _counter(rounds, "vllm:prefix_cache_queries")
    hit = _counter(rounds, "vllm:prefix_cache_hits")
    output_tokens = sum(map(len, outputs))
    generation_s = sum(r.generation_s for r in rounds)
    return EngineReport(
        requests=len(requests),
        answers_right=answers_right,
        recited_tokens=recited,
        recited_tokens_right=recited_right,
        prefix_cache_hit_rate=hit / queried if queried and hit is not None else None,
        kv_tokens_logical=kv_tokens_logical,
        kv_tokens_read=kv_tokens_read,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / generation_s,
        generation_s=generation_s,
        generation_s_by_round=[r.generation_s for r in rounds],
    )


def _outputs(rounds: Sequence[RoundResult]) -> list[list[int]]:
    return list(chain.from_iterable(r.token_ids for r in rounds))


def _marks(
    requests: Sequence[Request], outputs: Sequence[list[int]]
) -> tuple[int | None, int | None, int | None]:
    """Right answers, known tokens and right tokens, or three None if no right tokens are known."""
    matches = [
        [token == right for token, right in zip(output, request.expected_token_ids, strict=True)]
        for request, output in zip(requests, outputs, strict=True)
        if request.expected_token_ids is not None
    ]
    if not matches:
        return None, None, None
    return (
        sum(all(match[:ANSWER_TOKENS]) for match in matches),
        sum(map(len, matches)),
        sum(map(sum, matches)),
    )


def _counter(rounds: Sequence[RoundResult], name: str) -> int | None:
    """The increase of a counter over all rounds; None if the engine does not have it."""
    if not all(name in r.counters for r in rounds):
        return None
    return sum(r.counters[name] for r in rounds)


def _of(count: int | None, total: int | None) -> str:
    return f"{_count(count)} / {_count(total)}"


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.3g}" if value is not None and base else ""
