# SPDX-License-Identifier: Apache-2.0
"""An engine that is watched: what to ask it next, and what its answers change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from vllm_relay.commands.errors import CommandError
from vllm_relay.page.blocks import unpack
from vllm_relay.page.forest import Forest, Node
from vllm_relay.page.leaving import first_to_leave, number

MAX_TEXT_CHARACTERS = 400
_TEXT_TOKENS = 160
"""Enough for so many characters, mostly."""
_TEXTS_AT_ONCE = 128
"""Blocks whose tokens are asked for at once."""


class Source:
    """
    Args:
        id: under which viewers know it.
        decode: the text of tokens; None: there is no tokenizer.
        shares: see `Forest`.
    """

    def __init__(
        self,
        id: str,
        name: str,
        decode: Callable[[list[int]], str] | None,
        shares: bool,
    ) -> None:
        self.id = id
        self.name = name
        self.block_size = 1
        """Tokens of a block; as all that is here, from the first answer on."""
        self.forest = Forest(self.block_size)
        self.feed = ""
        """The id of the feed that answered last."""
        self.has_more = False
        """Whether it has not told all yet."""
        self._decode = decode
        self._shares = shares
        self._number = 0
        self._stats: dict[str, Any] = {}
        self._time_s = 0.0
        self._texts: list[tuple[Node, list[int]]] = []
        """Nodes whose text is asked for, and the keys of their first blocks."""
        self._kept: list[Node] = []
        """Nodes of which is asked how they are kept."""

    def question(self, texts: bool) -> dict[str, Any]:
        """What to ask its feed, see `Feed.poll`.

        Args:
            texts: whether anybody wants to read them.
        """
        self._texts = list(self._wanted_texts()) if texts and self._decode is not None else []
        self._kept = first_to_leave(self.forest)
        return {
            "number": self._number,
            "tokens_of": [
                (_block_id(node, place), key)
                for node, keys in self._texts
                for place, key in enumerate(keys)
            ],
            "kept_of": [_block_id(each, -1) for each in self._kept],
        }

    def take(self, answer: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Take over an answer.

        Returns:
            The event for viewers that have seen all before, `snapshot` or `delta`, and its data;
            None if nothing is new.
        """
        is_full = answer["is_full"]
        if is_full:
            self.block_size = answer["block_size_tokens"]
            self.forest = Forest(self.block_size, self._shares)
        else:
            self._take_texts(answer["tokens"])
            for node, kept in zip(self._kept, answer["kept"], strict=False):
                node.kept = kept
        self.feed, self._number = answer["feed"], answer["number"]
        self._time_s, self.has_more = answer["time_s"], answer["more"]
        forest = self.forest
        forest.apply(unpack(answer["blocks"]), dict(answer["modules"]))
        if answer["pinned"] is not None:
            forest.pin(answer["pinned"])
        forest.run(answer["running"], self._time_s)
        number(forest)
        changes = forest.take_changes()
        before, self._stats = self._stats, answer["stats"]
        if is_full:
            return "snapshot", self.snapshot()
        if before == self._stats and not any(changes.values()):
            return None
        return "delta", {**self._head(), **changes, "stats": self._stats}

    def snapshot(self) -> dict[str, Any]:
        """All as the last answer left it."""
        return {**self._head(), "nodes": self.forest.told(), "stats": self._stats}

    def blocks_before(self, node_id: int) -> list[tuple[int, int]]:
        """Id and key of the blocks of a node's whole prefix, the first one first.

        Raises:
            CommandError: 404 there is no such node.
        """
        return [each for node in self.forest.path(self._node(node_id)) for each in _blocks(node)]

    def blocks_behind(self, node_id: int) -> list[tuple[int, int]]:
        """Id and key of all KV blocks of a node, and of all that continue it.

        Raises:
            CommandError: 404 there is no such node.
        """
        return [
            (block_id, block.key)
            for node in self.forest.with_all_behind(self._node(node_id))
            for block in node.blocks
            for block_id in block.ids
        ]

    def _node(self, node_id: int) -> Node:
        node = self.forest.nodes.get(node_id)
        if node is None:
            raise CommandError(404, f"node {node_id} of source {self.id!r} has left the KV cache")
        return node

    def _head(self) -> dict[str, Any]:
        return {"source": self.id, "time_s": round(self._time_s, 3)}

    def _wanted_texts(self) -> Iterator[tuple[Node, list[int]]]:
        """Nodes that have grown since their text was made, or have none."""
        most = -(-_TEXT_TOKENS // self.block_size)
        lacking = (
            node
            for node in self.forest.nodes.values()
            if node.text_blocks < min(len(node.blocks), most)
        )
        for node in islice(lacking, max(_TEXTS_AT_ONCE // most, 1)):
            yield node, [block.key for block in node.blocks[:most]]

    def _take_texts(self, tokens: list[list[int] | None]) -> None:
        answers = iter(tokens)
        for node, keys in self._texts:
            parts = list(islice(answers, len(keys)))
            there = [block.key for block in node.blocks[: len(keys)]] == keys
            if there and self._decode is not None and None not in parts:
                text = self._decode([token for part in parts for token in part or ()])
                self.forest.set_text(node, text[:MAX_TEXT_CHARACTERS], len(keys))


def _blocks(node: Node) -> list[tuple[int, int]]:
    return [(next(iter(block.ids)), block.key) for block in node.blocks]


def _block_id(node: Node, place: int) -> int:
    return next(iter(node.blocks[place].ids))
