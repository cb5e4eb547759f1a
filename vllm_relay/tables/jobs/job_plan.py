# SPDX-License-Identifier: Apache-2.0
"""What becomes of every row of a job; one bucket is planned while another is asked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import pyarrow as pa

from vllm_relay.tables.engines.base import Engine, images_refusal, modules_refusal
from vllm_relay.tables.jobs.answers import Answer, error_answer, read_answer, with_max_tokens
from vllm_relay.tables.jobs.checkpoint import Checkpoint, Keys, KnownAnswer
from vllm_relay.tables.jobs.options import RULES, JobOptions
from vllm_relay.tables.jobs.prompts.format import text_of
from vllm_relay.tables.jobs.prompts.planner import Limits, OrderedRows, PlannedPrompt, Planner
from vllm_relay.tables.jobs.prompts.set_fields import sorted_list
from vllm_relay.tables.question import Question

NULL = "null"
"""The JSON of a field without a value."""
_FIRST_ROWS = 128
_GROWTH = 16
"""Of the first bucket, and from one to the next: asking begins at once, and goes on while larger
ones are planned."""
_ROWS_PER_PART = 256


@dataclass(frozen=True)
class Bucket:
    """Rows that are ordered together.

    Attributes:
        numbers: of the rows, different ones in all buckets of a job.
        counts: how often the source has each.
        fields: JSON of each of the question's fields, as texts, or NULL.
    """

    numbers: list[int]
    counts: list[int]
    fields: pa.Table


def bucket_bounds(num_rows: int, max_rows: int) -> Iterator[tuple[int, int]]:
    """The first row of each bucket, and the one behind its last."""
    begin, size = 0, min(_FIRST_ROWS, max_rows)
    while begin < num_rows:
        end = min(begin + size, num_rows)
        yield begin, end
        begin, size = end, min(size * _GROWTH, max_rows)


@dataclass(slots=True)
class Kind:
    """Rows that become the same prompt.

    Attributes:
        numbers: of the distinct rows. They are several by rules, and where different values have
            the same JSON.
        num_rows: of the source.
        key: of the answer in the checkpoint.
        answer: once there is one.
        num_tokens: of a prompt and its answer, once there is one.
    """

    numbers: list[int]
    num_rows: int
    key: bytes
    answer: Answer | None = None
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AskedRows:
    """Rows to ask about; the prompt's number is one of its own in the job."""

    kind: Kind
    planned: PlannedPrompt


@dataclass(frozen=True, slots=True)
class SettledRows:
    """Rows whose answer is in the checkpoint, `known`, or whose prompt cannot run."""

    kind: Kind
    answer: Answer
    known: KnownAnswer | None = None


@dataclass(frozen=True, slots=True)
class NullRows:
    """Rows of which nothing is known: they are not asked about."""

    numbers: list[int]


@dataclass(frozen=True, slots=True)
class EqualRows:
    """Rows of a kind that an earlier bucket has."""

    kind: Kind
    numbers: list[int]
    num_rows: int


Step: TypeAlias = "AskedRows | SettledRows | NullRows | EqualRows"


@dataclass
class _Sorted:
    """A bucket by what becomes of its rows."""

    steps: list[Step] = field(default_factory=list)
    unknown: list[Kind] = field(default_factory=list)
    ordered: Future[OrderedRows] | None = None


