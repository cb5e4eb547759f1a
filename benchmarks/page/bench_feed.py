# SPDX-License-Identifier: Apache-2.0
"""What an engine spends on the live page, of the processor time of its steps.

A small model, whose steps are short, answers questions behind shared system prompts. The share is
what is noted in a step, and twice a second, while somebody looks, an answer with its encoding. Time
of the threads of the engine: what else runs on the machine does not count.
"""

import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.demo.workload import ledger_workload
from vllm_relay.page.feed import Feed
from vllm_relay.page.record import BlockRecord
from vllm_relay.page.source import Source
from vllm_relay.page.viewers import POLL_EVERY_S

NOTED = {BlockRecord: ("on_cached", "on_taken", "on_admitted", "before_free"), Feed: ("on_step",)}
"""What runs in a step."""
OUTPUT_TOKENS = 64
MAX_SEQS = 16


class Timer:
    """Seconds of processor time in functions."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        nothing = self.timed("nothing", lambda: None)
        for _ in range(10_000):
            nothing()
        self._own_s = self.seconds["nothing"] / self.calls["nothing"]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - began_s
                self.calls[name] += 1

        return timed

    def clear(self) -> None:
        self.seconds.clear()
        self.calls.clear()

    def total_s(self, *names: str) -> float:
        """Without what timing takes."""
        return sum(self.seconds[name] - self.calls[name] * self._own_s for name in names)


class Watched:
    """Steps of an engine core that is asked twice a second, as a server asks it."""

    def __init__(self, timer: Timer, step: Callable[..., Any]) -> None:
        self.source: Source | None = None
        """None: nobody looks."""
        self._next_s = 0.0
        self._step = timer.timed("step", step)
        self._answer = timer.timed("answer", _encoded_answer)

    def step(self, core: Any) -> Any:
        if self.source is not None and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + POLL_EVERY_S
            asked = {self.source.feed: self.source.question(texts=True)}
            self.source.take(self._answer(core, asked))
        return self._step(core)


def _encoded_answer(core: Any, asked: dict[str, Any]) -> Any:
    from vllm.v1.serial_utils import MsgpackEncoder

    answer = core.relay_command("watch_forest", {"watcher": "me", "asked": asked})["result"]
    MsgpackEncoder().encode(answer)
    return answer


@contextmanager
def measured_engine(timer: Timer) -> Iterator[tuple[Any, Watched]]:
    """An engine in this process, whose steps are timed."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
    }
    from vllm import LLM
    from vllm.v1.engine.core import EngineCore

    watched = Watched(timer, EngineCore.step)
    with ExitStack() as stack:
        changed = {(EngineCore, "step"): lambda core: watched.step(core)}
        for owner, names in NOTED.items():
            for name in names:
                changed[owner, name] = timer.timed(name, getattr(owner, name))
        for (owner, name), function in changed.items():
            stack.enter_context(mock.patch.object(owner, name, function))
        model = build_recall_model(stack.enter_context(TemporaryDirectory()), dtype="float32")
        yield (
            LLM(
                str(model),
                dtype="float32",
                enforce_eager=True,
                max_model_len=4096,
                block_size=32,
                num_gpu_blocks_override=600,
                max_num_seqs=MAX_SEQS,
                async_scheduling=False,
                attention_backend="relay",
                additional_config={"relay": {"scheduler": True, "page": True}},
            ),
            watched,
        )


def answer_questions(llm: Any, questions: int, seed: int) -> None:
    from vllm import SamplingParams

    conversations = ledger_workload(
        num_system_prompts=4,
        system_prompt_tokens=600,
        questions_per_prompt=questions,
        output_tokens=6,
        seed=seed,
    )
    prompts = [f"{each.system_prompt} {q.text}" for each in conversations for q in each.questions]
    random.Random(seed).shuffle(prompts)
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)
    llm.generate(prompts, sampling, use_tqdm=False)


def measure(timer: Timer) -> dict[str, float]:
    """Of what ran since the timer was cleared."""
    steps, answers = timer.calls["step"], timer.calls["answer"]
    step_s = timer.total_s("step") / steps
    noted_s = timer.total_s(*(name for names in NOTED.values() for name in names)) / steps
    answer_s = timer.total_s("answer") / answers if answers else 0.0
    share = noted_s / step_s + answer_s / POLL_EVERY_S
    return {
        "step ms": 1e3 * step_s,
        "noted us a step": 1e6 * noted_s,
        "answer us": 1e6 * answer_s,
        "share %": 100 * share,
    }


def main() -> None:
    options = argument_parser(__doc__, rounds=5).parse_args()
    result = Result.begin(__file__, __doc__, options)
    questions, rounds = (2, 1) if options.smoke else (8, options.rounds)
    timer = Timer()
    found: dict[str, list[dict[str, float]]] = {"nobody looks": [], "somebody looks": []}
    with measured_engine(timer) as (llm, watched):
        answer_questions(llm, questions, seed=0)
        decode = llm.get_tokenizer().decode
        for number in range(rounds):
            for name, samples in found.items():
                looks = name == "somebody looks"
                watched.source = Source("0", "rank 0", decode, shares=True) if looks else None
                timer.clear()
                answer_questions(llm, questions, seed=1 + number)
                samples.append(measure(timer))
    rows: list[Row] = [
        {"page": name}
        | {key: statistics.median(each[key] for each in samples) for key in samples[0]}
        for name, samples in found.items()
    ]
    result.add_table(f"Steps of {MAX_SEQS} requests at most, median of {rounds}", rows)
    what = "live page: share of a step while watched, %"
    result.add_goal(Goal(what, rows[1]["share %"], 0.5, 0.2, lower_is_better=True, unit="%"))
    result.end(options)


if __name__ == "__main__":
    main()
