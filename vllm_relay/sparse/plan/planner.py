# SPDX-License-Identifier: Apache-2.0
"""Chooses, for a kv head, what is asked of which index: the fastest that is good enough and fits.

Pure: takes a profile and costs, touches neither keys nor indexes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_relay.sparse.index.query_types import QueryType, TopK
from vllm_relay.sparse.plan.head_profile import HeadProfile
from vllm_relay.sparse.plan.search_candidates import HUB_HEAVY, Candidate, candidates
from vllm_relay.sparse.plan.search_cost import KINDS, SearchCost, index_bytes, load_costs

MAX_ERROR = 0.01


@dataclass(frozen=True)
class Alternative:
    """A way that was looked at.

    Attributes:
        kind: of the index, or "full".
        query: with its width; None for "full".
        expected_us: of one thread, for a search of the group and the attention over its answer.
        expected_error: 99% of queries are expected to have less, with a margin for what the sample
            may have missed (`error_bound`): relative L2 error of the attention output; None if not
            known.
        expected_mass: 99% of queries get more of their attention weight.
        index_bytes: besides keys and values.
        build_s: of one core.
        is_measured: what it finds was measured, not expected.
        problems: why it was ruled out, whatever its time.
    """

    kind: str
    query: QueryType | None
    expected_us: float
    expected_error: float | None
    expected_mass: float
    index_bytes: int
    build_s: float
    is_measured: bool
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        quality = f"mass {self.expected_mass:.4f}"
        if self.expected_error is not None:
            quality = f"error {self.expected_error:.2%}"
        asked = "all keys" if self.query is None else _described(self.query)
        known = "" if self.is_measured else ", expected only"
        return f"{self.kind}, {asked}: {self.expected_us:.0f} us, {quality}{known}"


@dataclass(frozen=True)
class Plan:
    """What a head's queries ask of which index.

    Attributes:
        chosen: what to do.
        alternatives: the best of every kind of index, the chosen one included, fastest first.
        reason: why it was chosen, in one line.
        slo_ms: that was asked for.
    """

    chosen: Alternative
    alternatives: tuple[Alternative, ...]
    reason: str
    slo_ms: float | None = None

    @property
    def kind(self) -> str:
        return self.chosen.kind

    @property
    def query(self) -> QueryType | None:
        return self.chosen.query

    @property
    def meets_target(self) -> bool:
        """Quality and memory."""
        return not self.chosen.problems

    @property
    def meets_slo(self) -> bool:
        return self.slo_ms is None or self.chosen.expected_us <= 1e3 * self.slo_ms

    def explain(self) -> str:
        """The choice and, one line each, what else there was and why it was not taken."""
        lines = [f"{self.chosen}: {self.reason}"]
        if not self.meets_target:
            lines.append(f"misses the target: {'; '.join(self.chosen.problems)}")
        if not self.meets_slo:
            assert self.slo_ms is not None
            over_us = self.chosen.expected_us - 1e3 * self.slo_ms
            lines.append(f"misses the {self.slo_ms:g} ms that were asked for by {over_us:.0f} us")
        for other in self.alternatives:
            if other is self.chosen:
                continue
            why = "; ".join(other.problems)
            if not why:
                slower = other.expected_us / max(self.chosen.expected_us, 1e-9)
                why = f"{slower:.2f} times as long"
            lines.append(f"not {other}: {why}")
        return "\n".join(lines)


def plan(
    context_len: int,
    prefix_len: int | None,
    head_profile: HeadProfile,
    memory_budget: int | None = None,
    slo_ms: float | None = None,
    *,
    max_error: float | None = None,
    min_mass: float | None = None,
    kinds: Sequence[str] = KINDS,
    costs: SearchCost | None = None,
) -> Plan:
    """The fastest way that reaches the target and fits.

    Args:
        context_len: tokens of the context, and of an index over it.
        prefix_len: how many of them the queries may see; None for all.
        memory_budget: bytes that the index may take besides keys and values; None for any.
        slo_ms: how long one kv head may take for one token. It does not buy quality: where no way
            that is good enough is fast enough, the fastest of those is taken, and says so.
        max_error: that 99% of queries may have at most in the relative L2 norm of their output;
            0.01 if neither target is given. Profiles without values know no errors: there it
            stands for a mass of 1 - max_error.
        min_mass: attention weight that 99% of queries have to get.
        kinds: of `KINDS`; which to choose from.
        costs: None for what was measured on this machine, or ships.

    Raises:
        ValueError: an argument is out of range; names it.

    Source: AlayaDB (2504.10326), section 6.2, which leaves choosing by cost open.
    """
    prefix_len = _check(context_len, prefix_len, head_profile, memory_budget, slo_ms)
    if isinstance(kinds, str) or not kinds:
        raise ValueError(f"kinds is {kinds!r}, expected a list of {', '.join(KINDS)}")
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"kinds: {', '.join(sorted(unknown))}, expected {', '.join(KINDS)}")
    if max_error is None and min_mass is None:
        max_error = MAX_ERROR
    for name, value in (("max_error", max_error), ("min_mass", min_mass)):
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}, expected a number from 0 to 1")
    costs = load_costs() if costs is None else costs
    looked_at = []
    for candidate in candidates(head_profile, context_len, prefix_len, tuple(kinds)):
        each = alternative_of(candidate, head_profile, context_len, costs)
        problems = _problems(each, memory_budget, max_error, min_mass)
        looked_at.append(replace(each, problems=problems))
    if not looked_at:
        raise ValueError(
            f"head_profile: knows nothing of {', '.join(kinds)}: profile the head with at least "
            "one query type"
        )
    by_kind = {}
    for kind in kinds:
        of_kind = [each for each in looked_at if each.kind == kind]
        if of_kind:
            by_kind[kind] = min(of_kind, key=_preference)
    chosen = min(by_kind.values(), key=_preference)
    reason = "nothing reaches the target, this comes nearest"
    if not chosen.problems:
        reason = "the fastest that is good enough"
        if memory_budget is not None:
            reason += " and fits"
    return Plan(chosen, _fastest_first(by_kind.values()), reason, slo_ms)


def _check(
    context_len: int,
    prefix_len: int | None,
    head_profile: object,
    memory_budget: int | None,
    slo_ms: float | None,
) -> int:
    """The prefix length, all of the context if None."""
    if not isinstance(head_profile, HeadProfile):
        raise ValueError(f"head_profile is {head_profile!r}, expected what profile_head returns")
    if context_len < 1:
        raise ValueError(f"context_len is {context_len}, expected at least 1")
    if prefix_len is None:
        prefix_len = context_len
    if not 1 <= prefix_len <= context_len:
        raise ValueError(f"prefix_len is {prefix_len}, expected 1 to {context_len} or None")
    if memory_budget is not None and memory_budget < 0:
        raise ValueError(f"memory_budget is {memory_budget}, expected bytes or None")
    if slo_ms is not None and not slo_ms > 0:
        raise ValueError(f"slo_ms is {slo_ms}, expected milliseconds or None")
    return prefix_len


def alternative_of(
    candidate: Candidate, profile: HeadProfile, context_len: int, costs: SearchCost
) -> Alternative:
    """What is to be expected of a candidate over a context of so many tokens."""
    d, kind = profile.head_size, candidate.kind
    size = {"head_size": d, "key_bytes": profile.key_bytes}
    expected_us = costs.time_us(candidate.work, **size)
    if candidate.measured is not None:
        # what the model does not know of this head, it knows neither of a longer or shorter prefix
        work, measured_us = candidate.measured
        expected_us *= measured_us / max(costs.time_us(work, **size), 1e-9)
    return Alternative(
        kind=kind,
        query=candidate.query,
        expected_us=expected_us,
        expected_error=candidate.error,
        expected_mass=candidate.mass,
        index_bytes=index_bytes(
            kind, context_len, d, is_hub_heavy=profile.hub_statistic < HUB_HEAVY
        ),
        build_s=costs.build_s(kind, context_len, head_size=d),
        is_measured=candidate.is_measured,
    )


def _problems(
    each: Alternative,
    memory_budget: int | None,
    max_error: float | None,
    min_mass: float | None,
) -> tuple[str, ...]:
    """Why it may not be taken."""
    problems = []
    if max_error is not None:
        if each.expected_error is None:
            min_mass = max(min_mass or 0.0, 1 - max_error)
        elif each.expected_error > max_error:
            problems.append(f"error above {max_error:.2%}")
    if min_mass is not None and each.expected_mass < min_mass:
        problems.append(f"mass below {min_mass:.4f}")
    if memory_budget is not None and each.index_bytes > memory_budget:
        problems.append(f"{each.index_bytes} bytes, more than {memory_budget}")
    return tuple(problems)


def _preference(each: Alternative) -> tuple[float, ...]:
    """Smallest is best: usable ones by time, then by bytes; others by how much they miss."""
    if not each.problems:
        return (0, each.expected_us, each.index_bytes)
    missed = 1 - each.expected_mass if each.expected_error is None else each.expected_error
    return (len(each.problems), missed, each.expected_us)


def _fastest_first(alternatives: Any) -> tuple[Alternative, ...]:
    return tuple(sorted(alternatives, key=lambda each: each.expected_us))


def _described(query: QueryType) -> str:
    if isinstance(query, TopK):
        text = f"best {query.k}"
    elif query.alpha is not None:
        text = f"range alpha={query.alpha:g}"
    else:
        text = f"range beta={query.beta:g}"
    return text if query.width is None else f"{text} width {query.width}"
