# SPDX-License-Identifier: Apache-2.0
"""Placed modules and texts of a prompt, as the engine gets them.

The same as `modules.render` makes of a schema and a prompt. Here nothing is read from
markup, so values may hold any text, and a prompt costs no more if there are many modules.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_relay.modules.prompt.plan import ModulePlan, Segment, TailRun
from vllm_relay.modules.prompt.render import RenderedPrompt
from vllm_relay.tables.jobs.module_layout import PlacedModule


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
        new: list[tuple[list[int], int, tuple[int, ...]]] = []
        """Tokens, their first position, and how much of each segment so far stands before them."""
        end = len(self._beginning)
        for part in parts:
            seen = tuple(segment.num_tokens for segment in segments)
            if not isinstance(part, PlacedModule):
                if part:
                    new.append((part, end, seen))
                    end += len(part)
                continue
            repaired = part.token_ids[: self._repair_tokens]
            if repaired:
                new.append((repaired, part.position, seen))
            segments.append(self._segment(part))
            contents.append(part.token_ids)
            end = max(end, part.end_position)
        plan = ModulePlan(
            block_size=self._block_size,
            segments=tuple(segments),
            tail=_tail(new, len(segments)),
        )
        token_ids: list[int] = []
        # in padding a token that is there, so that penalties see nothing new
        unseen = new[0][0][:1]
        for segment, content in zip(segments, contents, strict=True):
            token_ids += content
            token_ids += unseen * (plan.num_slots(segment) - len(content))
        for tokens, _, _ in new:
            token_ids += tokens
        last = plan.tail[-1]
        return RenderedPrompt(
            token_ids,
            plan,
            last.position + last.num_tokens,
            {segment.name: segment.num_seen_tokens for segment in segments},
        )

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


def _tail(
    new: Sequence[tuple[list[int], int, tuple[int, ...]]], num_segments: int
) -> tuple[TailRun, ...]:
    runs: list[TailRun] = []
    for tokens, position, seen in new:
        visible = seen + (0,) * (num_segments - len(seen))
        last = runs[-1] if runs else None
        if last and last.visible == visible and last.position + last.num_tokens == position:
            runs[-1] = last.model_copy(update={"num_tokens": last.num_tokens + len(tokens)})
        else:
            runs.append(TailRun(num_tokens=len(tokens), position=position, visible=visible))
    return tuple(runs)
