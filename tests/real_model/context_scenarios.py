# SPDX-License-Identifier: Apache-2.0
"""Questions to documents: computed each time, kept, or kept by another engine."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from vllm import LLM

from tests.integration.engine_main import evict_everything
from tests.real_model.generation import generate
from tests.real_model.workload import document_prompts, documents
from vllm_relay.long_context.client import keep_context, list_contexts


def run_documents(llm: LLM, model: str) -> Any:
    first, second = (document_prompts(model, number) for number in range(2))
    answers = generate(llm, first + second)
    return [answers[: len(first)], answers[len(first) :]]


def run_kept_document(llm: LLM, model: str, number: int) -> Any:
    """At once, and when its indexes are built."""
    keep_context(llm, documents(model)[number])
    answers = []
    for _ in range(2):
        evict_everything(llm)
        answers.append(generate(llm, document_prompts(model, number)))
        while any(each.state == "indexing" for each in list_contexts(llm)):
            time.sleep(0.01)
    return {"contexts": list(map(asdict, list_contexts(llm))), "answers": answers}


def run_found_document(llm: LLM, model: str) -> Any:
    """The first one, which is in the engine's folder."""
    contexts = list(map(asdict, list_contexts(llm)))
    return {"contexts": contexts, "answers": generate(llm, document_prompts(model, 0))}
