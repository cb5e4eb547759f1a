# SPDX-License-Identifier: Apache-2.0
"""How a job runs, and what it may spend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from vllm_relay.arguments import check_count
from vllm_relay.tables.jobs.prompts.format import PromptTemplate
from vllm_relay.tables.jobs.prompts.modules.layout import ModuleMode
from vllm_relay.tables.ordering.order import OrderChoice
from vllm_relay.tables.question import RequestOptions

if TYPE_CHECKING:
    import pyarrow as pa

DEFAULT_BUCKET_ROWS = 20_000

RULES: Mapping[str, Callable[[str], str]] = {
    "strip": str.strip,
    "collapse_spaces": lambda text: " ".join(text.split()),
    "casefold": str.casefold,
}
"""From a text to the text that stands for all that are held to be equal."""


@dataclass(frozen=True)
class JobOptions:
    """
    Attributes:
        order: of rows and fields, see `choose_order`.
        rules: names of `RULES` by which rows with different texts count as equal.
        checkpoint: a file that keeps answers for later jobs; None keeps them as long as the
            connection.
        max_total_tokens: of prompts and answers, of all jobs of a connection; None has no limit.
        retry_errors: whether rows are asked about again whose answer in the checkpoint was cut or
            is not of the type; else they have the error that they had.
        show_progress: a bar on the standard error; None shows it on a terminal.
        template: of the prompts.
        bucket_rows: rows that are ordered together.
        modules: whether long values that rows share become prompt modules, which are computed once
            and reused whatever stands before them. They do not see each other, so answers may
            change; "repair" computes the first tokens of each anew in every prompt. Fields with
            modules come first, in every order. Needs an engine that takes modules. Where the prefix
            cache saves about as much, prompts have none.
        request: what the model is told in all questions that do not say otherwise.
        otlp_traces_endpoint: of OpenTelemetry, to which spans of statements and jobs are sent; None
            makes none.

    Raises:
        ValueError: an order, a rule or a mode of modules is not known, or a number is below 1.
    """

    order: OrderChoice = "auto"
    rules: tuple[str, ...] = ()
    checkpoint: Path | None = None
    max_total_tokens: int | None = None
    show_progress: bool | None = None
    template: PromptTemplate = field(default_factory=PromptTemplate)
    bucket_rows: int = DEFAULT_BUCKET_ROWS
    modules: ModuleMode = "off"
    retry_errors: bool = True
    request: RequestOptions = RequestOptions()
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        choices = (("order", get_args(OrderChoice)), ("modules", get_args(ModuleMode)))
        for name, known in choices:
            given = getattr(self, name)
            if given not in known:
                raise ValueError(f"{name}={given!r} given, expected one of {list(known)}")
        unknown = [rule for rule in self.rules if rule not in RULES]
        if unknown:
            raise ValueError(f"rules {unknown} given, expected some of {list(RULES)}")
        for name in ("max_total_tokens", "bucket_rows"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value)


class TokenBudgetError(RuntimeError):
    """There are prompts left, but no tokens to run them with.

    Args:
        reason: what is spent, and how far the job came.
        advice: where the answers that came are, and what to do.
        limit: the part of the reason that is true of every row.

    Attributes:
        reason, limit: as given.
        answers: of all rows of a table, see `ask`; None elsewhere.
    """

    def __init__(self, reason: str, advice: str, limit: str) -> None:
        super().__init__(f"{reason}; {advice}")
        self.reason = reason
        self.limit = limit
        self.answers: pa.Table | None = None

    @property
    def of_unasked(self) -> str:
        """The error of a row that was not asked about."""
        return f"not asked: {self.limit}"


class TokenBudget:
    """Prompts run only where their tokens and the longest possible answer are within the limit.

    Prompts that are aborted are not counted.

    Args:
        max_tokens: of prompts and answers; None has no limit.
    """

    def __init__(self, max_tokens: int | None) -> None:
        self.max_tokens = max_tokens
        self.spent_tokens = 0
        self._reserved_tokens = 0

    def reserve(self, num_tokens: int) -> bool:
        """Whether so many are left; they are then kept for this prompt."""
        if not self.has(num_tokens):
            return False
        self._reserved_tokens += num_tokens
        return True

    def has(self, num_tokens: int) -> bool:
        """Whether so many are left."""
        after = self.spent_tokens + self._reserved_tokens + num_tokens
        return self.max_tokens is None or after <= self.max_tokens

    def spend(self, num_reserved: int, num_tokens: int) -> None:
        """What a prompt took of what was reserved for it."""
        self._reserved_tokens -= num_reserved
        self.spent_tokens += num_tokens

    def release(self) -> None:
        """Nothing runs any more."""
        self._reserved_tokens = 0
