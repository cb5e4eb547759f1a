# SPDX-License-Identifier: Apache-2.0
"""Which records of a list stand in one prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from vllm_relay.arguments import check_count
from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.jobs.answers import with_max_tokens
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.prompts.format import PromptFormat
from vllm_relay.tables.question import Question
from vllm_relay.tables.semantic.record_lists import RECORDS, record_list

OPEN_CONTEXT_TOKENS = 8192
"""Of a prompt, where nobody says how long the model's context is."""
_LEAST_BYTES_PER_TOKEN = 2
"""Without a tokenizer: prompts of ordinary text have fewer tokens."""
_RECORDS_PER_PART = 4096


class RecordTooLongError(ValueError):
    """A record that fits no prompt, not even alone."""


@dataclass(frozen=True)
class Pack:
    """The records from `begin` on, up to the one before `end`."""

    begin: int
    end: int


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

    def packs(self, records: Sequence[str], lengths: Sequence[int]) -> list[Pack]:
        """All records, in their order.

        Args:
            lengths: of the records, see `lengths`.

        Raises:
            RecordTooLongError: of one that fits no prompt.
        """
        found: list[Pack] = []
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
            found.append(Pack(begin, end))
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
