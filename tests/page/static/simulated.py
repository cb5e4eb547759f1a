# SPDX-License-Identifier: Apache-2.0
"""A prefix cache that is made up, and what the feed says of it: snapshots and deltas."""

from __future__ import annotations

import random
from typing import Any

Node = dict[str, Any]

BLOCK_TOKENS = 16
BEGAN_S = 1_790_000_000.0
LISTED_TO_LEAVE = 200

_BEGINNINGS = [
    "You are the support assistant of an airline. Answer from the passages below, and say so where "
    "they do not hold the answer. Never promise a refund.",
    "You review pull requests. Point at the line, say what breaks, propose the smallest change.",
    "Extract the parties, dates and amounts of the contract as JSON. Leave out what is not stated.",
    "You translate subtitles. Keep each line under 42 characters, and keep the speaker's register.",
    "Summarize the patient's record for the next shift: changes first, then what is pending.",
    "You are a tutor of mathematics. Ask before you tell, and never give the last step away.",
    "Classify the ticket: billing, outage, account, other. One word.",
    "You plan database migrations. List locks taken, rows touched and how to go back.",
]
_DOCUMENTS = [
    "Passage {n}: A ticket of the flexible fare may be changed until two hours before departure, "
    "at no charge, as often as the traveller likes.",
    "File scheduler/queue_{n}.py: def next_batch(self, budget): picked, left = [], budget",
    "Agreement {n}, between the parties named below, concerning the lease of premises at",
    "Scene {n}. Interior, night. The kitchen is dark but for the light of the open door.",
    "Record {n}: admitted on Tuesday with shortness of breath; oxygen 2 l by cannula.",
    "Chapter {n}: A function is continuous where it is equal to its limit.",
]
_QUESTIONS = [
    "Can I still change my flight, number {n}, tomorrow morning?",
    "What happens if two requests share the first {n} blocks?",
    "Who pays for repairs under clause {n}?",
    "And if I had asked {n} days later?",
    "Give me line {n} in Portuguese.",
    "Explain step {n} once more, with an example.",
]


