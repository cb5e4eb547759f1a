# SPDX-License-Identifier: Apache-2.0
"""Requests below the threshold: what relay_sparse costs where it has nothing to do.

The demo's recall model, or another one, answers the same prompts of fewer than `min_context_tokens`
tokens with RELAY and with RELAY_SPARSE, in engines that live at the same time and work in turn.
"identical" are outputs with the same tokens.
"""

import tempfile
from contextlib import ExitStack
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.common import Goal, Result, Row, Timing, argument_parser, ratio
from vllm_relay.demo.engine import Engine, EngineSettings
from vllm_relay.demo.engine_process import wait_until_workers_sleep
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.demo.requests import tokenize
from vllm_relay.demo.workload import ledger_workload

DENSE, SPARSE = "RELAY", "RELAY_SPARSE"
MOST_TIMES = 1.01


def recall_prompts(model: str, num_prompts: int, prompt_tokens: int) -> list[list[int]]:
    """Questions to two ledgers."""
    workload = ledger_workload(
        num_system_prompts=2,
        system_prompt_tokens=prompt_tokens,
        questions_per_prompt=num_prompts // 2,
        output_tokens=8,
    )
    requests = tokenize(AutoTokenizer.from_pretrained(model), workload)
    return [request.prompt_token_ids for request in requests]


def made_up_prompts(num_prompts: int, prompt_tokens: int) -> list[list[int]]:
    """For models that this benchmark knows nothing of: ids that every vocabulary has."""
    return [
        [1] + [3 + (number * 7919 + i * i * 31 + i * 17) % 250 for i in range(prompt_tokens)]
        for number in range(num_prompts)
    ]


def main() -> None:
    parser = argument_parser(__doc__, rounds=15)
    parser.add_argument("--model", help="folder of another model; the recall model if not given")
    parser.add_argument("--prompts", type=int, default=48, help="(%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=1500, help="(%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=48, help="(%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(%(default)s)")
    options = parser.parse_args()
    result = Result.begin(__file__, __doc__, options)
    if options.smoke:
        options.prompts, options.prompt_tokens, options.output_tokens = 4, 200, 4
        options.rounds = 1
    samples: dict[str, list[float]] = {DENSE: [], SPARSE: []}
    num_identical = num_outputs = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relay-bench-")))
        model = options.model or str(build_recall_model(folder / "model", dtype=options.dtype))
        if options.model:
            prompts = made_up_prompts(options.prompts, options.prompt_tokens)
        else:
            prompts = recall_prompts(model, options.prompts, options.prompt_tokens)
        most_tokens = max(map(len, prompts)) + options.output_tokens
        engines = {}
        for backend in samples:
            settings = EngineSettings(model, backend, options.dtype, most_tokens, options.prompts)
            log_path = folder / f"{backend}.log"
            engines[backend] = stack.enter_context(Engine(backend, settings, log_path))
        for engine in engines.values():
            engine.wait()
            engine.generate(prompts, options.output_tokens)
        for number in range(options.rounds):
            outputs = {}
            for backend in list(engines)[:: -1 if number % 2 else 1]:
                wait_until_workers_sleep()
                outputs[backend] = engines[backend].generate(prompts, options.output_tokens)
                samples[backend].append(outputs[backend].generation_s)
            pairs = zip(*(outputs[backend].token_ids for backend in samples), strict=True)
            num_identical += sum(dense == sparse for dense, sparse in pairs)
            num_outputs += len(prompts)
    dense, sparse = Timing(samples[DENSE]), Timing(samples[SPARSE])
    row: Row = {
        "requests": len(prompts),
        "prompt tokens": max(map(len, prompts)),
        "relay s": dense.median_s,
        "relay_sparse s": sparse.median_s,
        "spread": max(dense.spread, sparse.spread),
        "times as long": ratio(sparse, dense),
        "identical": f"{num_identical} of {num_outputs}",
    }
    result.add_table("Requests below the threshold", [row])
    value = ratio(sparse, dense)
    result.add_goal(Goal("time over relay's", value, MOST_TIMES, 1.0, lower_is_better=True))
    different = num_outputs - num_identical
    result.add_goal(Goal("outputs that differ", different, 0, 0, lower_is_better=True, unit=""))
    result.end(options)


if __name__ == "__main__":
    main()
