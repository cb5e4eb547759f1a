# SPDX-License-Identifier: Apache-2.0
"""One answer for each list of records: lists too long for a prompt are asked about in parts, and
the answers to the parts are combined, level by level, until one is left.

Patel et al., "Semantic Operators", 2024, section on sem_agg: hierarchical aggregation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from vllm_relay.arguments import check_count
from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.jobs.answers import Answer, with_max_tokens
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.prompts.format import PromptFormat
from vllm_relay.tables.question import Question
from vllm_relay.tables.semantic.record_lists import (
    RECORDS,
    about_partial_answers,
    record_list,
    value_record,
)

OPEN_CONTEXT_TOKENS = 8192
"""Of a prompt, where nobody says how long the model's context is."""
_LEAST_BYTES_PER_TOKEN = 2
"""Without a tokenizer: prompts of ordinary text have fewer tokens."""
_RECORDS_PER_PART = 4096


class RecordTooLongError(ValueError):
    """A record that fits no prompt, not even alone."""


class Packer:
    """Packs of as many records as a prompt has room for beside its longest answer.

    Args:
        question: about a list of records.
        engine: whose tokenizer counts; without one, two bytes count as a token.
        pack_tokens: of the records of a prompt at most, unless it would have fewer than
            `least_records`; None takes what the context has.
        least_records: that a prompt has where the context allows it.

    Raises:
        ValueError: `pack_tokens` is below 1.
    """

    def __init__(
        self,
        question: Question,
        engine: Engine,
        options: JobOptions,
        pack_tokens: int | None = None,
        least_records: int = 1,
    ) -> None:
        if pack_tokens is not None:
            check_count("pack_tokens", pack_tokens)
        told = replace(question, request=question.request.over(options.request))
        asked = with_max_tokens(told, engine)
        self._format = PromptFormat(asked, engine.tokenizer, options.template)
        self._has_tokenizer = engine.tokenizer is not None
        context = engine.max_model_len or OPEN_CONTEXT_TOKENS
        room = context - engine.max_answer_tokens(asked)
        cache = engine.cache
        if cache is not None and cache.num_blocks is not None:
            # prompts have fewer tokens than the KV cache, see `Planner`
            room = min(room, cache.num_blocks * cache.block_size_tokens - 1)
        self._most_prompt_tokens = room
        most_tokens = room - self._num_tokens_of_prompt([])
        self._most_tokens = most_tokens if pack_tokens is None else min(most_tokens, pack_tokens)
        self._least_records = least_records

    def lengths(self, records: Iterable[str]) -> list[int]:
        """Tokens of each, with what stands between it and the next, about."""
        found: list[int] = []
        source = iter(records)
        while part := list(islice(source, _RECORDS_PER_PART)):
            if self._has_tokenizer:
                found += map(len, self._format.tokens_of([f"{each}," for each in part]))
            else:
                found += [self._by_bytes(f"{each},") for each in part]
        return found

    def packs(self, records: Sequence[str], lengths: Sequence[int]) -> list[slice]:
        """All records, in their order.

        Args:
            lengths: of the records, see `lengths`.

        Raises:
            RecordTooLongError: of one that fits no prompt.
        """
        found: list[slice] = []
        begin = 0
        while begin < len(records):
            end, num_tokens = begin, 0
            while end < len(records) and num_tokens + lengths[end] <= self._most_tokens:
                num_tokens += lengths[end]
                end += 1
            # what follows decides: pieces are counted alone, the whole may have a token more
            end = min(max(end, begin + self._least_records), len(records))
            while self._num_tokens_of_prompt(records[begin:end]) > self._most_prompt_tokens:
                end -= 1
                if end == begin:
                    raise self._too_long(records, begin)
            found.append(slice(begin, end))
            begin = end
        return found

    def _too_long(self, records: Sequence[str], place: int) -> RecordTooLongError:
        num_tokens = self._num_tokens_of_prompt(records[place : place + 1])
        about = "" if self._has_tokenizer else "about "
        return RecordTooLongError(
            f"record {place + 1} of {len(records)} makes a prompt of {about}{num_tokens:,} tokens, "
            f"there is room for {self._most_prompt_tokens:,} beside the answer: shorten it, or "
            f"leave fields out"
        )

    def _num_tokens_of_prompt(self, records: Sequence[str]) -> int:
        line = self._format.template.render_field(RECORDS, record_list(records))
        message = self._format.message([line])
        if self._has_tokenizer:
            return len(self._format.token_ids([message])[0])
        return self._by_bytes(self._format.before) + self._by_bytes(message)

    @staticmethod
    def _by_bytes(text: str) -> int:
        return -(-len(text.encode()) // _LEAST_BYTES_PER_TOKEN)


AskLevel = Callable[[Question, list[str]], list[Answer]]
"""Asks a question about lists of records, one prompt for each different one."""

_LEAST_COMBINED = 2
"""Partial answers of a prompt: with one there would be no end."""


@dataclass
class _Group:
    """
    Attributes:
        place: of it.
        items: JSON of its records, or of its partial answers.
        packs: of the items.
        note: what is wrong with a partial answer that counts nevertheless.
    """

    place: int
    items: list[str]
    packs: list[slice]
    note: str | None = None


def first_packs(groups: Sequence[Sequence[str]], packer: Packer) -> list[list[slice] | Answer]:
    """The packs of each group's records, or the answer of a group that is not asked about."""
    lengths = iter(packer.lengths(each for records in groups for each in records))
    found: list[list[slice] | Answer] = []
    for records in groups:
        own = [next(lengths) for _ in records]
        if not records:
            found.append(Answer())
            continue
        try:
            found.append(packer.packs(records, own))
        except RecordTooLongError as error:
            found.append(Answer(error=str(error)))
    return found


def answer_groups(
    groups: Sequence[Sequence[str]],
    question: Question,
    engine: Engine,
    options: JobOptions,
    ask: AskLevel,
    pack_tokens: int | None = None,
) -> list[Answer]:
    """
    Args:
        groups: JSON of the records of each, in their order.
        question: about a list of records.
        engine: that is asked; it is not needed where there are no records.
        ask: is called once for each level of all groups.
        pack_tokens: see `Packer`.

    Returns:
        The answer of each group. One without records has none, and no error. A group has the first
        error of its parts; a partial answer that was cut counts, and the group's answer says so.
    """
    answers: list[Answer] = [Answer()] * len(groups)
    if not any(groups):
        return answers
    active: list[_Group] = []
    packer = Packer(question, engine, options, pack_tokens)
    for place, found in enumerate(first_packs(groups, packer)):
        if isinstance(found, Answer):
            answers[place] = found
        else:
            active.append(_Group(place, list(groups[place]), found))
    is_first = True
    while active:
        active = _next_level(active, answers, question, ask, is_first)
        if is_first:
            question, is_first = about_partial_answers(question), False
        packer = Packer(question, engine, options, pack_tokens, _LEAST_COMBINED)
        active = [group for group in active if _is_packed(group, packer, answers)]
    return answers


def _next_level(
    active: list[_Group], answers: list[Answer], question: Question, ask: AskLevel, is_first: bool
) -> list[_Group]:
    """Ask about all packs of a level.

    Returns:
        The groups that have more than one answer; those of the others are written.
    """
    asked = [
        (group, pack)
        for group in active
        for pack in group.packs
        # a partial answer alone is its own combination
        if is_first or pack.stop - pack.start > 1
    ]
    texts = [record_list(group.items[pack]) for group, pack in asked]
    came = iter(ask(question, texts))
    following: list[_Group] = []
    for group in active:
        items: list[str] = []
        error: str | None = None
        last = Answer()
        for pack in group.packs:
            if not is_first and pack.stop - pack.start == 1:
                items.append(group.items[pack.start])
                continue
            last = next(came)
            if last.value is None:
                error = error or _error_of_pack(group, pack, last, is_first)
            elif len(group.packs) > 1:
                items.append(value_record(question.output, last.value))
                if last.error is not None and group.note is None:
                    group.note = f"a partial answer is not whole: {last.error}"
        if error is not None:
            answers[group.place] = Answer(error=error)
        elif len(group.packs) == 1:
            answers[group.place] = replace(last, error=last.error or group.note)
        else:
            following.append(_Group(group.place, items, [], group.note))
    return following


def _error_of_pack(group: _Group, pack: slice, answer: Answer, is_first: bool) -> str:
    error = answer.error or "there is no answer"
    if len(group.packs) == 1 and is_first:
        return error
    what = "records" if is_first else "partial answers"
    return f"{what} {pack.start + 1} to {pack.stop} of {len(group.items)}: {error}"


def _is_packed(group: _Group, packer: Packer, answers: list[Answer]) -> bool:
    """Whether a group's partial answers can be combined; else it has an error."""
    try:
        group.packs = packer.packs(group.items, packer.lengths(group.items))
    except RecordTooLongError as error:
        answers[group.place] = Answer(error=f"of the partial answers, {error}")
        return False
    if len(group.packs) == len(group.items):
        answers[group.place] = Answer(
            error=f"no two of {len(group.items)} partial answers that follow each other fit into "
            f"one prompt: give fewer max_tokens"
        )
        return False
    return True
