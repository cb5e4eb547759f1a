# SPDX-License-Identifier: Apache-2.0
"""One answer for each list of records: lists too long for a prompt are asked about in parts, and
the answers to the parts are combined, level by level, until one is left.

Patel et al., "Semantic Operators", 2024, section on sem_agg: hierarchical aggregation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.jobs.answers import Answer
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.question import Question
from vllm_relay.tables.semantic.packs import Pack, Packer, RecordTooLongError
from vllm_relay.tables.semantic.record_lists import (
    about_partial_answers,
    record_list,
    value_record,
)

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
    packs: list[Pack]
    note: str | None = None


def first_packs(groups: Sequence[Sequence[str]], packer: Packer) -> list[list[Pack] | Answer]:
    """The packs of each group's records, or the answer of a group that is not asked about."""
    lengths = iter(packer.lengths(each for records in groups for each in records))
    found: list[list[Pack] | Answer] = []
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
        if is_first or pack.end - pack.begin > 1
    ]
    texts = [record_list(group.items[pack.begin : pack.end]) for group, pack in asked]
    came = iter(ask(question, texts))
    following: list[_Group] = []
    for group in active:
        items: list[str] = []
        error: str | None = None
        last = Answer()
        for pack in group.packs:
            if not is_first and pack.end - pack.begin == 1:
                items.append(group.items[pack.begin])
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


def _error_of_pack(group: _Group, pack: Pack, answer: Answer, is_first: bool) -> str:
    error = answer.error or "there is no answer"
    if len(group.packs) == 1 and is_first:
        return error
    what = "records" if is_first else "partial answers"
    return f"{what} {pack.begin + 1} to {pack.end} of {len(group.items)}: {error}"


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
