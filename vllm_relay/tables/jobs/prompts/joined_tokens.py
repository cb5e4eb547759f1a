# SPDX-License-Identifier: Apache-2.0
"""Tokens of prompts, put together from those of their fields where that gives the same.

A rendered field ends with a newline, and the next begins with a mark, such as a quotation mark. If
no token of the vocabulary has the mark right after a newline, none reaches from one field into the
next. Values that many rows share are then tokenized once. What a tokenizer does otherwise cannot be
known for sure: some prompts are tokenized as a whole, and one that differs ends the joining.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from vllm_relay.tables.jobs.prompts.format import PromptFormat
from vllm_relay.tables.ordering.columns import Column

_TEXTS_PER_CALL = 4096
_CHARS_PER_CALL = 1 << 18
_PROMPTS_PER_CHECK = 32
# how tokens of bytes write a newline
_NEWLINES = ("\n", "\N{LATIN CAPITAL LETTER C WITH DOT ABOVE}")

TokenIds = Sequence[int]


class FieldTokens:
    """Tokens of the rendered fields of one question.

    Attributes:
        can_join: whether prompts may be put together; becomes False for good where one differs.
        last_is_as_others: whether a field at the end of a prompt has the tokens of one that another
            follows: what stands behind the fields begins with a newline.
        before, after: of what stands in front of the fields and behind them.
    """

    def __init__(self, prompt_format: PromptFormat) -> None:
        self._format = prompt_format
        self._mark = prompt_format.field_mark
        self.last_is_as_others = prompt_format.after.startswith("\n")
        self.before: TokenIds = ()
        self.after: TokenIds = ()
        self.can_join = self._may_join()

    def of_last(self, fields: Iterable[str]) -> Iterator[TokenIds]:
        """Of fields at the end of prompts."""
        if self.last_is_as_others:
            return self.of_others(fields)
        return self._tokens(field.removesuffix("\n") for field in fields)

    def of_others(self, fields: Iterable[str]) -> Iterator[TokenIds]:
        """Of fields that others follow."""
        if not self.can_join:
            return self._tokens(fields)
        # a newline is another token at the end of a text than in front of something
        followed = self._tokens(field + self._mark for field in fields)
        return (token_ids[:-1] for token_ids in followed)

    def _tokens(self, texts: Iterable[str]) -> Iterator[TokenIds]:
        """Some at a time: tokenizers take a hundred bytes for a token."""
        batch: list[str] = []
        num_chars = 0
        for text in texts:
            batch.append(text)
            num_chars += len(text)
            if num_chars >= _CHARS_PER_CALL or len(batch) == _TEXTS_PER_CALL:
                yield from self._format.packed_tokens(batch)
                batch, num_chars = [], 0
        yield from self._format.packed_tokens(batch)

    def _may_join(self) -> bool:
        vocabulary = self._format.vocabulary
        mark, after = self._mark, self._format.after
        if not vocabulary or not mark or not self._format.before.endswith("\n"):
            return False
        starts = [mark]
        if self.last_is_as_others:
            after = after[1:]
            starts.append(after[:1])
        elif after and not self._format.begins_with_special_token(after):
            return False
        spanning = [newline + start for newline in _NEWLINES for start in starts]
        if any(text in token for token in vocabulary for text in spanning):
            return False
        mark_tokens = self._format.tokens_of([mark])[0]
        before = self._format.tokens_of([self._format.before + mark], whole=True)[0]
        if len(mark_tokens) != 1 or before[-1:] != mark_tokens:
            return False
        self.before = before[:-1]
        self.after = self._format.tokens_of([after])[0] if after else []
        return True


class PromptTokens:
    """Tokens of the prompts of rows that are ordered together.

    Args:
        columns: of the rows, with the tokens of fields at the end of prompts.
        lines: the rendered field of each value of each column.
    """

    def __init__(
        self,
        field_tokens: FieldTokens,
        prompt_format: PromptFormat,
        columns: Sequence[Column],
        lines: Sequence[Sequence[str]],
    ) -> None:
        self._fields = field_tokens
        self._format = prompt_format
        self._columns = columns
        self._lines = lines
        self._num_rows = [np.bincount(each.codes, minlength=each.num_values) for each in columns]
        self._others: list[dict[int, TokenIds]] = [{} for _ in columns]
        self._is_checked = False

    def of(
        self, cells: Sequence[Sequence[tuple[int, int]]], messages: Sequence[str]
    ) -> list[list[int]]:
        """
        Args:
            cells: the column and the value's code of each field of each prompt, in their order.
        """
        if not self._fields.can_join:
            return self._format.token_ids(messages)
        joined = self._joined(cells)
        # all of the first ones, then some
        step = _PROMPTS_PER_CHECK if self._is_checked else 1
        self._is_checked = True
        if joined[::step] == self._format.token_ids(messages[::step]):
            return joined
        self._fields.can_join = False
        return self._format.token_ids(messages)

    def _joined(self, cells: Sequence[Sequence[tuple[int, int]]]) -> list[list[int]]:
        added = [] if self._fields.last_is_as_others else self._add_others(cells)
        before, after = self._fields.before, self._fields.after
        prompts = []
        for *begin, (last, last_code) in cells:
            token_ids = list(before)
            for column, code in begin:
                token_ids += self._of_other(column, code)
            token_ids += self._of_last(last, last_code)
            token_ids += after
            prompts.append(token_ids)
        for column, code in added:
            if self._num_rows[column][code] == 1:
                del self._others[column][code]
        return prompts

    def _of_last(self, column: int, code: int) -> list[int]:
        return self._columns[column].tokens[code].tolist()

    def _of_other(self, column: int, code: int) -> TokenIds:
        if self._fields.last_is_as_others:
            return self._of_last(column, code)
        return self._others[column][code]

    def _add_others(self, cells: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
        used = chain.from_iterable(each[:-1] for each in cells)
        missing = [
            (column, code)
            for column, code in dict.fromkeys(used)
            if code not in self._others[column]
        ]
        tokens = self._fields.of_others(self._lines[column][code] for column, code in missing)
        for (column, code), token_ids in zip(missing, tokens, strict=True):
            self._others[column][code] = token_ids
        return missing
