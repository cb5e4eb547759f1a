# SPDX-License-Identifier: Apache-2.0
"""The parts of a run, in their order, and how long each may take."""

from dataclasses import dataclass

STARTUP_S = 30.0
"""For imports, for the rivals to be found and for the first kernels to be compiled."""
TOTAL_S = 465.0


@dataclass(frozen=True)
class Part:
    name: str
    module: str
    budget_s: float
    what: str


PARTS = (
    Part("correct", "part_correct", 85, "errors against float64, same bits, graph replays"),
    Part("ceilings", "part_ceilings", 6, "bandwidth and matrix rate of this GPU"),
    Part("small", "part_small", 10, "one small batch: the floor of two launches"),
    Part("grid", "part_grid", 75, "one shared prefix: batch, prefix, context and heads"),
    Part("nodes", "part_nodes", 45, "FlashAttention over what is shared, and as it is"),
    Part("trees", "part_trees", 45, "trees of 1 to 9 levels"),
    Part("planning", "part_planning", 16, "plans of 1,024 requests, where vLLM is installed"),
    Part("random", "part_random", 80, "500 random batches against the best that shares nothing"),
    Part("configs", "part_configs", 60, "candidates for the shipped configuration"),
    Part("features", "part_features", 3, "engines of every kind, where vLLM is installed"),
    Part("engine", "part_engine", 3, "stock and relay, where vLLM is installed"),
    Part("demos", "part_demos", 3, "the demos, where vLLM is installed"),
)
NAMES = tuple(part.name for part in PARTS)


def chosen(names: str) -> list[Part]:
    """The parts that a comma-separated list names, in their order.

    Raises:
        ValueError: a name is unknown.
    """
    wanted = [name for name in names.split(",") if name]
    if unknown := set(wanted) - set(NAMES):
        raise ValueError(
            f"unknown parts {', '.join(sorted(unknown))}: known are {', '.join(NAMES)}"
        )
    return [part for part in PARTS if part.name in wanted or not wanted]