class SimulatedCache:
    """Requests come, run and end; what nobody uses leaves when memory is full.

    Args:
        nodes: how many it holds; more than that are evicted.
        beginnings: how many system prompts.
    """

    def __init__(self, *, nodes: int, seed: int = 0, beginnings: int = 8, requests: int = 24):
        self.random = random.Random(seed)
        self.limit_nodes = nodes
        self.running_requests = requests
        self.nodes: dict[int, Node] = {}
        self.children: dict[int | None, set[int]] = {None: set()}
        self.time_s = BEGAN_S
        self._next_id = self._next_request = 1
        self._before: dict[int, Node] = {}
        self._runs: list[tuple[str, list[int], float]] = []
        self._hit_tokens, self._query_tokens = 0, 1
        self._read = self._attended = 0  # KV tokens
        self._added: set[int] = set()
        for n in range(beginnings):
            text = _BEGINNINGS[n % len(_BEGINNINGS)]
            top = self._add(None, self.random.choice([256, 512, 1024, 1536]), text)
            if n % 4 == 1:
                self.nodes[top]["module"] = f"guidelines-{n}"
            if n == 0:
                self.nodes[top]["pinned_tokens"] = self.nodes[top]["tokens"]
        while len(self.nodes) < nodes:
            self._arrive(fills=True)
        self._before.clear()
        self._added.clear()

    def snapshot(self, source: str = "0") -> dict[str, Any]:
        nodes = [dict(node) for node in self.nodes.values()]
        return {"source": source, "time_s": self.time_s, "nodes": nodes, "stats": self.stats()}

    def delta(
        self, source: str = "0", *, seconds: float = 0.5, arrivals: int = 6
    ) -> dict[str, Any]:
        """What happens in the next seconds."""
        self.time_s += seconds
        for run in [run for run in self._runs if run[2] <= self.time_s]:
            self._end(run)
        for _ in range(arrivals):
            if len(self._runs) < self.running_requests:
                self._arrive()
        if self.random.random() < 0.3:
            self._split()
        removed = self._join() if self.random.random() < 0.3 else []
        steps = int(seconds * 40)
        for node in self.nodes.values():
            self._attended += steps * node["running"] * node["tokens"]
            self._read += steps * node["tokens"] if node["running"] else 0
        self._order_to_leave()
        leaving = sorted(
            (node for node in self.nodes.values() if node["next_out"] is not None),
            key=lambda node: node["next_out"],
        )
        for node in leaving[: max(0, len(self.nodes) - self.limit_nodes)]:
            self._remove(node["id"])
            removed += [] if node["id"] in self._added else [node["id"]]
        self._order_to_leave()
        added = [dict(self.nodes[i]) for i in sorted(self._added) if i in self.nodes]
        changed = []
        for i, before in self._before.items():
            if i not in self.nodes or i in self._added:
                continue
            now = self.nodes[i]
            fields = {name: value for name, value in now.items() if before[name] != value}
            if fields:
                changed.append({"id": i, **fields})
        self._before.clear()
        self._added.clear()
        return {
            "source": source,
            "time_s": self.time_s,
            "added": added,
            "changed": changed,
            "removed": removed,
            "stats": self.stats(),
        }

    def stats(self) -> dict[str, Any]:
        kinds = dict.fromkeys(("running", "cached", "pinned", "modules"), 0)
        for node in self.nodes.values():
            if node["running"]:
                kinds["running"] += node["blocks"]
            elif node["pinned_tokens"]:
                kinds["pinned"] += node["blocks"]
            elif node["module"]:
                kinds["modules"] += node["blocks"]
            else:
                kinds["cached"] += node["blocks"]
        used = sum(kinds.values())
        total = max(used, self.limit_nodes * 18)
        return {
            "memory_blocks": {"total": total, **kinds, "free": total - used},
            "long_context_bytes": None,
            "prefix_hit_tokens": self._hit_tokens,
            "prefix_query_tokens": self._query_tokens,
            "kv_tokens_read": self._read,
            "kv_tokens_logical": self._attended,
            "running": len(self._runs),
            "waiting": {"capacity": 2, "prefix": 3},
        }

    def _add(self, parent: int | None, tokens: int, text: str) -> int:
        i = self._next_id
        self._next_id += 1
        self.nodes[i] = {
            "id": i,
            "parent": parent,
            "tokens": tokens,
            "blocks": tokens // BLOCK_TOKENS,
            "hits": 0,
            "last_used_s": self.time_s,
            "running": 0,
            "shared": 0,
            "pinned_tokens": 0,
            "module": None,
            "next_out": None,
            "requests": [],
            "text": text,
        }
        self.children[i] = set()
        self.children[parent].add(i)
        self._added.add(i)
        return i

    def _touch(self, i: int) -> Node:
        node = self.nodes[i]
        self._before.setdefault(i, {**node, "requests": list(node["requests"])})
        return node

    def _remove(self, i: int) -> None:
        node = self.nodes.pop(i)
        self.children[node["parent"]].discard(i)
        del self.children[i]

    def _pick(self, ids: set[int]) -> int:
        """The older, the likelier."""
        ordered = sorted(ids)
        return ordered[min(int(self.random.expovariate(2.5 / len(ordered))), len(ordered) - 1)]

    def _arrive(self, *, fills: bool = False) -> None:
        draw = self.random
        path = [self._pick(self.children[None])]
        for depth in range(draw.choice([1, 2, 2, 2, 3, 3, 4, 6])):
            below = self.children[path[-1]]
            if below and draw.random() < (0.9 if depth == 0 else 0.45) * len(below) / (
                len(below) + 3
            ):
                path.append(self._pick(below))
                continue
            texts = _DOCUMENTS if depth == 0 else _QUESTIONS
            text = draw.choice(texts).format(n=self._next_id)
            tokens = BLOCK_TOKENS * draw.choice([16, 32, 64, 96] if depth == 0 else [2, 4, 8, 16])
            path.append(self._add(path[-1], tokens, text))
        request = f"req-{self._next_request:06d}"
        self._next_request += 1
        for i in path:
            node = self._touch(i)
            self._query_tokens += node["tokens"]
            if i not in self._added:
                self._hit_tokens += node["tokens"]
                node["hits"] += 1
            elif fills:
                node["hits"] = int(draw.expovariate(0.7))
            node["last_used_s"] = self.time_s - (draw.expovariate(1 / 200) if fills else 0)
            if not fills:
                self._run(node, request)
        self._added -= set(path) if fills else set()
        if not fills:
            self._runs.append((request, path, self.time_s + draw.uniform(1, 8)))

    @staticmethod
    def _run(node: Node, request: str) -> None:
        node["running"] += 1
        node["shared"] = node["running"] if node["running"] > 1 else 0
        node["requests"] = [*node["requests"], request][:8]
        node["next_out"] = None

    def _end(self, run: tuple[str, list[int], float]) -> None:
        self._runs.remove(run)
        request, path, _ = run
        for i in path:
            node = self._touch(i)
            node["running"] -= 1
            node["shared"] = node["running"] if node["running"] > 1 else 0
            node["requests"] = [each for each in node["requests"] if each != request]
            node["last_used_s"] = self.time_s

    def _split(self) -> None:
        """A new prompt leaves a prefix in its middle: the upper part becomes a node of its own."""
        long = [i for i, node in self.nodes.items() if node["blocks"] >= 4 and i not in self._added]
        i = self.random.choice(long)
        node = self._touch(i)
        upper_tokens = node["tokens"] // 2 // BLOCK_TOKENS * BLOCK_TOKENS
        upper = self._add(node["parent"], upper_tokens, node["text"])
        for name in ("hits", "last_used_s", "running", "shared", "pinned_tokens", "module"):
            self.nodes[upper][name] = node[name]
        self.nodes[upper]["requests"] = list(node["requests"])
        self.children[node["parent"]].discard(i)
        self.children[upper].add(i)
        node["parent"] = upper
        node["tokens"] -= upper_tokens
        node["blocks"] = node["tokens"] // BLOCK_TOKENS
        self._runs = [
            (request, self._with_upper(path, upper, i), end_s)
            for request, path, end_s in self._runs
        ]

    def _join(self) -> list[int]:
        """A node and the only one that continues it become one: the ids that were told and go."""
        upper = next(
            (i for i in self.nodes if i not in self._added and len(self.children[i]) == 1), None
        )
        if upper is None:
            return []
        (lower,) = self.children[upper]
        node, gone = self._touch(upper), self.nodes[lower]
        for name in ("tokens", "blocks"):
            node[name] += gone[name]
        for child in list(self.children[lower]):
            self._touch(child)["parent"] = upper
            self.children[upper].add(child)
        self.children[lower].clear()
        self._remove(lower)
        self._runs = [
            (request, [i for i in path if i != lower], end_s) for request, path, end_s in self._runs
        ]
        return [] if lower in self._added else [lower]

    @staticmethod
    def _with_upper(path: list[int], upper: int, lower: int) -> list[int]:
        at = path.index(lower) if lower in path else len(path)
        return [*path[:at], *([upper] if lower in path else []), *path[at:]]

    def _order_to_leave(self) -> None:
        free = [
            node
            for i, node in self.nodes.items()
            if not (self.children[i] or node["running"] or node["pinned_tokens"])
        ]
        free.sort(key=lambda node: (node["last_used_s"], node["id"]))
        order = {node["id"]: place for place, node in enumerate(free[:LISTED_TO_LEAVE])}
        had = {i for i, node in self.nodes.items() if node["next_out"] is not None}
        for i in had | set(order):
            if self.nodes[i]["next_out"] != order.get(i):
                self._touch(i)["next_out"] = order.get(i)


def hello(*names: str, texts: bool = True) -> dict[str, Any]:
    """Of sources with these names; "0", "1" and so on are their ids."""
    sources = [{"id": str(place), "name": name} for place, name in enumerate(names or ("rank 0",))]
    return {
        "version": 2,
        "model": "Qwen/Qwen3-8B",
        "block_size_tokens": BLOCK_TOKENS,
        "sources": sources,
        "texts": texts,
    }


def apply(snapshot: dict[str, Any], delta: dict[str, Any]) -> dict[str, Any]:
    """The snapshot after a delta, the plain way."""
    nodes = {node["id"]: dict(node) for node in snapshot["nodes"]}
    nodes |= {node["id"]: dict(node) for node in delta["added"]}
    for change in delta["changed"]:
        nodes[change["id"]] |= change
    for i in delta["removed"]:
        del nodes[i]
    return {
        **snapshot,
        "time_s": delta["time_s"],
        "nodes": list(nodes.values()),
        "stats": delta["stats"],
    }
