# SPDX-License-Identifier: Apache-2.0
"""An engine under random arrivals, aborts, pins, unpins and resets, on a small cache.

Usage: python -m tests.scheduler.soak_main MODEL OUTPUT.json          what vLLM answers, alone
       python -m tests.scheduler.soak_main MODEL OUTPUT.json SECONDS SEED EXPECTED.json
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, EngineArgs, LLMEngine, SamplingParams

from tests.integration.engine_main import ENGINE_ARGS, completion, greedy, tokens
from tests.integration.runs import ROBUST_LEAD
from vllm_relay.prefix_cache.pins import EXTRA_ARG, PinError

NUM_BLOCKS = 28
OUTPUT_TOKENS = 20
MAX_OUTSTANDING = 30


def prompts() -> list[list[int]]:
    """Four families, whose members share 32 to 160 tokens; some prompts are equal."""
    made = []
    for family in range(4):
        root = tokens(family, 32 * (1 + family))
        for member in range(12):
            branch = tokens(50 + family, 48) if member % 3 == 0 else []
            made.append(root + branch + tokens(100 + member % 10, 5 + 7 * member))
    return made


class Soak:
    def __init__(self, engine: LLMEngine, seed: int, expected: list[dict[str, Any]]) -> None:
        self.engine = engine
        self.scheduler = engine.engine_core.engine_core.scheduler
        self.rng = random.Random(seed)
        self.expected = expected
        self.prompts = prompts()
        self.outstanding: dict[str, tuple[int, int]] = {}  # prompt, output tokens
        self.counts = dict.fromkeys(
            ("added", "finished", "aborted", "pinned", "refused", "unpinned", "resets"), 0
        )

    def add(self, extra_args: dict[str, Any] | None = None, prompt: int | None = None) -> None:
        index = self.rng.randrange(len(self.prompts)) if prompt is None else prompt
        output_tokens = self.rng.randint(1, OUTPUT_TOKENS)
        request_id = str(self.counts["added"])
        self.counts["added"] += 1
        self.engine.add_request(
            request_id,
            {"prompt_token_ids": self.prompts[index]},
            SamplingParams(
                temperature=0,
                max_tokens=output_tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args=extra_args,
            ),
        )
        self.outstanding[request_id] = (index, output_tokens)

    def abort(self) -> None:
        request_id = self.rng.choice(sorted(self.outstanding))
        self.engine.abort_request([request_id])
        if self.outstanding.pop(request_id, None) is not None:
            self.counts["aborted"] += 1

    def pin(self) -> None:
        index = self.rng.randrange(len(self.prompts))
        pin_id = f"pin-{index}"
        try:
            self.scheduler.pins.declare(pin_id, self.prompts[index][:64])
        except PinError:
            self.counts["refused"] += 1
            return
        self.counts["pinned"] += 1
        self.add({EXTRA_ARG: pin_id}, index)

    def unpin(self) -> None:
        pins = self.scheduler.pins.entries()
        if pins:
            self.scheduler.pins.unpin(self.rng.choice(pins)["id"])
            self.counts["unpinned"] += 1

    def step(self) -> None:
        for output in self.engine.step():
            if not output.finished:
                continue
            index, output_tokens = self.outstanding.pop(output.request_id)
            self.counts["finished"] += 1
            actual = list(output.outputs[0].token_ids)
            expected = self.expected[index]
            leads = expected["leads"][:output_tokens]
            sure = next((i for i, lead in enumerate(leads) if lead < ROBUST_LEAD), output_tokens)
            assert len(actual) == output_tokens
            assert actual[:sure] == expected["token_ids"][:sure], f"prompt {index}: {actual}"

    def run(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            chance = self.rng.random()
            if chance < 0.5 and len(self.outstanding) < MAX_OUTSTANDING:
                for _ in range(self.rng.choice((1, 1, 2, 8))):
                    self.add()
            elif chance < 0.55 and self.outstanding:
                self.abort()
            elif chance < 0.6:
                self.pin()
            elif chance < 0.66:
                self.unpin()
            elif chance < 0.665:
                self.scheduler.reset_prefix_cache(reset_running_requests=True)
                self.counts["resets"] += 1
            if self.engine.has_unfinished_requests():
                self.step()
        while self.engine.has_unfinished_requests():
            self.step()

    def check_nothing_is_left(self) -> None:
        assert not self.outstanding
        assert self.counts["added"] == self.counts["finished"] + self.counts["aborted"]
        for pin in self.scheduler.pins.entries():
            self.scheduler.pins.unpin(pin["id"])
        assert len(self.scheduler.waiting) == 0
        assert self.scheduler.waiting.num_records() == 0
        assert len(self.scheduler.next_use) == 0
        assert self.engine.reset_prefix_cache()


def main() -> None:
    model, output_path, *soak = sys.argv[1:]
    if not soak:
        llm = LLM(**{**ENGINE_ARGS, "model": model, "attention_backend": "cpu_attn"})
        results = []
        for prompt in prompts():
            [output] = llm.generate(
                [{"prompt_token_ids": prompt}], greedy(OUTPUT_TOKENS, logprobs=2), use_tqdm=False
            )
            results.append(completion(output.outputs[0]))
        Path(output_path).write_text(json.dumps(results))
        return
    seconds, seed, expected_path = soak
    args = {
        **ENGINE_ARGS,
        "model": model,
        "attention_backend": "relay",
        "num_gpu_blocks_override": NUM_BLOCKS,
        "additional_config": {"relay": {"scheduler": True, "max_hold_s": 0.2, "max_overtakes": 8}},
    }
    engine = LLMEngine.from_engine_args(EngineArgs(**args))
    soak_run = Soak(engine, int(seed), json.loads(Path(expected_path).read_text()))
    soak_run.run(float(seconds))
    soak_run.check_nothing_is_left()
    metrics = {m.name: m.value for m in engine.get_metrics() if hasattr(m, "value")}
    soak_run.counts["preemptions"] = metrics["vllm:num_preemptions"]
    Path(output_path).write_text(json.dumps(soak_run.counts))


if __name__ == "__main__":
    main()
