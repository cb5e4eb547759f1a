# SPDX-License-Identifier: Apache-2.0
"""Process of `TablesEngine`."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pyarrow as pa
from vllm import LLM

from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_main import start_llm
from vllm_relay.demo.engine_process import serve
from vllm_relay.demo.tables.engine import BLOCK_SIZE_TOKENS, NUM_BLOCKS, TableAnswers, Way
from vllm_relay.demo.tables.workload import TEMPLATE
from vllm_relay.tables import llm_map
from vllm_relay.tables.engines.base import Prompt
from vllm_relay.tables.engines.in_process import InProcessEngine
from vllm_relay.tables.jobs.prompts.format import PromptFormat
from vllm_relay.tables.question import Question


def start(settings: EngineSettings) -> LLM:
    """vLLM as it is, with prefix caching."""
    return start_llm(
        settings,
        cpu_kv_cache_gib=1,
        with_metrics=False,
        block_size=BLOCK_SIZE_TOKENS,
        num_gpu_blocks_override=NUM_BLOCKS,
    )


def ask(llm: LLM, way: Way, columns: dict[str, list[str]], question: Question) -> TableAnswers:
    """One question to every row."""
    llm.reset_prefix_cache()
    return (_row_by_row if way == "row_by_row" else ask_with_llm_map)(llm, columns, question)


def _row_by_row(llm: LLM, columns: dict[str, list[str]], question: Question) -> TableAnswers:
    """A prompt for every row, in the order of the table and its columns."""
    begun_s = time.perf_counter()
    engine = InProcessEngine(llm)
    prompt_format = PromptFormat(question, engine.tokenizer, TEMPLATE)
    messages = [
        prompt_format.message(
            TEMPLATE.render_field(name, json.dumps(cell))
            for name, cell in zip(columns, row, strict=True)
        )
        for row in zip(*columns.values(), strict=True)
    ]
    token_ids = prompt_format.token_ids(messages)
    prompts = [
        Prompt(number, message, tokens)
        for number, (message, tokens) in enumerate(zip(messages, token_ids, strict=True))
    ]
    planned_s = time.perf_counter()
    done = sorted(engine.generate(prompts, question), key=lambda each: each.number)
    return TableAnswers(
        texts=[None if each.error else each.text.strip() for each in done],
        prompts=len(done),
        prompt_tokens=sum(each.num_prompt_tokens for each in done),
        cached_tokens=sum(each.num_cached_tokens for each in done),
        output_tokens=sum(each.num_output_tokens for each in done),
        seconds=time.perf_counter() - begun_s,
        planning_seconds=planned_s - begun_s,
    )


def ask_with_llm_map(
    engine: Any, columns: dict[str, list[str]], question: Question
) -> TableAnswers:
    """As a user would, of any engine."""
    begun_s = time.perf_counter()
    result = llm_map(
        pa.table(columns),
        question.text,
        question.fields,
        engine=engine,
        choices=question.output.choices or None,
        max_tokens=question.max_tokens,
        template=TEMPLATE,
        show_progress=False,
    )
    seconds = time.perf_counter() - begun_s
    texts: list[str | None] = result.objects
    return TableAnswers(
        texts=[None if text is None else text.strip() for text in texts],
        prompts=result.report.num_prompts,
        prompt_tokens=result.report.prompt_tokens,
        cached_tokens=result.report.cached_tokens,
        output_tokens=result.report.output_tokens,
        seconds=seconds,
        planning_seconds=seconds - result.report.seconds + result.report.planning_seconds,
    )


if __name__ == "__main__":
    serve(int(sys.argv[1]), start, ask)
