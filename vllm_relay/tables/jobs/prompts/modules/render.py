# SPDX-License-Identifier: Apache-2.0
"""Placed modules and texts of a prompt, as the engine gets them.

The same as `modules.render` makes of a schema and a prompt. Here nothing is read from
markup, so values may hold any text, and a prompt costs no more if there are many modules.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_relay.modules.prompt.plan import ModulePlan, Segment
from vllm_relay.modules.prompt.render import RenderedPrompt, TailRuns
from vllm_relay.tables.jobs.prompts.modules.layout import PlacedModule


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
