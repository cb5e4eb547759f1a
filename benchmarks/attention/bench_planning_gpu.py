# SPDX-License-Identifier: Apache-2.0
"""What the host does for a step of decodes on GPUs before its layers begin, once for all of them.

Both ways of RELAY on CUDA, without a GPU: what requests share, and the nodes for FlashAttention or
the work list of the Triton kernels, by the costs and for the programs of an H100. Times are from
the moment that vLLM asks for the step's metadata until its arrays would be copied; "following" is
what was done before, when the scheduler's output arrived, which names the blocks of new requests.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.attention.batches import block_tables
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from benchmarks.support.timing import Timing
from vllm_relay.attention_backends.cuda.config import KernelSetup, LayerShape, shipped_for
from vllm_relay.attention_backends.cuda.flash.attention import NodeBuffers
from vllm_relay.attention_backends.cuda.flash.node_plans import NodePlans
from vllm_relay.attention_backends.cuda.flash.nodes import NodeLimits, NodeSetup
from vllm_relay.attention_backends.cuda.plans.decode_plans import DecodePlans
from vllm_relay.attention_backends.cuda.plans.planner import PlannerLimits, StepPlanner
from vllm_relay.attention_backends.cuda.step_batch import StepBatch
from vllm_relay.attention_backends.forest import Forest
from vllm_relay.attention_backends.groups import plan_stats
from vllm_relay.attention_backends.worker_blocks import WorkerBlocks

REQUESTS, BLOCKS = 256, 1024
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, NUM_SMS = 32, 8, 128, 132
BLOCK_SIZE = 16
GROWN_BLOCKS = 5
"""More tokens than plans have to spare."""
UNCHANGED_BAR_MS, CHANGED_BAR_MS = 0.1, 1.0


class Worker:
    """Requests of a worker, and what the scheduler tells of them."""

    def __init__(self, table: np.ndarray) -> None:
        self.rows = [row.tolist() for row in table]
        self.names = [f"request {number}" for number in range(len(table))]
        lens = table.shape[1] * BLOCK_SIZE - np.random.default_rng(0).integers(
            BLOCK_SIZE, 4 * BLOCK_SIZE, len(table)
        )
        self.seq_lens = lens.astype(np.int32)
        self.query_start_loc = np.arange(len(table) + 1, dtype=np.int32)
        self.blocks = WorkerBlocks()
        group = SimpleNamespace(
            layer_names=["layer"], kv_cache_spec=SimpleNamespace(block_size=BLOCK_SIZE)
        )
        config = SimpleNamespace(kv_cache_groups=[group])
        runner = SimpleNamespace(
            kv_cache_config=config, input_batch=SimpleNamespace(req_ids=self.names)
        )
        self._worker = SimpleNamespace(model_runner=runner)
        self._num_begun = len(table)
        self._tell(new=range(len(table)))

    def _tell(self, new: Any = (), ended: Any = (), grown: Any = ()) -> float:
        """Seconds that following this takes."""
        cached = SimpleNamespace(
            req_ids=[self.names[number] for number, _ in grown],
            new_block_ids=[[ids] for _, ids in grown],
            resumed_req_ids=set(),
        )
        begun = [
            SimpleNamespace(req_id=self.names[number], block_ids=[self.rows[number]])
            for number in new
        ]
        output = SimpleNamespace(
            finished_req_ids=ended, scheduled_new_reqs=begun, scheduled_cached_reqs=cached
        )
        began_s = time.perf_counter()
        self.blocks.begin_step(self._worker, output)
        return time.perf_counter() - began_s

    def nothing(self) -> float:
        return self._tell()

    def grow(self) -> float:
        """A request outgrows what was planned."""
        more = [1 << 20] * GROWN_BLOCKS
        self.seq_lens[0] += GROWN_BLOCKS * BLOCK_SIZE
        self.rows[0] = self.rows[0] + more
        return self._tell(grown=[(0, more)])

    def join(self) -> float:
        """A request ends, and another one with as many blocks takes its place."""
        return self._replace([self._num_begun % len(self.rows)])

    def all_new(self) -> float:
        return self._replace(range(len(self.rows)))

    def _replace(self, numbers: Any) -> float:
        ended = [self.names[number] for number in numbers]
        for number in numbers:
            self.names[number] = f"request {self._num_begun}"
            self._num_begun += 1
        return self._tell(new=numbers, ended=ended)

    def batch(self) -> StepBatch:
        names = self.blocks.request_ids(len(self.rows))
        return StepBatch(self.blocks, names, self.query_start_loc, self.seq_lens)


def node_plans(
    requests: int, max_blocks: int, setup: KernelSetup, device: str
) -> Callable[[StepBatch], Forest]:
    """As `NodesMetadataBuilder` makes them."""
    num_sms = setup.num_programs // setup.config.programs_per_sm
    node_setup = NodeSetup(BLOCK_SIZE, setup.group_size, setup.num_kv_heads, num_sms)
    limits = NodeLimits(requests, requests, requests)
    plans = NodePlans(
        NodeBuffers(limits, node_setup, max_blocks=max_blocks, device=device),
        layer_name="layer",
        min_shared_tokens=0,
        token_bytes=setup.num_kv_heads * HEAD_SIZE * 2 * 2,
    )
    return lambda batch: plans.plan(batch, requests, requests).forest


def decode_plans(
    requests: int, max_blocks: int, setup: KernelSetup, device: str
) -> Callable[[StepBatch], Forest]:
    """As `RelayCudaMetadataBuilder` makes them."""
    limits = PlannerLimits(requests, requests, max_blocks * BLOCK_SIZE)
    # no layer runs
    planner = StepPlanner(limits, replace(setup, head_size=1), device=device)
    return DecodePlans(planner, layer_name="layer", min_shared_tokens=0).plan


STEPS = {
    "unchanged": Worker.nothing,
    "one has grown": Worker.grow,
    "one has begun": Worker.join,
    "all have begun": Worker.all_new,
}
WAYS = {"flash": node_plans, "triton": decode_plans}


def measured(
    way: str, table: np.ndarray, rounds: int, setup: KernelSetup, device: str = "cpu"
) -> dict[str, tuple[Timing, Timing]]:
    """By kind of step: planning and following.

    Args:
        way: of `WAYS`.
        table: int32 [requests, blocks].
        device: where the plans' buffers are.
    """
    worker = Worker(table)
    max_blocks = table.shape[1] + (rounds + 1) * GROWN_BLOCKS
    plan = WAYS[way](len(table), max_blocks, setup, device)
    times: dict[str, tuple[Timing, Timing]] = {name: (Timing([]), Timing([])) for name in STEPS}
    for number in range(rounds + 1):
        for name, change in STEPS.items():
            following_s = change(worker)
            began_s = time.perf_counter()
            batch = worker.batch()
            forest = plan(batch)
            plan_stats(forest, batch.query_lens, batch.seq_lens, None, 0.0)
            planning_s = time.perf_counter() - began_s
            if number:
                for timing, took_s in zip(times[name], (planning_s, following_s), strict=True):
                    timing.samples_s.append(took_s)
    return times


def main() -> None:
    options = argument_parser(__doc__, rounds=25).parse_args()
    result = Result.begin(__file__, __doc__, options)
    requests, blocks = (8, 16) if options.smoke else (REQUESTS, BLOCKS)
    setup = KernelSetup.of(
        shipped_for((9, 0)), LayerShape(NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, kv_bytes=2), NUM_SMS
    )
    rows = []
    for name, table in block_tables(requests, blocks).items():
        for way in WAYS:
            times = measured(way, table, options.rounds, setup)
            row = {"block tables": name, "kernels": way}
            row |= {f"{step} ms": planning.median_ms for step, (planning, _) in times.items()}
            row["slowest ms"] = max(max(each.samples_s) for each, _ in times.values()) * 1e3
            row |= {
                f"following, {step} ms": times[step][1].median_ms
                for step in ("one has begun", "all have begun")
            }
            rows.append(row)
            for step, (planning, _) in times.items():
                bar_ms = UNCHANGED_BAR_MS if step == "unchanged" else CHANGED_BAR_MS
                what = f"planning for GPUs, {way}, {name}, {step}, ms"
                result.add_goal(
                    Goal(what, planning.median_ms, bar_ms, lower_is_better=True, unit="ms")
                )
    result.add_table(f"{requests} requests of {blocks} blocks", rows)
    result.end(options)


if __name__ == "__main__":
    main()
