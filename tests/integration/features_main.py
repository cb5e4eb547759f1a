# SPDX-License-Identifier: Apache-2.0
"""Runs the scenarios of test_scheduler_features.py on one engine, in a process of its own.

The engine has a byte-level tokenizer and room for one LoRA adapter at a time.

Usage: python -m tests.integration.features_main OUTPUT.json ENGINE_ARGS.json SCENARIO...
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.metrics.reader import get_metrics_snapshot
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from tests.integration.engine_main import ENGINE_ARGS, completion, greedy, tokens
from tests.integration.tiny_models import LORA_RANK, save_adapter, save_tokenizer
from tests.support.records import records_of_queue
from tests.support.waiting import WAIT_S
from vllm_relay.scheduler.vllm_queue import PrefixRequestQueue

FEATURE_ARGS = {
    "skip_tokenizer_init": False,
    "enable_lora": True,
    "max_loras": 1,  # requests of other adapters are skipped
    "max_lora_rank": LORA_RANK,
    "max_cpu_loras": 2,
    # a model with random weights would write white space without end
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}

FAMILY_PREFIX_TOKENS = 130  # 4 full blocks
FAMILIES = 2
MEMBERS = 4
OUTPUT_TOKENS = 12
ABORT_STEP = 4
COMPILE_STEP = 8
BROKEN_REGEX = "broken"  # its compilation fails

JSON_SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "sizes": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 3},
        "new": {"type": "boolean"},
    },
    "required": ["colour", "sizes", "new"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"choice": ["north", "south", "east", "west"]},
    {"choice": ["yes", "no"]},
    {"regex": r"[0-9]{3}-[a-f]{4}"},
    {"regex": r"(ab|cd){2,5}\."},
    {"json": JSON_SCHEMA},
]

Finished = dict[str, dict[str, Any]]


def family_prompt(family: int, member: int) -> dict[str, list[int]]:
    prefix = tokens(family, FAMILY_PREFIX_TOKENS)
    return {"prompt_token_ids": prefix + tokens(20 + member, 3 + 9 * member)}


def waiting_counts(engine: LLMEngine) -> dict[str, int]:
    """After a step: those that vLLM set aside, and those that relay holds."""
    waiting = engine.engine_core.engine_core.scheduler.waiting
    deferred = [
        metric.value
        for metric in get_metrics_snapshot()
        if metric.labels.get("reason") == "deferred"
    ]
    return {"deferred": int(sum(deferred)), "held": getattr(waiting, "held_requests", 0)}


def finish_all(engine: LLMEngine, before_step: Callable[[int], None]) -> tuple[Finished, Any]:
    """The finished requests, and the most that were deferred by vLLM and held by relay at once."""
    finished: Finished = {}
    most = waiting_counts(engine)
    step = 0
    while engine.has_unfinished_requests():
        before_step(step)
        for request in engine.step():
            if request.finished:
                output = request.outputs[0]
                finished[request.request_id] = {
                    **completion(output),
                    "finish_reason": output.finish_reason,
                    "cached_tokens": request.num_cached_tokens,
                }
        most = {name: max(count, most[name]) for name, count in waiting_counts(engine).items()}
        step += 1
    return dict(sorted(finished.items())), most


@contextmanager
def no_adapter_for_requests_without() -> Iterator[None]:
    """vLLM on CPU takes -1, its index for "none", for the last one (vllm-project/vllm#48421)."""
    bgmv_shrink = lora_ops.bgmv_shrink

    def shrink(inputs: Any, weights: Any, output: Any, adapters: Any, *args: Any) -> None:
        bgmv_shrink(inputs, weights, output, adapters, *args)
        output[adapters < 0] = 0

    with patch.object(lora_ops, "bgmv_shrink", shrink):
        yield


def num_queue_records(engine: LLMEngine) -> int:
    """What relay's queue keeps about requests."""
    waiting = engine.engine_core.engine_core.scheduler.waiting
    return records_of_queue(waiting) if isinstance(waiting, PrefixRequestQueue) else 0


def run_lora(engine: LLMEngine) -> Any:
    """Equal prompts under two adapters and none, in any order; the last of each is aborted."""
    with tempfile.TemporaryDirectory() as directory, no_adapter_for_requests_without():
        adapters: dict[str, LoRARequest | None] = {"none": None}
        for number, name in enumerate(("first", "second"), start=1):
            path = save_adapter(Path(directory) / name, seed=number)
            adapters[name] = LoRARequest(name, number, str(path))
        requests = [
            (f"{adapter}-{family}-{member}", family_prompt(family, member), adapters[adapter])
            for adapter in adapters
            for family in range(FAMILIES)
            for member in range(MEMBERS)
        ]
        # nobody shares these under the same adapter
        requests += [
            (f"{name}-alone", family_prompt(9, 0), each) for name, each in adapters.items()
        ]
        random.Random(0).shuffle(requests)
        for request_id, prompt, adapter in requests:
            engine.add_request(
                request_id, prompt, greedy(OUTPUT_TOKENS, logprobs=2), lora_request=adapter
            )
        aborted = [name for name, *_ in requests if name.endswith(f"-{MEMBERS - 1}")]

        def before_step(step: int) -> None:
            if step == ABORT_STEP:
                engine.abort_request(aborted)

        finished, most = finish_all(engine, before_step)
    return {"finished": finished, "most": most, "queue_records": num_queue_records(engine)}


@contextmanager
def slow_compilation(num_grammars: int) -> Iterator[Callable[[], None]]:
    """No grammar is compiled before the function given here is called; it waits for all of them."""
    begin, done = threading.Event(), threading.Semaphore(0)
    compile_grammar = XgrammarBackend.compile_grammar

    def compile_slowly(backend: Any, request_type: Any, grammar: str, **kwargs: Any) -> Any:
        assert begin.wait(WAIT_S)
        try:
            if grammar == BROKEN_REGEX:
                raise ValueError("this grammar does not compile")
            return compile_grammar(backend, request_type, grammar, **kwargs)
        finally:
            done.release()

    def compile_all() -> None:
        begin.set()
        for _ in range(num_grammars):
            assert done.acquire(timeout=WAIT_S)

    with patch.object(XgrammarBackend, "compile_grammar", compile_slowly):
        yield compile_all


def run_structured(engine: LLMEngine) -> Any:
    """Prefixes of free requests and of such with a grammar; and one whose requests all have one.

    Grammars are compiled after a few steps. Before that one request with a grammar is aborted.
    """
    grammars: dict[str, dict[str, Any] | None] = {"broken": {"regex": BROKEN_REGEX}}
    prompts = {"broken": family_prompt(3, MEMBERS)}
    for family in (3, 4, 5):
        for member, grammar in enumerate([*GRAMMARS, None, None, None]):
            if grammar is not None or family != 5:
                name = f"{family}-{member}"
                grammars[name], prompts[name] = grammar, family_prompt(family, member)
    grammars["aborted"], prompts["aborted"] = GRAMMARS[0], family_prompt(5, MEMBERS + 9)
    names = sorted(grammars)
    random.Random(1).shuffle(names)
    num_grammars = sum(grammar is not None for grammar in grammars.values())
    with slow_compilation(num_grammars) as compile_all:
        for name in names:
            grammar = grammars[name]
            params = greedy(OUTPUT_TOKENS, logprobs=2)
            if grammar is not None:
                params = SamplingParams(
                    temperature=0,
                    max_tokens=100,
                    logprobs=2,
                    detokenize=False,
                    structured_outputs=StructuredOutputsParams(**grammar),
                )
            engine.add_request(name, prompts[name], params)

        def before_step(step: int) -> None:
            if step == ABORT_STEP:
                engine.abort_request(["aborted"])
            elif step == COMPILE_STEP:
                compile_all()

        finished, most = finish_all(engine, before_step)
    tokenizer = engine.get_tokenizer()
    for name, output in finished.items():
        output["grammar"] = grammars[name]
        # not by vLLM: it would go on from the prompt, which is no text
        output["text"] = tokenizer.decode(output["token_ids"], skip_special_tokens=True)
    return {
        "finished": finished,
        "most": most,
        "num_grammars": num_grammars,
        "queue_records": num_queue_records(engine),
    }


def run_reset(engine: LLMEngine) -> Any:
    """Whether every block has come back."""
    return engine.reset_prefix_cache()


SCENARIOS = {"lora": run_lora, "structured": run_structured, "reset": run_reset}


def main() -> None:
    output_path, args_path, *names = sys.argv[1:]
    args = {**ENGINE_ARGS, **FEATURE_ARGS, **json.loads(Path(args_path).read_text())}
    usage_context = UsageContext[args.pop("usage_context", "LLM_CLASS")]
    with tempfile.TemporaryDirectory() as directory:
        args["tokenizer"] = str(save_tokenizer(Path(directory)))
        engine = LLMEngine.from_engine_args(EngineArgs(**args), usage_context)
    results = {name: SCENARIOS[name](engine) for name in names}
    Path(output_path).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
