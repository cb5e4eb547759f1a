# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay demo --long`: questions to a long document, with all of it on the device and without.

Both engines read the document with the first question and find it in their prefix caches with the
others.  They answer one question at a time, in turn.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from transformers import AutoTokenizer

from vllm_relay.arguments import check_writable
from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_process import EngineError, wait_until_workers_sleep
from vllm_relay.demo.long_engine import LongAnswer, LongEngine
from vllm_relay.demo.long_report import LongComparison, answers_table, costs_table
from vllm_relay.demo.long_workload import chronicle_workload
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.demo.requests import Request, tokenize

_BACKENDS = ("relay", "relay_sparse")


def run_long_demo(
    *,
    document_tokens: int,
    num_questions: int,
    output_tokens: int,
    dtype: str = "bfloat16",
    seed: int = 0,
    keep: Path | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> int:
    """Run the comparison, print tables and return the exit status.

    Args:
        document_tokens: length of the document, 4096 to 32000.
        num_questions: from 2 on; the first one comes with a document that nobody has read yet.
        output_tokens: length of every answer, 3 to 8.
        dtype: of the weights, the activations and the KV cache.
        seed: the same seed gives the same model and questions.
        keep: where the recall model and the logs are kept; a temporary directory if None.
        json_path: where all numbers are written as JSON.
        console: where to print; the standard output if None.

    Returns:
        0, or 1 if a setting is out of its range, an engine failed or answers are wrong; the reason
        is printed.
    """
    console = console or Console()
    with ExitStack() as stack:
        directory = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            check_writable("--json", json_path)
            for name, value, least in [
                ("num_questions", num_questions, 2),
                ("output_tokens", output_tokens, 3),
            ]:
                if value < least:
                    raise ValueError(f"{name} is {value}, expected at least {least}")
            directory.mkdir(parents=True, exist_ok=True)
            with console.status("making the document"):
                workload = chronicle_workload(
                    document_tokens=document_tokens,
                    num_questions=num_questions,
                    output_tokens=output_tokens,
                    seed=seed,
                )
                model = build_recall_model(directory / "recall-model", dtype=dtype, seed=seed)
                tokenizer = AutoTokenizer.from_pretrained(model)
                requests = tokenize(tokenizer, [workload])
            console.print(
                f"The recall model in {dtype}: {num_questions} questions to a document of "
                f"{document_tokens:,} tokens, one at a time, {output_tokens} output tokens each."
            )
            settings = EngineSettings(
                model=str(model),
                attention_backend=None,
                dtype=dtype,
                max_model_len=max(len(r.prompt_token_ids) for r in requests) + output_tokens,
                max_num_seqs=1,
            )
            dense, sparse = _answers(requests, settings, output_tokens, directory, console)
            comparison = LongComparison(requests, dense, sparse)
        except (EngineError, OSError, ValueError) as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            return 1
    console.print(answers_table(comparison, lambda tokens: str(tokenizer.decode(tokens))))
    console.print(costs_table(comparison))
    if json_path is not None:
        numbers = {
            "model": "recall",
            "dtype": dtype,
            "seed": seed,
            "document_tokens": document_tokens,
            "output_tokens": output_tokens,
            **comparison.as_dict(),
        }
        json_path.write_text(json.dumps(numbers, indent=2) + "\n")
    return _conclude(comparison, console)


def _answers(
    requests: list[Request],
    settings: EngineSettings,
    output_tokens: int,
    directory: Path,
    console: Console,
) -> list[list[LongAnswer]]:
    """Of both engines. Which one begins changes with every question."""
    answers: list[list[LongAnswer]] = [[] for _ in _BACKENDS]
    with ExitStack() as stack:
        status = stack.enter_context(console.status("starting two engines"))
        engines = [
            stack.enter_context(
                LongEngine(
                    backend,
                    replace(settings, attention_backend=backend),
                    directory / f"{backend}.log",
                )
            )
            for backend in _BACKENDS
        ]
        for engine in engines:
            engine.wait()
        for i, request in enumerate(requests):
            turns = list(zip(engines, answers, strict=True))
            for engine, of_engine in turns if i % 2 == 0 else reversed(turns):
                wait_until_workers_sleep()
                status.update(f"{engine.name}: question {i + 1} of {len(requests)}")
                of_engine.append(engine.answer(request.prompt_token_ids, output_tokens))
        status.update("stopping the engines")
        for engine in engines:
            engine.ask_to_stop()
    return answers


def _conclude(comparison: LongComparison, console: Console) -> int:
    problems = comparison.problems()
    for problem in problems:
        console.print(problem, style="red", markup=False, highlight=False)
    if problems:
        return 1
    dense, sparse = comparison.dense, comparison.sparse
    console.print(
        f"While it generates, a request holds {sparse.decode_kv_bytes / dense.decode_kv_bytes:.1%} "
        "of the KV memory on the device with relay_sparse, and from the third token on a token "
        f"takes {sparse.token_s / dense.token_s:.2f} times as long as with relay.",
        style="green",
        highlight=False,
    )
    return 0
