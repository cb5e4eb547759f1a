# SPDX-License-Identifier: Apache-2.0
"""Prompts of rows in which long values that rows share are prompt modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_relay.modules.prompt.plan import ModulePlan, Segment
from vllm_relay.modules.prompt.render import REPAIR_TOKENS, RenderedPrompt, TailRuns
from vllm_relay.tables.jobs.prompts.format import PromptFormat
from vllm_relay.tables.jobs.prompts.modules.layout import (
    FieldPieces,
    PlacedModule,
    place_modules,
    set_elements,
    whole_values,
)
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.ordering.columns import Column


@dataclass(frozen=True)
class ModulePrompt:
    """
    Attributes:
        message: what the user says.
        token_ids: of the templated prompt, in the order of the text and without padding.
        rendered: what the engine gets.
        num_encoded_tokens: of its modules, that no earlier prompt has used, or that have left the
            cache since; about.
    """

    message: str
    token_ids: list[int]
    rendered: RenderedPrompt
    num_encoded_tokens: int


class ModulePrompts:
    """Prompts of the rows of a table.

    Modules come first, in the order of the columns, and then the fields that have none. A row
    without modules, or too long with them, has no such prompt.

    Args:
        columns: of JSON values.
        lines: the rendered field of each column's distinct values.
        rows: in the order in which they run, int64 [rows].
        row_tokens: of each row's whole prompt, about, int64 [rows].
        cached_tokens: that the prefix cache finds of each prompt without modules, int64 [rows], in
            the order of `rows`.
        set_fields: names of columns whose values are sets.
        repairs: whether modules are repaired where they stand in a prompt.
        limit_tokens: of a prompt with its answer; None is none.
        max_answer_tokens: of the longest answer.

    Attributes:
        computed_tokens: of all prompts, about.
    """

    def __init__(
        self,
        prompt_format: PromptFormat,
        cache: BlockCache,
        columns: Sequence[Column],
        lines: Sequence[Sequence[str]],
        rows: npt.NDArray[np.int64],
        row_tokens: npt.NDArray[np.int64],
        cached_tokens: npt.NDArray[np.int64],
        *,
        set_fields: Collection[str],
        repairs: bool,
        limit_tokens: int | None,
        max_answer_tokens: int,
    ) -> None:
        self._format = prompt_format
        self._lines = lines
        self._codes = [column.codes.tolist() for column in columns]
        self._block_size = cache.block_size_tokens
        self._limit = limit_tokens
        self._max_answer = max_answer_tokens
        self._fields = [
            _pieces(column, texts, column.name in set_fields, prompt_format)
            for column, texts in zip(columns, lines, strict=True)
        ]
        [self._beginning] = prompt_format.tokens_of([prompt_format.beginning], whole=True)
        self._placed = place_modules(
            columns,
            self._fields,
            prompt_format.tokens_of,
            row_tokens=row_tokens,
            block_size_tokens=self._block_size,
            first_position=len(self._beginning),
            max_positions=None if self._limit is None else self._limit - self._max_answer,
        )
        self._columns_with_modules = [number for number, each in enumerate(self._placed) if each]
        self._repair_tokens = REPAIR_TOKENS if repairs else 0
        self._renderer = ModuleRenderer(self._beginning, self._block_size, self._repair_tokens)
        self._parts: dict[tuple[int, int], list[PlacedModule | str]] = {}
        self._separators: dict[str, list[int]] = {}
        self._encoded_tokens: dict[int, int] = {}
        self.computed_tokens = self._run(rows, row_tokens, cached_tokens, cache.num_blocks)

    def of_rows(
        self, rows: Sequence[int], fields: Sequence[Sequence[int]]
    ) -> dict[int, ModulePrompt]:
        """The prompts of those rows that have one.

        Args:
            fields: numbers of the columns of each row in their order.
        """
        parts = {
            row: self._row_parts(row, numbers)
            for row, numbers in zip(rows, fields, strict=True)
            if row in self._encoded_tokens
        }
        endings = [self._format.ending(_last_text(each)) for each in parts.values()]
        found: dict[int, ModulePrompt] = {}
        for (row, of_row), tokens in zip(
            parts.items(), self._format.tokens_of(endings), strict=True
        ):
            before = of_row[:-1] if isinstance(of_row[-1], str) else of_row
            tokenized = [
                self._separator(each) if isinstance(each, str) else each for each in before
            ]
            rendered = self._renderer.render([*tokenized, tokens]) if tokens else None
            if rendered is None or not self._fits(rendered.min_model_len):
                continue
            token_ids = list(self._beginning)
            for part in tokenized:
                token_ids += part.token_ids if isinstance(part, PlacedModule) else part
            token_ids += tokens
            texts = [each if isinstance(each, str) else each.text for each in of_row]
            message = self._format.message(texts)
            found[row] = ModulePrompt(message, token_ids, rendered, self._encoded_tokens[row])
        return found

    def _run(
        self,
        rows: npt.NDArray[np.int64],
        row_tokens: npt.NDArray[np.int64],
        cached_tokens: npt.NDArray[np.int64],
        num_blocks: int | None,
    ) -> int:
        """How many tokens are computed if the rows run one after the other."""
        module_cache = ModuleCache(num_blocks)
        num_beginning = len(self._beginning)
        computed = 0
        run = zip(rows.tolist(), row_tokens[rows].tolist(), cached_tokens.tolist(), strict=True)
        for row, num_tokens, num_cached in run:
            modules = list(self._row_modules(row))
            lengths = {each.number: len(each.token_ids) for each in modules}
            last = max((each.end_position for each in modules), default=0)
            num_new = num_tokens - num_beginning - sum(lengths.values())
            lengths[0] = num_beginning
            blocks = {number: self._num_blocks(length) for number, length in lengths.items()}
            num_slots = sum(blocks.values()) * self._block_size + num_new
            if not modules or not self._fits(max(num_slots, last + num_new)):
                computed += num_tokens - num_cached
                continue
            missing = module_cache.use(blocks, self._num_blocks(num_new + self._max_answer))
            self._encoded_tokens[row] = sum(lengths[number] for number in missing)
            num_repaired = sum(
                min(lengths[number], self._repair_tokens) for number in lengths if number
            )
            computed += self._encoded_tokens[row] + num_new + num_repaired
        return computed

    def _row_modules(self, row: int) -> Iterator[PlacedModule]:
        for number in self._columns_with_modules:
            for part in self._value_parts(number, self._codes[number][row]):
                if isinstance(part, PlacedModule):
                    yield part

    def _row_parts(self, row: int, fields: Sequence[int]) -> list[PlacedModule | str]:
        """Behind the beginning; texts are whole."""
        parts: list[PlacedModule | str] = []
        for number in self._columns_with_modules:
            parts += self._value_parts(number, self._codes[number][row])
        parts += [
            self._lines[number][self._codes[number][row]]
            for number in fields
            if not (self._placed[number] and self._value_parts(number, self._codes[number][row]))
        ]
        joined: list[PlacedModule | str] = []
        for part in parts:
            if isinstance(part, str) and joined and isinstance(joined[-1], str):
                joined[-1] += part
            elif part:
                joined.append(part)
        return joined

    def _value_parts(self, number: int, code: int) -> list[PlacedModule | str]:
        """Of a rendered field with modules; empty if it has none."""
        key = number, code
        if key not in self._parts:
            placed, field = self._placed[number], self._fields[number]
            texts = field.pieces[code]
            # one that is there twice is a module once
            modules = {text: placed[text] for text in texts if text in placed}
            pieces: list[PlacedModule | str] = [
                *sorted(modules.values(), key=lambda each: each.position)
            ]
            for text in texts:
                if modules.pop(text, None) is None:
                    pieces.append(text)
            parts: list[PlacedModule | str] = []
            if any(isinstance(piece, PlacedModule) for piece in pieces):
                parts.append(field.opening)
                for place, piece in enumerate(pieces):
                    parts += [field.separator, piece] if place else [piece]
                parts.append(field.closing)
            self._parts[key] = parts
        return self._parts[key]

    def _separator(self, text: str) -> list[int]:
        if text not in self._separators:
            [self._separators[text]] = self._format.tokens_of([text])
        return self._separators[text]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _fits(self, num_tokens: int) -> bool:
        return self._limit is None or num_tokens + self._max_answer <= self._limit


def _pieces(
    column: Column, lines: Sequence[str], is_set: bool, prompt_format: PromptFormat
) -> FieldPieces:
    found = set_elements(column, prompt_format.template) if is_set else None
    return found or whole_values(lines, prompt_format.field_end)


def _last_text(parts: Sequence[PlacedModule | str]) -> str:
    return parts[-1] if isinstance(parts[-1], str) else ""


class ModuleCache:
    """Modules in a prefix cache; of those that no prompt uses, the one that was used longest ago
    leaves first, as a whole.

    Args:
        num_blocks: KV blocks that can hold tokens; None has no limit.
    """

    def __init__(self, num_blocks: int | None) -> None:
        self._num_blocks = num_blocks
        self._held: OrderedDict[int, int] = OrderedDict()
        """Module -> its blocks; own blocks of prompts have negative numbers."""
        self._num_held = 0
        self._num_prompts = 0

    def use(self, blocks_of_modules: Mapping[int, int], num_own_blocks: int) -> list[int]:
        """The modules that were not there; they are afterwards.

        Args:
            blocks_of_modules: of a prompt; module -> KV blocks.
            num_own_blocks: of what no module of the prompt holds, and its answer.
        """
        missing = [module for module in blocks_of_modules if module not in self._held]
        self._num_prompts += 1
        self._hold(blocks_of_modules.items())
        self._hold([(-self._num_prompts, num_own_blocks)])
        if self._num_blocks is not None:
            while self._num_held > self._num_blocks and self._held:
                _, num_blocks = self._held.popitem(last=False)
                self._num_held -= num_blocks
        return missing

    def _hold(self, used: Iterable[tuple[int, int]]) -> None:
        for module, num_blocks in used:
            if module in self._held:
                self._held.move_to_end(module)
            else:
                self._held[module] = num_blocks
                self._num_held += num_blocks


class ModuleRenderer:
    """Prompts of one layout.

    Args:
        beginning: token ids of what all prompts begin with; a module too, which all others see.
        block_size_tokens: of a KV block of the engine.
        repair_tokens: of each module, that are computed anew in the context of the prompt.
    """

    def __init__(self, beginning: list[int], block_size_tokens: int, repair_tokens: int) -> None:
        self._beginning = beginning
        self._block_size = block_size_tokens
        self._repair_tokens = repair_tokens
        self._root = Segment(name="", num_tokens=len(beginning), position_runs=((0, 0),))
        self._segments: dict[int, Segment] = {}

    def render(self, parts: Sequence[PlacedModule | list[int]]) -> RenderedPrompt:
        """
        Args:
            parts: behind the beginning, in the order of the text: modules at ascending positions,
                and token ids of texts, at least of one.
        """
        segments = [self._root]
        contents = [self._beginning]
        new: list[int] = []
        tail = TailRuns()
        sees = {0: len(self._beginning)}
        end = len(self._beginning)
        for part in parts:
            if not isinstance(part, PlacedModule):
                if part:
                    new += part
                    tail.add(len(part), end, sees)
                    end += len(part)
                continue
            repaired = part.token_ids[: self._repair_tokens]
            if repaired:
                new += repaired
                tail.add(len(repaired), part.position, sees)
            sees[len(segments)] = len(part.token_ids)
            segments.append(self._segment(part))
            contents.append(part.token_ids)
            end = max(end, part.end_position)
        plan = ModulePlan(block_size=self._block_size, segments=tuple(segments), tail=tuple(tail))
        return RenderedPrompt.of_plan(plan, contents, new)

    def _segment(self, module: PlacedModule) -> Segment:
        if module.number not in self._segments:
            num_tokens = len(module.token_ids)
            num_repaired = min(num_tokens, self._repair_tokens)
            self._segments[module.number] = Segment(
                name=module.name,
                num_tokens=num_tokens,
                position_runs=((0, module.position),),
                replaced=((0, num_repaired),) if num_repaired else (),
                context=((0, len(self._beginning)),),
            )
        return self._segments[module.number]
