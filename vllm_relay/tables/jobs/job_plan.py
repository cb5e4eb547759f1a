# SPDX-License-Identifier: Apache-2.0
"""The prompts of a job in the order in which they are to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.engines.base import Engine, Prompt, modules_refusal
from vllm_relay.tables.jobs.checkpoint import Checkpoint, Keys, KnownAnswer
from vllm_relay.tables.jobs.job_rows import Bucket, JobRows
from vllm_relay.tables.jobs.joined_tokens import FieldTokens, PromptTokens
from vllm_relay.tables.jobs.module_prompts import ModulePrompt, ModulePrompts
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.prompt_format import PromptFormat, text_of
from vllm_relay.tables.jobs.set_fields import reordered_lists, sorted_list
from vllm_relay.tables.ordering.cached_tokens import BlockCache, cached_tokens
from vllm_relay.tables.ordering.columns import Column, encode_columns
from vllm_relay.tables.ordering.duplicates import distinct_rows
from vllm_relay.tables.ordering.order import FieldPrompts, choose_order
from vllm_relay.tables.question import Question

_PROMPTS_PER_CHUNK = 256
_ANY_CACHE = BlockCache(block_size_tokens=16)
_LEAST_SAVED_SHARE = 0.1
"""Of the computed tokens: for less, modules are not worth other answers."""


@dataclass
class Kind:
    """Rows that become the same prompt.

    Attributes:
        numbers: of the distinct rows. They are several by rules, and where different values have
            the same JSON.
        num_rows: of the source.
        key: of the answer in the checkpoint.
        values: JSON, of each of the question's fields.
    """

    numbers: list[int]
    num_rows: int
    key: bytes
    values: tuple[str, ...]


@dataclass(frozen=True)
class PlannedPrompt:
    """Rows to ask about.

    Attributes:
        kind: of the rows.
        prompt: its number is that of the first row.
        token_ids: of the prompt; without a tokenizer about as many numbers, equal for equal
            beginnings.
        num_encoded_tokens: of its modules, that are computed for this prompt and no earlier one,
            about.
    """

    kind: Kind
    prompt: Prompt
    token_ids: list[int]
    num_encoded_tokens: int = 0


@dataclass(frozen=True)
class KnownRows:
    """Rows whose answer is in the checkpoint."""

    kind: Kind
    answer: KnownAnswer


@dataclass(frozen=True)
class RefusedRows:
    """Rows whose prompt cannot run."""

    kind: Kind
    error: str


class JobPlan:
    """
    Args:
        rows: that are asked about.
        question: that is asked.
        engine: of which the tokenizer, the prefix cache and the limits count.
        prompt_format: of its prompts.
        options: of the job.
        checkpoint: of known answers.

    Attributes:
        order_names: rows by the name of the order that was chosen for their bucket.
        num_by_rules: rows that are left out only because rules make their texts equal.

    Raises:
        ValueError: the options ask for modules, and the engine takes none.
    """

    def __init__(
        self,
        rows: JobRows,
        question: Question,
        engine: Engine,
        prompt_format: PromptFormat,
        options: JobOptions,
        checkpoint: Checkpoint,
    ) -> None:
        self._rows = rows
        self._question = question
        self._engine = engine
        self._format = prompt_format
        self._options = options
        self._checkpoint = checkpoint
        if options.modules != "off" and (reason := modules_refusal(engine)):
            raise ValueError(
                f"modules={options.modules!r} given, but the engine takes no prompt modules: "
                f'{reason}. Give LLM(..., attention_backend="relay", '
                f'additional_config={{"relay": {{"scheduler": True}}}}), or modules="off"'
            )
        self._keys = Keys(
            engine.identity,
            question,
            options.template,
            options.order == "keep",
            options.modules,
        )
        self._field_tokens = FieldTokens(prompt_format)
        self.order_names: Counter[str] = Counter()
        self.num_by_rules = 0

    @property
    def order_name(self) -> str:
        """Of the order of most rows; "" before there is one."""
        return next((name for name, _ in self.order_names.most_common(1)), "")

    def steps(self) -> Generator[PlannedPrompt | KnownRows | RefusedRows]:
        """Every row once."""
        options = self._options
        for bucket in self._rows.buckets(options.bucket_rows, options.order):
            kinds = self._kinds(bucket)
            known = self._checkpoint.known([kind.key for kind in kinds])
            unknown = []
            for kind in kinds:
                if kind.key in known:
                    yield KnownRows(kind, known[kind.key])
                else:
                    unknown.append(kind)
            if unknown:
                yield from self._ordered(unknown)

    def _kinds(self, bucket: Bucket) -> list[Kind]:
        values = {
            name: list(map(sorted_list, texts)) if name in self._question.set_fields else texts
            for name, texts in bucket.values.items()
        }
        groups: Sequence[int] = range(len(bucket.numbers))
        if self._options.rules:
            columns = [_with_texts(column) for column in encode_columns(values)]
            found = distinct_rows(columns, self._options.rules)
            self.num_by_rules += found.num_by_rules
            groups = found.number_of_row.tolist()
        of_rows = zip(*values.values(), strict=True)
        kinds: dict[bytes, Kind] = {}
        kind_of_group: dict[int, Kind] = {}
        rows = zip(of_rows, bucket.numbers, bucket.counts, groups, strict=True)
        for row_values, number, num_rows, group in rows:
            kind = kind_of_group.get(group)
            if kind is None:
                key = self._keys.of(row_values)
                kind = kinds.get(key)
                if kind is None:
                    kind = kinds[key] = Kind([], 0, key, row_values)
                kind_of_group[group] = kind
            kind.numbers.append(number)
            kind.num_rows += num_rows
        return list(kinds.values())

    def _ordered(self, kinds: list[Kind]) -> Generator[PlannedPrompt | RefusedRows]:
        columns, lines = self._encoded(kinds)
        refused = self._too_long_rows(columns, lines)
        for row, num_tokens in refused.items():
            yield RefusedRows(kinds[row], self._too_long(num_tokens))
        if len(refused) == len(kinds):
            return
        if refused:
            fitting = [row for row in range(len(kinds)) if row not in refused]
            kinds = [kinds[row] for row in fitting]
            columns = [column.take(np.array(fitting)) for column in columns]
        prompts = FieldPrompts(columns, self._format.before_tokens, self._format.after_tokens)
        cache = self._cache_for(columns)
        chosen = choose_order(columns, self._options.order, cache, prompts)
        self.order_names[chosen.name] += len(kinds)
        modules = None
        if self._options.modules != "off":
            prefix_tokens = cached_tokens(prompts(chosen.order), cache)
            modules = self._modules(columns, lines, chosen.order.rows, prefix_tokens)
        codes = [column.codes.tolist() for column in columns]
        prompt_tokens = PromptTokens(self._field_tokens, self._format, columns, lines)
        limit = self._limit_tokens
        for begin in range(0, len(kinds), _PROMPTS_PER_CHUNK):
            chunk = slice(begin, begin + _PROMPTS_PER_CHUNK)
            rows = chosen.order.rows[chunk].tolist()
            fields = chosen.order.fields[chunk].tolist()
            modular = modules.of_rows(rows, fields) if modules is not None else {}
            cells = [
                [(number, codes[number][row]) for number in numbers]
                for row, numbers in zip(rows, fields, strict=True)
                if row not in modular
            ]
            messages = [
                self._format.message([lines[number][code] for number, code in each])
                for each in cells
            ]
            token_ids = prompt_tokens.of(cells, messages) if cells else []
            without = zip(messages, token_ids, strict=True)
            for row in rows:
                if row in modular:
                    yield _with_modules(kinds[row], modular[row])
                    continue
                message, tokens = next(without)
                if limit is not None and len(tokens) >= limit:
                    yield RefusedRows(kinds[row], self._too_long(len(tokens)))
                    continue
                sent = tokens if self._engine.tokenizer is not None else []
                prompt = Prompt(kinds[row].numbers[0], message, sent)
                yield PlannedPrompt(kinds[row], prompt, tokens)

    def _modules(
        self,
        columns: Sequence[Column],
        lines: Sequence[Sequence[str]],
        rows: npt.NDArray[np.int64],
        prefix_tokens: npt.NDArray[np.int64],
    ) -> ModulePrompts | None:
        """None where the prefix cache saves about as much without modules.

        Args:
            rows: in their order.
            prefix_tokens: that the prefix cache finds without modules, in this order.
        """
        cache = self._engine.cache
        assert cache is not None  # or the engine takes no modules
        row_tokens = self._lengths(columns)
        modules = ModulePrompts(
            columns,
            lines,
            self._question.set_fields,
            self._format,
            cache=cache,
            limit_tokens=self._limit_tokens,
            max_answer_tokens=self._engine.max_answer_tokens(self._question),
            mode=self._options.modules,
            rows=rows,
            row_tokens=row_tokens,
            cached_tokens=prefix_tokens,
        )
        without = int(row_tokens.sum() - prefix_tokens.sum())
        most = (1 - _LEAST_SAVED_SHARE) * without
        return modules if modules.computed_tokens < most else None

    def _encoded(self, kinds: Sequence[Kind]) -> tuple[list[Column], list[list[str]]]:
        """Columns of the question's fields, and the rendered field of each of their values."""
        values = {
            name: [kind.values[i] for kind in kinds] for i, name in enumerate(self._question.fields)
        }
        for name in self._question.set_fields:
            values[name] = reordered_lists(values[name])
        rendered: dict[str, dict[str, str]] = {name: {} for name in values}

        def render(name: str, value: str) -> str:
            line = rendered[name][value] = self._options.template.render_field(name, value)
            return line

        columns = encode_columns(values, render, self._field_tokens.of_last)
        lines = [[rendered[column.name][value] for value in column.texts] for column in columns]
        return columns, lines

    @property
    def _limit_tokens(self) -> int | None:
        """Prompts have fewer tokens; None if there is no limit, or none that can be counted."""
        if self._engine.tokenizer is None:
            return None
        limits = [self._engine.max_model_len]
        cache = self._engine.cache
        if cache is not None and cache.num_blocks is not None:
            limits.append(cache.block_size_tokens * cache.num_blocks)
        return min((each for each in limits if each is not None), default=None)

    def _lengths(self, columns: Sequence[Column]) -> npt.NDArray[np.int64]:
        """Tokens of each prompt, about: pieces of a prompt may have more than the whole."""
        around = len(self._format.before_tokens) + len(self._format.after_tokens)
        return around + np.sum([each.lengths[each.codes] for each in columns], axis=0)

    def _cache_for(self, columns: Sequence[Column]) -> BlockCache:
        """The engine's, no smaller than the longest prompt by its pieces."""
        cache = self._engine.cache or _ANY_CACHE
        if cache.num_blocks is None:
            return cache
        needed = -(-int(self._lengths(columns).max()) // cache.block_size_tokens)
        return replace(cache, num_blocks=max(cache.num_blocks, needed))

    def _too_long_rows(
        self, columns: Sequence[Column], lines: Sequence[Sequence[str]]
    ) -> dict[int, int]:
        """The tokens of prompts that are too long with fields in the caller's order, by row."""
        limit = self._limit_tokens
        if limit is None:
            return {}
        rows = np.flatnonzero(self._lengths(columns) >= limit).tolist()
        too_long: dict[int, int] = {}
        for begin in range(0, len(rows), _PROMPTS_PER_CHUNK):
            chunk = rows[begin : begin + _PROMPTS_PER_CHUNK]
            messages = [
                self._format.message(
                    [texts[column.codes[row]] for texts, column in zip(lines, columns, strict=True)]
                )
                for row in chunk
            ]
            for row, tokens in zip(chunk, self._format.token_ids(messages), strict=True):
                if len(tokens) >= limit:
                    too_long[row] = len(tokens)
        return too_long

    def _too_long(self, num_tokens: int) -> str:
        return (
            f"the prompt has {num_tokens} tokens, the engine takes prompts of fewer than "
            f"{self._limit_tokens}"
        )


def _with_modules(kind: Kind, prompt: ModulePrompt) -> PlannedPrompt:
    return PlannedPrompt(
        kind,
        Prompt(kind.numbers[0], prompt.message, prompt.token_ids, prompt.rendered),
        prompt.token_ids,
        prompt.num_encoded_tokens,
    )


def _with_texts(column: Column) -> Column:
    # rules are for what texts say, not for their JSON; a NULL is no text
    return replace(
        column, texts=["\0null" if each == "null" else text_of(each) for each in column.texts]
    )
