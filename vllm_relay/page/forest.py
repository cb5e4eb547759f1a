# SPDX-License-Identifier: Apache-2.0
"""The prefix forest as a front end was told of it: blocks in runs without branches, and changes.

A node is such a run, and its number is made of its first block: so it stays while the node grows,
shrinks or is split, and all front ends have the same. A run whose beginning has left the cache is a
root. The runs of a module end with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

from vllm_relay.page.blocks import NO_KEY, ToldBlock, parents_first

_EXACT = (1 << 53) - 1
"""Numbers of JavaScript are exact up to here."""
MAX_REQUESTS = 8
"""Named of those that run on a node."""


@dataclass(eq=False)
class Block:
    """A content of KV blocks; several may have it, as requests that begin alike together do."""

    key: int
    parent: int
    module: str | None
    node: Node
    place: int = 0
    """In the blocks of its node."""
    ids: dict[int, int] = field(default_factory=dict)
    """Of KV blocks that have it; the hits of each."""
    used_s: float = 0.0


@dataclass(eq=False)
class Node:
    """A run of blocks."""

    id: int
    parent: Node | None = None
    blocks: list[Block] = field(default_factory=list)
    children: set[Node] = field(default_factory=set)
    hits: int = 0
    """Of its blocks, and of all that continue it."""
    used_s: float = 0.0
    requests: list[str] = field(default_factory=list)
    """That run on it."""
    text: str | None = None
    text_blocks: int = 0
    """Of how many of its blocks the text is."""
    next_out: int | None = None
    kept: int | None = 0
    """See `Feed.poll`."""


class Forest:
    """Of one engine.

    Args:
        block_size: tokens of a block.
        shares: whether requests that run on a node read it together.
    """

    def __init__(self, block_size: int, shares: bool = False) -> None:
        self._block_size = block_size
        self._shares = shares
        self._blocks: dict[int, Block] = {}  # by key
        self._at: dict[int, Block] = {}  # by id of a KV block
        self._cut_off: dict[int, set[Node]] = {}  # roots, by the key of the block before them
        self._pinned: frozenset[int] = frozenset()
        self._busy: set[Node] = set()
        self.nodes: dict[int, Node] = {}
        self._changed: dict[Node, None] = {}
        self._told: dict[int, dict[str, Any]] = {}  # what was told of each node

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, blocks: Iterable[ToldBlock], modules: Mapping[int, str]) -> None:
        """Take over what an engine says of its blocks, of each once.

        Args:
            modules: by block id.
        """
        there: list[ToldBlock] = []
        leaving: list[tuple[int, Block]] = []
        for told in blocks:
            before = self._at.get(told.block_id)
            if before is not None and before.key != told.key:
                leaving.append((told.block_id, before))
            if told.key != NO_KEY:
                there.append(told)
        # from the end of a run, and to its end: it is not split and joined again for each of them
        for block_id, before in sorted(leaving, key=lambda each: -each[1].place):
            self._leave(block_id, before)
        for told in parents_first(there):
            block = self._blocks.get(told.key)
            if block is None:
                block = self._put(told, modules.get(told.block_id))
            self._at[told.block_id] = block
            new_hits = told.hits - block.ids.get(told.block_id, 0)
            block.ids[told.block_id] = told.hits
            block.used_s = max(block.used_s, told.used_s)
            self._use(block.node, new_hits, told.used_s)

    def run(self, running: Iterable[tuple[str, Sequence[int]]], now_s: float) -> None:
        """Take over which requests run.

        Args:
            running: of each its id and the keys of blocks with which its runs of them end.
        """
        before, self._busy = self._busy, set()
        for each in before:
            each.requests = []
        for request_id, keys in running:
            path: set[Node] = set()
            for key in keys:
                block = self._blocks.get(key)
                node: Node | None = None if block is None else block.node
                while node is not None and node not in path:
                    path.add(node)
                    node = node.parent
            for each in path:
                each.requests.append(request_id)
                each.used_s = max(each.used_s, now_s)
            self._busy |= path
        self._changed |= dict.fromkeys([*before, *self._busy])

    def pin(self, block_ids: Iterable[int]) -> None:
        """Take over which KV blocks are pinned."""
        before, self._pinned = self._pinned, frozenset(block_ids)
        for block_id in before ^ self._pinned:
            if (block := self._at.get(block_id)) is not None:
                self._changed[block.node] = None

    def set_text(self, node: Node, text: str, num_blocks: int) -> None:
        node.text, node.text_blocks = text, num_blocks
        self._changed[node] = None

    def set_next_out(self, node: Node, place: int | None) -> None:
        if node.next_out != place:
            node.next_out = place
            self._changed[node] = None

    def take_changes(self) -> dict[str, Any]:
        """What has changed since the last call: `added`, `changed` and `removed` nodes."""
        added, changed = [], []
        for node in self._changed:
            if self.nodes.get(node.id) is not node:
                continue
            now, before = self._describe(node), self._told.get(node.id)
            if before is None:
                added.append(now)
            elif difference := {name: now[name] for name in now if now[name] != before[name]}:
                changed.append({"id": node.id, **difference})
            self._told[node.id] = now
        removed = [
            number
            for number in (node.id for node in self._changed)
            if number not in self.nodes and self._told.pop(number, None) is not None
        ]
        self._changed = {}
        return {"added": added, "changed": changed, "removed": removed}

    def told(self) -> list[dict[str, Any]]:
        """All nodes, as the last changes left them."""
        return list(self._told.values())

    def is_pinned(self, block: Block) -> bool:
        return not self._pinned.isdisjoint(block.ids)

    def path(self, node: Node) -> Iterator[Node]:
        """From its root to a node."""
        nodes = [node]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return reversed(nodes)

    def with_all_behind(self, node: Node) -> Iterator[Node]:
        """A node and all that continue it, parents first."""
        nodes = [node]
        while nodes:
            node = nodes.pop()
            yield node
            nodes += node.children

    def _describe(self, node: Node) -> dict[str, Any]:
        running = len(node.requests)
        pinned = sum(1 for _ in takewhile(self.is_pinned, node.blocks))
        return {
            "id": node.id,
            "parent": None if node.parent is None else node.parent.id,
            "tokens": len(node.blocks) * self._block_size,
            "blocks": len(node.blocks),
            "hits": node.hits,
            "last_used_s": round(node.used_s, 3),
            "running": running,
            "shared": running if self._shares and running > 1 else 0,
            "pinned_tokens": pinned * self._block_size,
            "module": node.blocks[0].module,
            "next_out": node.next_out,
            "requests": list(islice(node.requests, MAX_REQUESTS)),
            "text": node.text,
        }

    def _put(self, told: ToldBlock, module: str | None) -> Block:
        """A block that is new, in the place where it belongs."""
        before = self._blocks.get(told.parent)
        if before is None:
            node = self._new_node(told.key, None)
            if told.parent != NO_KEY:
                self._cut_off.setdefault(told.parent, set()).add(node)
        else:
            if before is not before.node.blocks[-1]:
                self._split(before.node, before.place + 1)
            node = before.node
            if node.children or before.module != module:
                node = self._new_node(told.key, node)
        block = self._blocks[told.key] = Block(told.key, told.parent, module, node)
        block.place = len(node.blocks)
        node.blocks.append(block)
        for root in self._cut_off.pop(told.key, ()):
            root.parent = node
            node.children.add(root)
            self._use(node, root.hits, root.used_s)
            self._changed[root] = None
        self._join(node)
        self._changed[block.node] = None
        return block

    def _leave(self, block_id: int, block: Block) -> None:
        """A KV block has another content now, or none."""
        del self._at[block_id]
        self._use(block.node, -block.ids.pop(block_id), 0.0)
        if not block.ids:
            self._remove(block)

    def _remove(self, block: Block) -> None:
        node = block.node
        if block is not node.blocks[-1]:
            self._split(node, block.place + 1)
        for child in node.children:
            child.parent = None
            self._cut_off.setdefault(block.key, set()).add(child)
            self._use(node, -child.hits, 0.0)
            self._changed[child] = None
        node.children = set()
        node.blocks.pop()
        del self._blocks[block.key]
        self._changed[node] = None
        if node.blocks:
            if len(node.blocks) < node.text_blocks:
                node.text, node.text_blocks = None, 0
            return
        del self.nodes[node.id]
        self._busy.discard(node)
        parent = node.parent
        if parent is not None:
            parent.children.discard(node)
            self._join(parent)
        elif block.parent in self._cut_off:
            self._cut_off[block.parent].discard(node)
            if not self._cut_off[block.parent]:
                del self._cut_off[block.parent]

    def _new_node(self, key: int, parent: Node | None) -> Node:
        """
        Args:
            key: of its first block.
        """
        node = Node(key & _EXACT, parent)
        self.nodes[node.id] = node
        if parent is not None:
            parent.children.add(node)
        self._changed[node] = None
        return node

    def _split(self, node: Node, place: int) -> None:
        """Let the blocks of a node from this place on be a node of their own, behind it."""
        behind = self._new_node(node.blocks[place].key, None)
        behind.blocks, node.blocks = node.blocks[place:], node.blocks[:place]
        behind.children, node.children = node.children, {behind}
        behind.parent = node
        for child in behind.children:
            child.parent = behind
            self._changed[child] = None
        for index, block in enumerate(behind.blocks):
            block.node, block.place = behind, index
        behind.hits = node.hits - sum(sum(block.ids.values()) for block in node.blocks)
        behind.kept = node.kept
        behind.requests = list(node.requests)
        if behind.requests:
            self._busy.add(behind)
            behind.used_s = node.used_s
        else:
            own_s = max(block.used_s for block in behind.blocks)
            behind.used_s = max([own_s, *(child.used_s for child in behind.children)])
        node.text, node.text_blocks = None, 0
        self._changed[node] = None

    def _join(self, node: Node) -> None:
        """Let a node and the only one that continues it be one."""
        if len(node.children) != 1:
            return
        [behind] = node.children
        if behind.blocks[0].module != node.blocks[-1].module:
            return
        for index, block in enumerate(behind.blocks, len(node.blocks)):
            block.node, block.place = node, index
        node.blocks += behind.blocks
        node.children = behind.children
        for child in node.children:
            child.parent = node
            self._changed[child] = None
        del self.nodes[behind.id]
        self._busy.discard(behind)
        self._changed |= {behind: None, node: None}

    def _use(self, node: Node | None, new_hits: int, used_s: float) -> None:
        """Count for a node and all before it."""
        while node is not None and (new_hits or used_s > node.used_s):
            node.hits += new_hits
            node.used_s = max(node.used_s, used_s)
            self._changed[node] = None
            node = node.parent
