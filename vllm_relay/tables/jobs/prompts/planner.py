# SPDX-License-Identifier: Apache-2.0
"""Prompts of rows in the order in which they are to run: `plan_prompts`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vllm_relay.tables.engines.base import Prompt
from vllm_relay.tables.jobs.arrow_texts import distinct_values
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.prompts.format import PromptFormat
from vllm_relay.tables.jobs.prompts.joined_tokens import FieldTokens, PromptTokens
from vllm_relay.tables.jobs.prompts.modules.prompts import ModulePrompts
from vllm_relay.tables.jobs.prompts.set_fields import reordered_lists
from vllm_relay.tables.ordering.cached_tokens import BlockCache, cached_tokens
from vllm_relay.tables.ordering.columns import Column, FieldTexts, column_of, encode_column
from vllm_relay.tables.ordering.order import ChosenOrder, FieldPrompts, choose_order
from vllm_relay.tables.question import Question

_PROMPTS_PER_CHUNK = 64
_ANY_CACHE = BlockCache(block_size_tokens=16)
_LEAST_SAVED_SHARE = 0.1
"""Of the computed tokens: for less, modules are not worth other answers."""


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """
    Attributes:
        row: of the table.
        prompt: with the number of the row.
        token_ids: of the prompt; without a tokenizer about as many numbers, equal for equal
            beginnings.
        num_encoded_tokens: of its modules, that are computed for this prompt and no earlier one,
            about.
    """

    row: int
    prompt: Prompt
    token_ids: list[int]
    num_encoded_tokens: int = 0


@dataclass(frozen=True)
class RefusedRow:
    """A row whose prompt cannot run."""

    row: int
    error: str


@dataclass(frozen=True)
class Limits:
    """
    Attributes:
        max_model_len: tokens of a prompt and its answer; None if it is not known.
        max_answer_tokens: of an answer.
    """

    max_model_len: int | None
    max_answer_tokens: int


def plan_prompts(
    rows: pa.Table,
    question: Question,
    tokenizer: Any | None,
    cache: BlockCache | None,
    options: JobOptions | None = None,
    limits: Limits | None = None,
) -> Iterator[PlannedPrompt | RefusedRow]:
    """A prompt for every row, or why there is none, in the order in which they are to run.

    Needs neither DuckDB nor an engine, and plans all rows as one bucket, when the first prompt is
    taken; hosts with more rows give them in parts. Beside the rows it takes two to three times
    their bytes.

    Args:
        rows: whose columns are the question's fields, in their order: JSON of their values, as
            texts, or NULL. Equal rows have a prompt each.
        tokenizer: of the model; None counts about four bytes as a token.
        cache: the prefix cache; None if it is not known.
        options: of which `order`, `template` and `modules` count.
        limits: of the engine; None where they are not known.

    Yields:
        each row of the table once; `row` is its place.

    Raises:
        ValueError: the model's chat template refuses the question.
    """
    if options is None:
        options = JobOptions()
    if limits is None:
        limits = Limits(None, question.most_tokens)
    planner = Planner(question, tokenizer, cache, options, limits)
    yield from planner.order(rows).prompts()


class Planner:
    """Plans tables of one question; as for `plan_prompts`.

    `order` may run in another thread than what was ordered before.
    """

    def __init__(
        self,
        question: Question,
        tokenizer: Any | None,
        cache: BlockCache | None,
        options: JobOptions,
        limits: Limits,
    ) -> None:
        self.question = question
        self.options = options
        self.limits = limits
        self.cache = cache
        self.has_tokenizer = tokenizer is not None
        self.format = PromptFormat(question, tokenizer, options.template)
        self.field_tokens = FieldTokens(self.format)
        sizes = [limits.max_model_len]
        if cache is not None and cache.num_blocks is not None:
            sizes.append(cache.block_size_tokens * cache.num_blocks)
        known = [each for each in sizes if each is not None] if self.has_tokenizer else []
        # prompts have fewer tokens; None where they cannot be counted
        self.limit_tokens = min(known, default=None)

    def order(self, rows: pa.Table) -> OrderedRows:
        """What takes long; `OrderedRows.prompts` does not."""
        return OrderedRows(self, rows)

    def lengths(self, columns: Sequence[Column]) -> npt.NDArray[np.int64]:
        """Tokens of each prompt, about: pieces of a prompt may have more than the whole."""
        around = len(self.format.before_tokens) + len(self.format.after_tokens)
        return around + np.sum([each.lengths[each.codes] for each in columns], axis=0)

    def too_long(self, num_tokens: int) -> str:
        return (
            f"the prompt has {num_tokens} tokens, the engine takes prompts of fewer than "
            f"{self.limit_tokens}"
        )

    def answer_limit(self, message: str, token_ids: Sequence[int]) -> int | None:
        """Where the context has no room for the longest answer, how many tokens it has room for."""
        context = self.limits.max_model_len
        if context is None:
            return None
        # a token is at least a byte, but for what a chat template adds
        num_tokens = len(token_ids) if self.has_tokenizer else len(message.encode()) // 2
        left = max(context - num_tokens, 1)
        return left if left < self.limits.max_answer_tokens else None


class OrderedRows:
    """Rows of a table in their order; see `Planner`.

    Attributes:
        order_name: of the order that was chosen; "" if no prompt can run.
        num_ordered: rows whose prompts can run.
    """

    def __init__(self, planner: Planner, rows: pa.Table) -> None:
        self._planner = planner
        self._columns, self._lines = self._encoded(rows)
        self._rows: npt.NDArray[np.int64] = np.arange(rows.num_rows)
        self._refused = self._too_long_rows()
        self.order_name = ""
        self._modules: ModulePrompts | None = None
        if self._refused:
            self._rows = np.setdiff1d(self._rows, list(self._refused))
            self._columns = [column.take(self._rows) for column in self._columns]
        self.num_ordered = len(self._rows)
        if self.num_ordered:
            self._chosen = self._choose()
            self.order_name = self._chosen.name

    def prompts(self) -> Iterator[PlannedPrompt | RefusedRow]:
        """Every row once."""
        planner = self._planner
        for row, num_tokens in self._refused.items():
            yield RefusedRow(row, planner.too_long(num_tokens))
        if not self.num_ordered:
            return
        prompt_tokens = PromptTokens(
            planner.field_tokens, planner.format, self._columns, self._lines
        )
        for begin in range(0, self.num_ordered, _PROMPTS_PER_CHUNK):
            chunk = slice(begin, begin + _PROMPTS_PER_CHUNK)
            yield from self._chunk(chunk, prompt_tokens)

    def _chunk(
        self, chunk: slice, prompt_tokens: PromptTokens
    ) -> Iterator[PlannedPrompt | RefusedRow]:
        planner, lines = self._planner, self._lines
        places = self._chosen.order.rows[chunk]
        fields = self._chosen.order.fields[chunk].tolist()
        rows = self._rows[places].tolist()
        modular = self._modules.of_rows(places.tolist(), fields) if self._modules else {}
        codes = [column.codes[places].tolist() for column in self._columns]
        cells = [
            [(number, codes[number][i]) for number in numbers]
            for i, numbers in enumerate(fields)
            if places[i] not in modular
        ]
        messages = [
            planner.format.message([lines[number][code] for number, code in each]) for each in cells
        ]
        token_ids = prompt_tokens.of(cells, messages) if cells else []
        without = zip(messages, token_ids, strict=True)
        limit = planner.limit_tokens
        for place, row in zip(places.tolist(), rows, strict=True):
            if place in modular:
                found = modular[place]
                prompt = Prompt(row, found.message, found.token_ids, found.rendered)
                yield PlannedPrompt(row, prompt, found.token_ids, found.num_encoded_tokens)
                continue
            message, tokens = next(without)
            if limit is not None and len(tokens) >= limit:
                yield RefusedRow(row, planner.too_long(len(tokens)))
                continue
            sent = tokens if planner.has_tokenizer else []
            most = planner.answer_limit(message, tokens)
            yield PlannedPrompt(row, Prompt(row, message, sent, max_tokens=most), tokens)

    def _encoded(self, rows: pa.Table) -> tuple[list[Column], list[FieldTexts]]:
        """Columns of the question's fields, and the rendered field of each of their values."""
        question, template = self._planner.question, self._planner.options.template
        columns = [
            self._column(name, column.fill_null("null") if column.null_count else column)
            for name, column in zip(question.fields, rows.columns, strict=True)
        ]
        lines = [
            FieldTexts(
                column.texts,
                np.arange(column.num_values),
                partial(template.render_field, column.name),
            )
            for column in columns
        ]
        return columns, lines

    def _column(self, name: str, values: pa.ChunkedArray) -> Column:
        planner = self._planner
        template, tokenize = planner.options.template, planner.field_tokens.of_last
        if name in planner.question.set_fields:
            lists = reordered_lists(values.to_pylist())
            return encode_column(name, lists, template.render_field, tokenize)
        codes, first_rows = distinct_values(values)
        # read where they are
        texts = FieldTexts(values, first_rows, methodcaller("as_py"))
        return column_of(name, texts, codes, template.render_field, tokenize)

    def _choose(self) -> ChosenOrder:
        planner, columns = self._planner, self._columns
        format, options = planner.format, planner.options
        prompts = FieldPrompts(columns, format.before_tokens, format.after_tokens)
        cache = self._cache()
        chosen = choose_order(columns, options.order, cache, prompts)
        if options.modules != "off":
            prefix_tokens = cached_tokens(prompts(chosen.order), cache)
            self._modules = self._worthwhile_modules(chosen.order.rows, prefix_tokens)
        return chosen

    def _worthwhile_modules(
        self, rows: npt.NDArray[np.int64], prefix_tokens: npt.NDArray[np.int64]
    ) -> ModulePrompts | None:
        """None where the prefix cache saves about as much without modules.

        Args:
            rows: in their order.
            prefix_tokens: that the prefix cache finds without modules, in this order.
        """
        planner = self._planner
        row_tokens = planner.lengths(self._columns)
        assert planner.cache is not None  # or the engine takes no modules
        modules = ModulePrompts(
            planner.format,
            planner.cache,
            self._columns,
            self._lines,
            rows,
            row_tokens,
            prefix_tokens,
            set_fields=planner.question.set_fields,
            repairs=planner.options.modules == "repair",
            limit_tokens=planner.limit_tokens,
            max_answer_tokens=planner.limits.max_answer_tokens,
        )
        without = int(row_tokens.sum() - prefix_tokens.sum())
        most = (1 - _LEAST_SAVED_SHARE) * without
        return modules if modules.computed_tokens < most else None

    def _cache(self) -> BlockCache:
        """The engine's, no smaller than the longest prompt by its pieces."""
        cache = self._planner.cache or _ANY_CACHE
        if cache.num_blocks is None:
            return cache
        needed = -(-int(self._planner.lengths(self._columns).max()) // cache.block_size_tokens)
        return replace(cache, num_blocks=max(cache.num_blocks, needed))

    def _too_long_rows(self) -> dict[int, int]:
        """The tokens of prompts that are too long with fields in the caller's order, by row."""
        limit, format = self._planner.limit_tokens, self._planner.format
        if limit is None or not len(self._rows):
            return {}
        rows = np.flatnonzero(self._planner.lengths(self._columns) >= limit).tolist()
        too_long: dict[int, int] = {}
        for begin in range(0, len(rows), _PROMPTS_PER_CHUNK):
            chunk = rows[begin : begin + _PROMPTS_PER_CHUNK]
            messages = [
                format.message(
                    [
                        texts[column.codes[row]]
                        for texts, column in zip(self._lines, self._columns, strict=True)
                    ]
                )
                for row in chunk
            ]
            for row, tokens in zip(chunk, format.token_ids(messages), strict=True):
                if len(tokens) >= limit:
                    too_long[row] = len(tokens)
        return too_long
