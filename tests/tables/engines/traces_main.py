# SPDX-License-Identifier: Apache-2.0
"""Asks a model that is started with traces, for test_traces.py.

Usage: python -m tests.tables.engines.traces_main MODEL FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from vllm_relay.tables import llm_map, open_engine, tracing

ENDPOINT = "http://127.0.0.1:9"


def main() -> None:
    model, folder = sys.argv[1:]
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # vLLM's is refused then, and its spans come here
    trace.set_tracer_provider(provider)
    tracing._tracer = lambda endpoint: provider.get_tracer("test")
    engine = open_engine(
        model, dtype="float32", enforce_eager=True, num_gpu_blocks_override=100, block_size=32,
        otlp_traces_endpoint=ENDPOINT,
    )  # fmt: skip
    with trace.get_tracer("test").start_as_current_span("caller"):
        table = pa.table({"n": [1, 2]})
        arguments = {"engine": engine, "max_tokens": 4, "choices": ["yes", "no"]}
        traced = llm_map(table, "Is it?", otlp_traces_endpoint=ENDPOINT, **arguments)
        llm_map(table, "Is it not?", **arguments)
    engine.close()
    spans = [
        {
            "name": each.name,
            "id": each.context.span_id,
            "parent": each.parent and each.parent.span_id,
            "attributes": dict(each.attributes),
        }
        for each in exporter.get_finished_spans()
    ]
    found = {"spans": spans, "prompt_tokens": traced.report.prompt_tokens}
    Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
