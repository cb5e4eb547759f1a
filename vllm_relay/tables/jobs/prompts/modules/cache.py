# SPDX-License-Identifier: Apache-2.0
"""Which modules have to be computed, for prompts that run one after the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping


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
