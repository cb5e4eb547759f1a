# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a modular prompt lie, which positions they have and what they see.

A prompt's slots are its stored segments, one after the other, each padded to whole KV blocks, and
then its tail: what no module holds. Slots say where keys and values lie; positions, which the
schema gives, say where tokens stand in the text. A token sees the earlier tokens of its own
segment, or all of the tail before it, and of the segments before it as much as the text has before
it. Padding and placeholders are seen by nobody else.

Source: Prompt Cache (Gim et al., 2024), sections 3.3 and 3.4.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec.structs import replace

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Length = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Ranges = tuple[tuple[Count, Count], ...]
T = TypeVar("T")


class Segment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens that are computed once and kept: the text of a module without the modules in it."""

    name: str  # the path of its module; "" for what every prompt has
    num_tokens: Length
    position_runs: tuple[tuple[Count, Count], ...]
    """Offset of the first token and its position, for each run of successive positions."""
    placeholders: Ranges = ()  # ranges of offsets whose tokens only this segment sees
    placeholder_tokens: tuple[Count, ...] = ()
    """These tokens. In prompts that use the segment others lie there, which the prompt has anyway,
    so that penalties see nothing that is not in the prompt."""
    replaced: Ranges = ()
    """Offsets that nobody sees in this prompt, as tokens of the tail stand for them."""
    context: tuple[tuple[Count, Length], ...] = ()
    """The segments it sees, by their place in the plan, and how many of their tokens."""

    def check(self) -> None:
        """A ValueError says how it contradicts itself."""
        offsets = [offset for offset, _ in self.position_runs]
        if not offsets or offsets[0] != 0 or sorted(set(offsets)) != offsets:
            raise ValueError(f"segment {self.name!r}: position_runs do not begin at 0 and ascend")
        if offsets[-1] >= self.num_tokens:
            raise ValueError(f"segment {self.name!r}: a run of positions begins behind its tokens")
        for ranges in (self.placeholders, self.replaced):
            edges = [edge for each in ranges for edge in each]
            if sorted(edges) != edges or any(begin == end for begin, end in ranges):
                raise ValueError(f"segment {self.name!r}: ranges {ranges} are not ascending")
            if edges and edges[-1] > self.num_tokens:
                raise ValueError(f"segment {self.name!r}: ranges {ranges} end behind its tokens")
        num_placeholders = sum(end - begin for begin, end in self.placeholders)
        if len(self.placeholder_tokens) != num_placeholders:
            raise ValueError(
                f"segment {self.name!r}: {len(self.placeholder_tokens)} placeholder_tokens for "
                f"{num_placeholders} placeholders"
            )

    @property
    def num_seen_tokens(self) -> int:
        """How many tokens others may see."""
        end, num_unseen = 0, 0
        for begin, range_end in sorted((*self.placeholders, *self.replaced)):
            num_unseen += max(range_end - max(begin, end), 0)
            end = max(end, range_end)
        return self.num_tokens - num_unseen

    def positions(self, num_slots: int) -> list[int]:
        """Of its tokens, and of so many slots; those of padding repeat the last one."""
        positions: list[int] = []
        for offset, position, end in self._runs():
            positions += range(position, position + end - offset)
        return positions + [positions[-1]] * (num_slots - self.num_tokens)

    @property
    def end_position(self) -> int:
        """Behind the largest position of its tokens."""
        return max(position + end - offset for offset, position, end in self._runs())

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Of successive positions: first offset, its position, and end."""
        ends = [*(offset for offset, _ in self.position_runs[1:]), self.num_tokens]
        for (offset, position), end in zip(self.position_runs, ends, strict=True):
            yield offset, position, end


