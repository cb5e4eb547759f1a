# SPDX-License-Identifier: Apache-2.0
"""What the demo of long contexts found out, as numbers, as tables and as a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from rich.table import Table

from vllm_relay.demo.long_contexts.engine import LongAnswer
from vllm_relay.demo.requests import Request


@dataclass(frozen=True)
class LongReport:
    """One engine over all questions.

    Attributes:
        document_s: the first question until its first token: nothing of the document is cached.
        first_token_s: median of the other questions.
        second_token_s, token_s: medians of all questions, the second one of the tokens after it.
            An index of the document is built for the second token.
        document_kv_bytes: the most that the first request held on the device until its first token.
        decode_kv_bytes: the most that a request held there from its second token on.
    """

    questions: int
    answers_right: int
    document_s: float
    first_token_s: float
    second_token_s: float
    token_s: float
    document_kv_bytes: int
    decode_kv_bytes: int


@dataclass(frozen=True)
class LongComparison:
    """Relay with all of a document on the device, and with a window of it."""

    requests: Sequence[Request]
    dense_answers: Sequence[LongAnswer]
    sparse_answers: Sequence[LongAnswer]

    @property
    def dense(self) -> LongReport:
        return _report(self.requests, self.dense_answers)

    @property
    def sparse(self) -> LongReport:
        return _report(self.requests, self.sparse_answers)

    @property
    def identical_outputs(self) -> int:
        both = zip(self.dense_answers, self.sparse_answers, strict=True)
        return sum(dense.token_ids == sparse.token_ids for dense, sparse in both)

    def problems(self) -> list[str]:
        """Why the comparison is not a success, in words; empty if it is one."""
        return [
            f"{name} answered {wrong} of {report.questions} questions wrong"
            for name, report in [("relay", self.dense), ("relay_sparse", self.sparse)]
            if (wrong := report.questions - report.answers_right)
        ]

    def as_dict(self) -> dict[str, Any]:
        """All numbers, ready for JSON."""
        return {
            "relay": asdict(self.dense),
            "relay_sparse": asdict(self.sparse),
            "identical_outputs": self.identical_outputs,
            "passed": not self.problems(),
            "problems": self.problems(),
        }


def answers_table(comparison: LongComparison, decode: Callable[[list[int]], str]) -> Table:
    """Every question in the order of what it asks for; `decode` makes text of tokens."""
    table = Table("asked for", "at token", title="Answers", caption="at token: where the answer is")
    table.add_column("right answer")
    table.add_column("relay")
    table.add_column("relay_sparse")
    rows = zip(
        comparison.requests, comparison.dense_answers, comparison.sparse_answers, strict=True
    )
    for request, *answers in sorted(rows, key=lambda row: _position(row[0])):
        expected = request.expected_token_ids or []
        table.add_row(
            decode(request.prompt_token_ids[-2:]),
            f"{_position(request):,}",
            decode(expected),
            *(
                "right" if answer.token_ids == expected else f"wrong: {decode(answer.token_ids)}"
                for answer in answers
            ),
        )
    return table


def costs_table(comparison: LongComparison) -> Table:
    """Memory and time for the terminal."""
    dense, sparse = comparison.dense, comparison.sparse
    table = Table("", title="The same document and questions, answered by")
    table.add_column("relay", justify="right")
    table.add_column("relay_sparse", justify="right")
    table.add_column("sparse / dense", justify="right")
    table.add_row("answers right", *(f"{r.answers_right} / {r.questions}" for r in (dense, sparse)))
    table.add_row(
        "outputs identical to relay", "", f"{comparison.identical_outputs} / {sparse.questions}"
    )
    for what, show, values in [
        (
            "KV on the device, reading the document",
            _mib,
            (dense.document_kv_bytes, sparse.document_kv_bytes),
        ),
        ("KV on the device, generating", _mib, (dense.decode_kv_bytes, sparse.decode_kv_bytes)),
        ("document and first token", _seconds, (dense.document_s, sparse.document_s)),
        ("first token, document cached", _ms, (dense.first_token_s, sparse.first_token_s)),
        ("second token, index of the document", _ms, (dense.second_token_s, sparse.second_token_s)),
        ("every further token", _ms, (dense.token_s, sparse.token_s)),
    ]:
        table.add_row(what, *map(show, values), f"{values[1] / values[0]:.3g}")
    return table


def _report(requests: Sequence[Request], answers: Sequence[LongAnswer]) -> LongReport:
    first, *others = answers
    return LongReport(
        questions=len(requests),
        answers_right=sum(
            answer.token_ids == request.expected_token_ids
            for request, answer in zip(requests, answers, strict=True)
        ),
        document_s=first.prompt_s,
        first_token_s=statistics.median(answer.prompt_s for answer in others),
        second_token_s=statistics.median(answer.tokens_s[0] for answer in answers),
        token_s=statistics.median(chain.from_iterable(answer.tokens_s[1:] for answer in answers)),
        document_kv_bytes=first.prompt_kv_blocks * first.kv_block_bytes,
        decode_kv_bytes=max(a.decode_kv_blocks * a.kv_block_bytes for a in answers),
    )


def _position(request: Request) -> int:
    """Of the first word of the answer in the prompt."""
    tokens = request.prompt_token_ids
    return next(i for i in range(2, len(tokens)) if tokens[i - 2 : i] == tokens[-2:])


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _seconds(duration_s: float) -> str:
    return f"{duration_s:.1f} s"


def _ms(duration_s: float) -> str:
    return f"{duration_s * 1e3:.1f} ms"
