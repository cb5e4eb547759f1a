# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay demo --long`: questions to a long document, with all of it on the device and without.

Both engines read the document with the first question and find it in their prefix caches with the
others.  They answer one question at a time, in turn.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_process import in_turn, running_engines, wait_until_workers_sleep
from vllm_relay.demo.long_contexts.engine import LongAnswer, LongEngine
from vllm_relay.demo.long_contexts.report import LongComparison, answers_table, costs_table
from vllm_relay.demo.long_contexts.workload import chronicle_workload
from vllm_relay.demo.options import DemoOptions
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.demo.requests import Request, tokenize
from vllm_relay.demo.workload import check_at_least

_BACKENDS = ("relay", "relay_sparse")


def run_long_demo(
    options: DemoOptions, *, document_tokens: int, num_questions: int, output_tokens: int
) -> int:
    """Run the comparison, print tables and return the exit status.

    Args:
        document_tokens: length of the document, 4096 to 32000.
        num_questions: from 2 on; the first one comes with a document that nobody has read yet.
        output_tokens: length of every answer, 3 to 8.

    Returns:
        0, or 1 if an engine failed or answers are wrong; the reason is printed.

    Raises:
        CommandLineError: a setting is out of its range.
    """
    found = options.run(lambda: _run(options, document_tokens, num_questions, output_tokens))
    if found is None:
        return 1
    comparison, tokenizer = found
    dense, sparse = comparison.dense, comparison.sparse
    options.console.print(answers_table(comparison, lambda tokens: str(tokenizer.decode(tokens))))
    options.console.print(costs_table(comparison))
    options.write_json(
        {
            "model": "recall",
            "dtype": options.dtype,
            "seed": options.seed,
            "document_tokens": document_tokens,
            "output_tokens": output_tokens,
            **comparison.as_dict(),
        }
    )
    return options.conclude(
        comparison.problems(),
        f"While it generates, a request holds {sparse.decode_kv_bytes / dense.decode_kv_bytes:.1%} "
        "of the KV memory on the device with relay_sparse, and from the third token on a token "
        f"takes {sparse.token_s / dense.token_s:.2f} times as long as with relay.",
        next_step="vllm serve MODEL --attention-backend relay_sparse "
        "--additional-config.relay.context_dir FOLDER",
    )


def _run(
    options: DemoOptions, document_tokens: int, num_questions: int, output_tokens: int
) -> tuple[LongComparison, PreTrainedTokenizerBase]:
    check_at_least(2, num_questions=num_questions)
    check_at_least(3, output_tokens=output_tokens)
    with options.folder() as folder:
        with options.console.status("making the document"):
            workload = chronicle_workload(
                document_tokens=document_tokens,
                num_questions=num_questions,
                output_tokens=output_tokens,
                seed=options.seed,
            )
            model = build_recall_model(
                folder / "recall-model", dtype=options.dtype, seed=options.seed
            )
            tokenizer = AutoTokenizer.from_pretrained(model)
            requests = tokenize(tokenizer, [workload])
        options.console.print(
            f"The recall model in {options.dtype}: {num_questions} questions to a document of "
            f"{document_tokens:,} tokens, one at a time, {output_tokens} output tokens each."
        )
        settings = EngineSettings(
            model=str(model),
            attention_backend=None,
            dtype=options.dtype,
            max_model_len=max(len(r.prompt_token_ids) for r in requests) + output_tokens,
            max_num_seqs=1,
        )
        dense, sparse = _answers(requests, settings, output_tokens, folder, options.console)
    return LongComparison(requests, dense, sparse), tokenizer


def _answers(
    requests: list[Request],
    settings: EngineSettings,
    output_tokens: int,
    folder: Path,
    console: Console,
) -> list[list[LongAnswer]]:
    """Of both engines. Which one begins changes with every question."""
    answers: list[list[LongAnswer]] = [[] for _ in _BACKENDS]
    with (
        console.status("starting two engines") as status,
        running_engines(
            LongEngine(name, replace(settings, attention_backend=name), folder / f"{name}.log")
            for name in _BACKENDS
        ) as engines,
    ):
        for i, request in enumerate(requests):
            for engine, of_engine in in_turn(zip(engines, answers, strict=True), i):
                wait_until_workers_sleep()
                status.update(f"{engine.name}: question {i + 1} of {len(requests)}")
                of_engine.append(engine.answer(request.prompt_token_ids, output_tokens))
        status.update("stopping the engines")
    return answers
