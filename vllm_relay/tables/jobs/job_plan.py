# SPDX-License-Identifier: Apache-2.0
"""The prompts of a job in the order in which they are to run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.engines.base import Engine, Prompt
from vllm_relay.tables.jobs.checkpoint import Checkpoint, Keys, KnownAnswer
from vllm_relay.tables.jobs.job_rows import Bucket, JobRows
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.prompt_format import PromptFormat, text_of
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.ordering.columns import Column, encode_columns
from vllm_relay.tables.ordering.duplicates import distinct_rows
from vllm_relay.tables.ordering.element_order import order_elements
from vllm_relay.tables.ordering.order import FieldPrompts, choose_order
from vllm_relay.tables.question import Question

_PROMPTS_PER_CHUNK = 256
_ANY_CACHE = BlockCache(block_size_tokens=16)


@dataclass(frozen=True)
class Kind:
    """Rows that become the same prompt.

    Attributes:
        numbers: of the distinct rows, more than one only by rules.
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
        token_ids: of the prompt; without a tokenizer numbers of about as many pieces of it.
    """

    kind: Kind
    prompt: Prompt
    token_ids: list[int]


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
        self._keys = Keys(engine.identity, question, options.template, options.order == "keep")
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
            name: list(map(_sorted_list, texts)) if name in self._question.set_fields else texts
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
        key_of_group: dict[int, bytes] = {}
        rows = zip(of_rows, bucket.numbers, bucket.counts, groups, strict=True)
        for row_values, number, num_rows, group in rows:
            key = key_of_group.get(group)
            if key is None:
                key = key_of_group[group] = self._keys.of(row_values)
            kind = kinds.get(key)
            if kind is None:
                kinds[key] = Kind([number], num_rows, key, row_values)
            else:
                kinds[key] = replace(
                    kind, numbers=[*kind.numbers, number], num_rows=kind.num_rows + num_rows
                )
        return list(kinds.values())

    def _ordered(self, kinds: list[Kind]) -> Generator[PlannedPrompt | RefusedRows]:
        names = self._question.fields
        template = self._options.template
        values = {name: [kind.values[i] for kind in kinds] for i, name in enumerate(names)}
        for name in self._question.set_fields:
            values[name] = _reordered(values[name])
        columns = encode_columns(
            values,
            render=template.render_field,
            tokenize=self._format.tokens_of,
        )
        lines = [
            [template.render_field(name, value) for value in column.texts]
            for name, column in zip(names, columns, strict=True)
        ]
        fitting, refused = self._split_by_length(columns)
        for index, num_tokens in refused:
            yield RefusedRows(kinds[index], self._too_long(num_tokens))
        if not fitting:
            return
        if refused:
            kinds = [kinds[index] for index in fitting]
            columns = [column.take(np.array(fitting)) for column in columns]
        chosen = choose_order(
            columns,
            self._options.order,
            self._cache_for(columns),
            FieldPrompts(columns, self._format.before_tokens, self._format.after_tokens),
        )
        self.order_names[chosen.name] += len(fitting)
        codes = [column.codes.tolist() for column in columns]
        for begin in range(0, len(fitting), _PROMPTS_PER_CHUNK):
            chunk = slice(begin, begin + _PROMPTS_PER_CHUNK)
            rows = chosen.order.rows[chunk].tolist()
            fields = chosen.order.fields[chunk].tolist()
            messages = [
                self._format.message([lines[number][codes[number][row]] for number in numbers])
                for row, numbers in zip(rows, fields, strict=True)
            ]
            token_ids = self._format.token_ids(messages)
            for row, message, tokens in zip(rows, messages, token_ids, strict=True):
                limit = self._engine.max_model_len
                if limit is not None and len(tokens) >= limit:
                    yield RefusedRows(kinds[row], self._too_long(len(tokens)))
                    continue
                sent = tokens if self._engine.tokenizer is not None else []
                prompt = Prompt(kinds[row].numbers[0], message, sent)
                yield PlannedPrompt(kinds[row], prompt, tokens)

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

    def _split_by_length(
        self, columns: Sequence[Column]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Rows whose prompts may fit into the engine, and the others with about their tokens."""
        lengths = self._lengths(columns)
        limits = [self._engine.max_model_len]
        cache = self._engine.cache
        if cache is not None and cache.num_blocks is not None:
            limits.append(cache.block_size_tokens * cache.num_blocks)
        limit = min((each for each in limits if each is not None), default=None)
        if limit is None:
            return list(range(len(lengths))), []
        is_long = lengths > limit + 2 * (len(columns) + 2)
        return (
            np.flatnonzero(~is_long).tolist(),
            [(index, int(lengths[index])) for index in np.flatnonzero(is_long).tolist()],
        )

    def _too_long(self, num_tokens: int) -> str:
        return (
            f"the prompt has {num_tokens} tokens, the engine takes prompts below "
            f"{self._engine.max_model_len}"
        )


def _with_texts(column: Column) -> Column:
    # rules are for what texts say, not for their JSON; a NULL is no text
    return replace(
        column, texts=["\0null" if each == "null" else text_of(each) for each in column.texts]
    )


def _sorted_list(value: str) -> str:
    """A JSON list with its elements in one order for all lists of these elements."""
    parsed = json.loads(value)
    if not isinstance(parsed, list):
        return value
    return f"[{', '.join(sorted(json.dumps(each, ensure_ascii=False) for each in parsed))}]"


def _reordered(values: list[str]) -> list[str]:
    """JSON lists, each with its elements in the order that is best for all."""
    parsed = [json.loads(each) for each in values]
    as_texts = [
        [json.dumps(item, ensure_ascii=False) for item in each] if isinstance(each, list) else []
        for each in parsed
    ]
    ordered = order_elements(as_texts)
    return [
        f"[{', '.join(texts)}]" if isinstance(each, list) else value
        for value, each, texts in zip(values, parsed, ordered, strict=True)
    ]
