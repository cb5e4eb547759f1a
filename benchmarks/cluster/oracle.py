# SPDX-License-Identifier: Apache-2.0
"""A rule that no router can have: it knows the engines as they are, and what comes.

It knows each engine's cache, the end of its step, how long its answers will be, and all requests
that arrive at the same time. It places these one by one where the sum over requests of the fourth
power of the time to first token grows least, then moves single ones while that helps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_relay.cluster.replica_index import Block
from vllm_relay.cluster.simulate import SimulatedReplicas, SimulatedRequest
from vllm_relay.prefix_cache.predict.step_costs import StepCosts

POWER = 4
UNIT_S = 0.05
MAX_PASSES = 3
BATCHED_TOKENS, MAX_RUNNING = 2048, 64

Requests = Sequence[SimulatedRequest]


@dataclass(frozen=True)
class _Engine:
    """
    Attributes:
        step_left_s: until the end of the step that it is in.
        num_decoding: requests of which a token is computed in each step.
        left_tokens: of the answers of those that run, ascending.
    """

    step_left_s: float
    num_decoding: int
    left_tokens: Sequence[int]


class Oracle:
    """
    Args:
        arrivals_s: of the requests.
        locality: what a second of computing counts beside the sum.
    """

    def __init__(
        self,
        replicas: SimulatedReplicas,
        costs: StepCosts,
        arrivals_s: Sequence[float],
        locality: float,
    ) -> None:
        self._replicas, self._costs = replicas, costs
        self._arrivals_s, self._locality = arrivals_s, locality
        self._planned: dict[int, int] = {}
        self._without_token: list[dict[int, None]] = [{} for _ in range(len(replicas))]
        self._engines: list[_Engine] = []
        self._missing: dict[tuple[int, int], tuple[Sequence[Block], int]] = {}

    def choose(self, request: SimulatedRequest, now_s: float) -> int:
        if request.number not in self._planned:
            end = request.number
            while end < len(self._arrivals_s) and self._arrivals_s[end] <= now_s:
                end += 1
            self._plan(self._replicas.requests[request.number : end], now_s)
        replica = self._planned.pop(request.number)
        self._without_token[replica][request.number] = None
        return replica

    def answered(self, request: SimulatedRequest, replica: int) -> None:
        self._without_token[replica].pop(request.number, None)

    def ended(self, request: SimulatedRequest, replica: int) -> None:
        self.answered(request, replica)

    def _plan(self, group: Requests, now_s: float) -> None:
        numbers = range(len(self._replicas))
        self._missing.clear()
        self._engines = [self._engine(each, now_s) for each in numbers]
        requests = self._replicas.requests
        waiting = [[requests[each] for each in known] for known in self._without_token]
        costs = [self._cost(each, waiting[each], now_s) for each in numbers]

        def more(replica: int, request: SimulatedRequest) -> float:
            with_it = [*waiting[replica], request]
            return self._cost(replica, with_it, now_s) - costs[replica]

        def put(replica: int, request: SimulatedRequest) -> None:
            waiting[replica].append(request)
            costs[replica] = self._cost(replica, waiting[replica], now_s)
            self._planned[request.number] = replica

        for request in group:
            put(min(numbers, key=lambda each: more(each, request)), request)
        for _ in range(MAX_PASSES if len(group) > 1 else 0):
            moved = 0
            for request in group:
                home = self._planned[request.number]
                waiting[home].remove(request)
                costs[home] = self._cost(home, waiting[home], now_s)
                best = min(numbers, key=lambda each: (more(each, request), each != home))
                put(best, request)
                moved += best != home
            if not moved:
                return

    def _engine(self, replica: int, now_s: float) -> _Engine:
        one = self._replicas._replicas[replica]
        running = one.core.scheduler.running
        return _Engine(
            max(0.0, one.server.now_s - now_s) if one.is_stepping else 0.0,
            sum(each.num_computed_tokens >= each.num_prompt_tokens for each in running),
            sorted(each.max_tokens - each.num_output_tokens for each in running),
        )

    def _cost(self, replica: int, waiting: Requests, now_s: float) -> float:
        """Of those without a first token, one after the other, in steps of a budget of tokens."""
        engine, costs = self._engines[replica], self._costs
        size = self._replicas.block_size_tokens
        budget = max(BATCHED_TOKENS - engine.num_decoding, MAX_RUNNING)
        known: set[Block] = set()
        ends = []
        tokens = 0
        for request in waiting:
            blocks, tail = self._uncached(replica, request)
            tokens += size * len(set(blocks) - known) + tail
            known.update(blocks)
            ends.append(tokens)
        sum_of_powers = 0.0
        for place, (request, end) in enumerate(zip(waiting, ends, strict=True)):
            steps = max(1, -(-end // budget))
            computed = min(steps * budget, tokens) + engine.num_decoding * steps
            after_s = engine.step_left_s + steps * costs.step_s + costs.token_s * computed
            # until one that runs has its whole answer
            for_place = len(engine.left_tokens) + place - MAX_RUNNING
            if 0 <= for_place < len(engine.left_tokens):
                after_s += engine.left_tokens[for_place] * costs.seconds(MAX_RUNNING)
            waited_s = now_s - self._arrivals_s[request.number] + after_s
            sum_of_powers += (waited_s / UNIT_S) ** POWER
        return sum_of_powers + self._locality * costs.token_s * tokens

    def _uncached(self, replica: int, request: SimulatedRequest) -> tuple[Sequence[Block], int]:
        """Full blocks that the engine has not, and the tokens after them."""
        key = (replica, request.number)
        if key not in self._missing:
            core = self._replicas._replicas[replica].core
            own = self._replicas._engine_requests.request(request.number, core)
            caches = core.scheduler.kv_cache_manager.coordinator
            found = caches.find_longest_cache_hit(own.block_hashes, own.num_prompt_tokens - 1)
            hit = found[1]
            size = self._replicas.block_size_tokens
            blocks = request.chain[hit // size :]
            self._missing[key] = blocks, request.prompt_tokens - hit - size * len(blocks)
        return self._missing[key]