class TailRun(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens of the tail with successive positions that see the same of all segments.

    Attributes:
        sees: segments by their place in the plan, and how many of their tokens; what is not named
            is seen as by the run before, and by the first run not at all.
    """

    num_tokens: Length
    position: Count
    sees: tuple[tuple[Count, Count], ...] = ()


class ModulePlan(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True
):
    """Of one request. What is made of it is as long as the plan, not as its segments times runs."""

    block_size: Length  # tokens of a KV block
    segments: tuple[Segment, ...]  # in the order of their slots
    tail: tuple[TailRun, ...] = ()
    """What follows; empty if the last segment is to be computed, and nothing else."""

    def check(self) -> None:
        """Of plans that come from elsewhere: a ValueError says how one contradicts itself."""
        if not self.segments and not self.tail:
            raise ValueError("a plan needs a segment or a tail")
        for number, segment in enumerate(self.segments):
            segment.check()
            for index, visible in segment.context:
                if index >= number or visible > self.segments[index].num_tokens:
                    raise ValueError(f"segment {segment.name!r}: its context is not before it")
        names = {(each.position_runs, each.num_tokens, each.context) for each in self.segments}
        if len(names) < len(self.segments):
            raise ValueError("two segments have the same positions and see the same")
        for run in self.tail:
            for index, visible in run.sees:
                if index >= len(self.segments) or visible > self.segments[index].num_tokens:
                    raise ValueError("tail: it sees tokens that are not there")

    @property
    def encodes(self) -> bool:
        """Whether its last segment is computed, instead of a tail."""
        return not self.tail

    @cached_property
    def first_slots(self) -> tuple[int, ...]:
        """Of the segments, and of the tail."""
        return tuple(accumulate(map(self.num_slots, self.segments), initial=0))

    @property
    def num_stored_slots(self) -> int:
        """Those which have to be there before the request is computed."""
        return self.first_slots[-2 if self.encodes else -1]

    @cached_property
    def num_prompt_slots(self) -> int:
        return self.first_slots[-1] + sum(run.num_tokens for run in self.tail)

    @cached_property
    def num_hidden_slots(self) -> int:
        """The slots before its last token which that does not see."""
        return sum(end - begin for begin, end in self.last_hidden_slots)

    @cached_property
    def last_hidden_slots(self) -> Ranges:
        """Those which its last token does not see, nor generated ones."""
        return self.hidden_slots(self._visible(len(self.tail)))

    @property
    def end_position(self) -> int:
        """Behind the last position of all tokens, placeholders included."""
        ends = [run.position + run.num_tokens for run in self.tail]
        return max([*ends, *(segment.end_position for segment in self.segments)])

    @property
    def answer_position(self) -> int:
        """Of the first generated token, behind the tail."""
        last = self.tail[-1]
        return last.position + last.num_tokens

    def num_slots(self, segment: Segment) -> int:
        """Of a segment, with its padding."""
        return -(-segment.num_tokens // self.block_size) * self.block_size

    def chains(self, blocks: Sequence[T]) -> Iterator[Sequence[T]]:
        """The KV blocks of the request from the first on, cut where a block is of use without the
        one before it: by segments, and the tail."""
        first_blocks = [slot // self.block_size for slot in self.first_slots]
        for first, end in zip(first_blocks, [*first_blocks[1:], len(blocks)], strict=True):
            if blocks[first:end]:
                yield blocks[first:end]

    @cached_property
    def run_slots(self) -> tuple[int, ...]:
        """The first slots of what the request computes, by runs that see the same, and the end."""
        if self.encodes:
            return (self.num_stored_slots, self.num_prompt_slots)
        lengths = (run.num_tokens for run in self.tail)
        return tuple(accumulate(lengths, initial=self.num_stored_slots))

    def computed_runs(self, begin: int = 0) -> Iterator[tuple[int, int, list[int]]]:
        """First slot and end of the runs that end behind a slot, with what is visible of the
        segments; valid until the next is asked for. Generated tokens see what the last run sees."""
        slots = self.run_slots
        first = min(bisect_right(slots, begin, 1) - 1, len(slots) - 2)
        visible = self._visible(first + 1)
        for number in range(first, len(slots) - 1):
            if number > first:
                _update(visible, self.tail[number])
            yield slots[number], slots[number + 1], visible

    def _visible(self, num_runs: int) -> list[int]:
        """Of each segment, how many tokens the last of so many runs sees."""
        visible = [0] * (len(self.segments) - self.encodes)
        if self.encodes:
            for index, num_tokens in self.segments[-1].context:
                visible[index] = num_tokens
        for run in self.tail[:num_runs]:
            _update(visible, run)
        return visible

    def hidden_slots(self, visible: Sequence[int]) -> Ranges:
        """The stored slots that tokens do not see which see this much of the segments."""
        hidden: list[tuple[int, int]] = []
        for segment, first, num_visible in zip(
            self.segments, self.first_slots, visible, strict=False
        ):
            ranges: Sequence[tuple[int, int]] = ()
            if segment.placeholders or segment.replaced:
                ranges = [
                    (begin, min(end, num_visible))
                    for begin, end in sorted((*segment.placeholders, *segment.replaced))
                    if begin < num_visible
                ]
            for begin, end in (*ranges, (num_visible, self.num_slots(segment))):
                if begin < end and hidden and hidden[-1][1] >= first + begin:
                    hidden[-1] = (hidden[-1][0], max(hidden[-1][1], first + end))
                elif begin < end:
                    hidden.append((first + begin, first + end))
        return tuple(hidden)

    @cached_property
    def _prompt_positions(self) -> list[int]:
        """Of the slots that the request computes, up to the end of its prompt."""
        if self.encodes:
            segment = self.segments[-1]
            return segment.positions(self.num_slots(segment))
        return [run.position + i for run in self.tail for i in range(run.num_tokens)]

    def positions_from(self, begin: int, count: int) -> list[int]:
        """Of successive slots, counted from the first one that the request computes. Generated
        tokens go on behind the last one of the prompt."""
        positions = self._prompt_positions
        num_behind = max(begin + count - len(positions), 0)
        next_position = positions[-1] + 1 + max(begin - len(positions), 0)
        behind = range(next_position, next_position + min(num_behind, count))
        return [*positions[begin : begin + count], *behind]

    def seen_tokens(self, token_ids: list[int]) -> list[int]:
        """What the prompt's last token sees, and itself, of the tokens of all slots."""
        seen: list[int] = []
        slot = 0
        for begin, end in self.last_hidden_slots:
            seen += token_ids[slot:begin]
            slot = end
        return seen + token_ids[slot:]

    def segment_tokens(self, index: int, token_ids: Sequence[int]) -> list[int]:
        """The tokens of a segment, padding excluded, from those of the prompt's slots."""
        segment, first = self.segments[index], self.first_slots[index]
        tokens = list(token_ids[first : first + segment.num_tokens])
        offsets = (offset for begin, end in segment.placeholders for offset in range(begin, end))
        for offset, token in zip(offsets, segment.placeholder_tokens, strict=True):
            tokens[offset] = token
        return tokens

    def encoding_plan(self, index: int) -> ModulePlan:
        """Of the request that computes a segment: those it sees, and then itself."""
        places = {old: new for new, old in enumerate(self._needed(index))}

        def moved(each: Segment) -> Segment:
            context = tuple((places[old], visible) for old, visible in each.context)
            return replace(each, context=context, replaced=())

        segments = tuple(moved(self.segments[each]) for each in places)
        return ModulePlan(block_size=self.block_size, segments=segments)

    def encoding_slots(self, index: int) -> list[tuple[int, int]]:
        """The slots of this request that hold the tokens of `encoding_plan(index)`, in order."""
        slots = self.first_slots
        return [(slots[each], slots[each + 1]) for each in self._needed(index)]

    def encoding_tokens(self, index: int, token_ids: Sequence[int]) -> list[int]:
        """Of the slots of `encoding_plan(index)`, from those of this plan."""
        found: list[int] = []
        for each in self._needed(index):
            tokens = self.segment_tokens(each, token_ids)
            padding = self.num_slots(self.segments[each]) - len(tokens)
            found += tokens + tokens[-1:] * padding
        return found

    def _needed(self, index: int) -> list[int]:
        """The segments that a segment sees, those that these see, and itself."""
        needed = {index}
        for each in reversed(range(index + 1)):
            if each in needed:
                needed |= {seen for seen, _ in self.segments[each].context}
        return sorted(needed)

    def to_argument(self) -> str:
        """For `SamplingParams.extra_args`: a text, which nobody has to copy."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def of_argument(cls, argument: Any) -> ModulePlan:
        """The plan of such a text; else a ValueError."""
        if not isinstance(argument, str):
            raise ValueError(f"given a {type(argument).__name__}, expected the text of a plan")
        try:
            return msgspec.json.decode(argument, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"expected a plan: {error}") from None


EXTRA_ARG = "relay_modules"
"""The key of a plan in `SamplingParams.extra_args`."""

MISSED = "relay_missed_modules"
"""The attribute of requests and of their last outputs with the places of segments that were not in
the cache, and were computed for them."""


def plan_of(sampling_params: Any) -> ModulePlan | None:
    """The plan that a request comes with; front ends have checked it."""
    extra_args = getattr(sampling_params, "extra_args", None)
    given = extra_args.get(EXTRA_ARG) if extra_args else None
    return None if given is None else ModulePlan.of_argument(given)


def plan_of_request(request: Any) -> ModulePlan | None:
    """Of a request of the engine core; read once."""
    try:
        return request.relay_plan
    except AttributeError:
        plan = request.relay_plan = plan_of(getattr(request, "sampling_params", None))
        return plan


def _update(visible: list[int], run: TailRun) -> None:
    for index, num_tokens in run.sees:
        visible[index] = num_tokens