class JobPlan:
    """
    Args:
        buckets: of the rows that are asked about, all different.
        question: as it was given.
        engine: of which the tokenizer, the prefix cache and the limits count.

    Attributes:
        question: that is asked, with its `max_tokens`.
        order_names: rows by the name of the order that was chosen for their bucket.
        num_by_rules: rows that are left out only because rules make their texts equal.

    Raises:
        ValueError: the options ask for modules, or the question for images, and the engine takes
            none; or there are images and modules, or images and a budget.
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        question: Question,
        engine: Engine,
        options: JobOptions,
        checkpoint: Checkpoint,
    ) -> None:
        if options.modules != "off" and (reason := modules_refusal(engine)):
            raise ValueError(
                f"modules={options.modules!r} given, but the engine takes no prompt modules: "
                f'{reason}. Give LLM(..., attention_backend="relay", '
                f'additional_config={{"relay": {{"scheduler": True}}}}), or modules="off"'
            )
        if question.images is not None:
            _check_images(engine, options)
        self._buckets = buckets
        self.question = with_max_tokens(question, engine)
        self._options = options
        self._checkpoint = checkpoint
        is_kept = options.order == "keep"
        self._keys = Keys(engine.identity, question, options.template, is_kept, options.modules)
        limits = Limits(engine.max_model_len, engine.max_answer_tokens(self.question))
        self._planner = Planner(self.question, engine.tokenizer, engine.cache, options, limits)
        self._keeps_kinds = bool(options.rules or question.set_fields)
        self._kinds: dict[bytes, Kind] = {}
        self.order_names: Counter[str] = Counter()
        self.num_by_rules = 0

    @property
    def order_name(self) -> str:
        """Of the order of most rows; "" before there is one."""
        return next((name for name, _ in self.order_names.most_common(1)), "")

    def steps(self) -> Generator[Step, None, None]:
        """Every row once. While the steps of a bucket are taken, the next one is ordered."""
        with ThreadPoolExecutor(1, "relay-plan") as thread:
            current: _Sorted | None = None
            for bucket in self._buckets:
                following = self._sorted_out(bucket, thread)
                if current is not None:
                    yield from self._steps_of(current)
                elif following.ordered is not None:
                    # nothing to do meanwhile
                    following.ordered.result()
                current = following
            if current is not None:
                yield from self._steps_of(current)

    def _steps_of(self, bucket: _Sorted) -> Generator[Step, None, None]:
        yield from bucket.steps
        if bucket.ordered is None:
            return
        ordered = bucket.ordered.result()
        self.order_names[ordered.order_name] += ordered.num_ordered
        for found in ordered.prompts():
            kind = bucket.unknown[found.row]
            if isinstance(found, PlannedPrompt):
                # numbers of rows differ in all buckets
                prompt = replace(found.prompt, number=kind.numbers[0])
                yield AskedRows(kind, replace(found, prompt=prompt))
            else:
                yield SettledRows(kind, error_answer(found.error))

    def _sorted_out(self, bucket: Bucket, thread: ThreadPoolExecutor) -> _Sorted:
        found = _Sorted()
        kinds = self._new_kinds(bucket, found)
        known = self._checkpoint.known([kind.key for kind, _ in kinds])
        places: list[int] = []
        for kind, place in kinds:
            answer = self._usable(known.get(kind.key))
            if answer is not None:
                found.steps.append(SettledRows(kind, answer, known[kind.key]))
            else:
                found.unknown.append(kind)
                places.append(place)
        if places:
            fields = bucket.fields
            if len(places) < fields.num_rows:
                fields = fields.take(places)
            found.ordered = thread.submit(self._planner.order, fields)
        return found

    def _usable(self, known: KnownAnswer | None) -> Answer | None:
        """None where the row is to be asked about."""
        if known is None:
            return None
        answer = read_answer(
            self.question.output, known.text, known.num_output_tokens, known.is_cut
        )
        return None if answer.error is not None and self._options.retry_errors else answer

    def _new_kinds(self, bucket: Bucket, found: _Sorted) -> list[tuple[Kind, int]]:
        """Those that no earlier bucket has, with the place of their first row; what becomes of the
        other rows is added to `found`."""
        if not self._keeps_kinds:
            self._kinds.clear()
        new: dict[int, tuple[Kind, int]] = {}
        nulls: list[int] = []
        rows = zip(self._values(bucket.fields), bucket.numbers, bucket.counts, strict=True)
        for place, (values, number, num_rows) in enumerate(rows):
            if all(value == NULL for value in values):
                nulls.append(number)
                continue
            kind = self._kind_of(values)
            if not kind.numbers:
                new[id(kind)] = (kind, place)
            elif id(kind) not in new:
                found.steps.append(EqualRows(kind, [number], num_rows))
                continue
            kind.numbers.append(number)
            kind.num_rows += num_rows
        if nulls:
            found.steps.append(NullRows(nulls))
        return list(new.values())

    def _values(self, fields: pa.Table) -> Iterator[tuple[str, ...]]:
        """JSON of each row, in which equal sets are written alike."""
        for begin in range(0, fields.num_rows, _ROWS_PER_PART):
            part = fields.slice(begin, _ROWS_PER_PART)
            columns = [each.fill_null(NULL).to_pylist() for each in part.columns]
            for i, name in enumerate(self.question.fields):
                if name in self.question.set_fields:
                    columns[i] = list(map(sorted_list, columns[i]))
            yield from zip(*columns, strict=True)

    def _kind_of(self, values: Sequence[str]) -> Kind:
        """Of a row; without rows if it is new."""
        key = self._keys.of(values)
        kind = self._kinds.get(key)
        if kind is not None:
            return kind
        if not self._options.rules:
            kind = self._kinds[key] = Kind([], 0, key)
            return kind
        by_rules = b"rules" + self._keys.of([self._by_rules(value) for value in values])
        kind = self._kinds.get(by_rules)
        if kind is None:
            kind = self._kinds[by_rules] = Kind([], 0, key)
        else:
            self.num_by_rules += 1
        self._kinds[key] = kind
        return kind

    def _by_rules(self, value: str) -> str:
        """The text that stands for all that are held to be equal; a NULL is no text."""
        if value == NULL:
            return value
        text = text_of(value)
        for rule in self._options.rules:
            text = RULES[rule](text)
        return json.dumps(text)


def _check_images(engine: Engine, options: JobOptions) -> None:
    if reason := images_refusal(engine):
        raise ValueError(
            f"images given, but {reason}: give a model that takes images, or the address of a "
            f"server that has one, http://..."
        )
    if options.modules != "off":
        raise ValueError(
            f"modules={options.modules!r} given with images, whose prompts have none: give 'off'"
        )
    if options.max_total_tokens is not None:
        raise ValueError(
            f"max_total_tokens={options.max_total_tokens} given with images, whose tokens only the "
            f"server knows, afterwards: leave one of them out"
        )
