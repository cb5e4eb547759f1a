# SPDX-License-Identifier: Apache-2.0
"""Spans of statements and jobs, and who is told of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from pydantic import BaseModel, field_validator

from tests.tables.engines.server.fake_server import OTHER_MODEL, chat_answer, fake_server
from tests.tables.recording_engine import RecordingEngine, Refusal, Row
from vllm_relay.tables import JobOptions, connect, llm_filter, llm_map, llm_map_async, tracing
from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.engines.replicas import ReplicaEngine
from vllm_relay.tables.engines.server.engine import ServerEngine
from vllm_relay.tables.sql import AnswerFailedError

ENDPOINT = "http://collector:4317"
CALL = "llm('Is {n} even?', {n}, return := 'bool', seed := 7, max_tokens := 5)"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "span_exporter", lambda endpoint: exporter)
    monkeypatch.setattr("opentelemetry.sdk.trace.export.BatchSpanProcessor", SimpleSpanProcessor)
    tracing._tracer.cache_clear()
    yield exporter
    tracing._tracer.cache_clear()


def is_even(row: Row) -> str:
    if row["n"] == 3:
        raise Refusal("secret row 3")
    return str(row["n"] % 2 == 0).lower()


def spans_of(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return list(exporter.get_finished_spans())


def test_a_statement_has_a_span_and_each_job_in_it(exporter: InMemorySpanExporter) -> None:
    table = pa.table({"n": [1, 2, 2, 3]})
    options = JobOptions(otlp_traces_endpoint=ENDPOINT)
    engine = RecordingEngine(is_even)
    with connect(engine=engine, options=options, tables={"t": table}) as database:
        database.sql("SELECT 1")
        database.explain(f"SELECT {CALL} FROM t")
        assert not spans_of(exporter)
        database.sql(f"SELECT {CALL} FROM t")
        job, statement = spans_of(exporter)
        assert (statement.name, statement.kind) == ("llm statement", SpanKind.INTERNAL)
        assert (job.name, job.kind) == ("chat", SpanKind.CLIENT)
        assert statement.parent is None
        assert job.parent is not None and statement.context is not None
        assert job.parent.span_id == statement.context.span_id
        # ten tokens of each prompt and one of each answer, by the engine; one was refused
        done = {
            "gen_ai.usage.input_tokens": 20, "gen_ai.usage.output_tokens": 2,
            "gen_ai.usage.cache_read.input_tokens": 0, "relay.rows": 4, "relay.prompts": 3,
            "relay.prompts.known": 0, "relay.rows.failed": 1, "relay.tokens.saved": 11,
        }  # fmt: skip
        assert statement.attributes == {"db.system.name": "duckdb", **done}
        assert job.attributes == {
            "gen_ai.operation.name": "chat", "gen_ai.request.temperature": 0.0,
            "gen_ai.request.max_tokens": 5, "gen_ai.request.seed": 7,
            "gen_ai.output.type": "text", **done,
        }  # fmt: skip
        assert job.resource.attributes["service.name"] == "vllm-relay"
        # what is known is told of the later statement only
        exporter.clear()
        database.sql(f"SELECT {CALL} FROM t WHERE n < 3")
        _, statement = spans_of(exporter)
        assert statement.attributes is not None
        assert statement.attributes["relay.prompts.known"] == 2
        assert statement.attributes["gen_ai.usage.input_tokens"] == 0


def test_a_failure_is_told_without_what_rows_hold(exporter: InMemorySpanExporter) -> None:
    options = JobOptions(otlp_traces_endpoint=ENDPOINT)
    engine = RecordingEngine(is_even)
    table = pa.table({"n": [2, 3]})
    with (
        connect(engine=engine, options=options, tables={"t": table}, on_error="raise") as database,
        pytest.raises(AnswerFailedError, match="secret"),
    ):
        database.sql(f"SELECT {CALL} FROM t")
    job, statement = spans_of(exporter)
    assert statement.status.status_code == StatusCode.ERROR
    assert statement.attributes is not None
    assert statement.attributes["error.type"] == "AnswerFailedError"
    assert statement.attributes["relay.rows.failed"] == 1
    assert job.status.status_code == StatusCode.UNSET
    for each in (job, statement):
        assert "secret" not in each.to_json() and "Is {n}" not in each.to_json()


@pytest.mark.parametrize("replicas", [1, 2])
def test_requests_carry_the_span_of_their_job(
    exporter: InMemorySpanExporter, replicas: int
) -> None:
    table = pa.table({"n": [1, 2]})
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    with fake_server(lambda body: chat_answer('{"a": 1}'), OTHER_MODEL) as server:
        engine: Engine = ServerEngine(server.url)
        if replicas > 1:
            engine = ReplicaEngine([ServerEngine(server.url) for _ in range(replicas)])
        assert "traceparent" not in server.headers
        result = llm_map(
            table, "What?", engine=engine, output=schema, otlp_traces_endpoint=ENDPOINT
        )
        assert result.objects == [{"a": 1}] * 2
        [job] = spans_of(exporter)
        assert job.name == "chat gpt" and job.attributes is not None
        assert job.attributes["gen_ai.request.model"] == "gpt"
        assert job.attributes["gen_ai.output.type"] == "json"
        assert job.context is not None
        trace_id, span_id = job.context.trace_id, job.context.span_id
        assert server.headers["traceparent"].startswith(f"00-{trace_id:032x}-{span_id:016x}-")
        llm_map(table, "What else?", engine=engine)
        assert "traceparent" not in server.headers
        assert len(spans_of(exporter)) == 1


def test_jobs_of_tasks_belong_to_the_span_around_them(exporter: InMemorySpanExporter) -> None:
    table = pa.table({"n": [1]})
    options = JobOptions(otlp_traces_endpoint=ENDPOINT)

    async def run() -> None:
        engine = RecordingEngine(is_even)
        with tracing.span(ENDPOINT, "application", {}):
            await llm_map_async(table, "Is {n} even?", engine=engine, otlp_traces_endpoint=ENDPOINT)
            with connect(engine=engine, options=options, tables={"t": table}) as database:
                await database.sql_async(f"SELECT {CALL} FROM t")

    asyncio.run(run())
    job, _, statement, application = spans_of(exporter)
    assert application.context is not None
    for each in (job, statement):
        assert each.parent is not None
        assert each.parent.span_id == application.context.span_id


class Even(BaseModel):
    n: int

    @field_validator("n")
    @classmethod
    def _even(cls, n: int) -> int:
        if n % 2:
            raise ValueError("odd")
        return n


def test_answers_that_a_model_refuses_have_failed(exporter: InMemorySpanExporter) -> None:
    table = pa.table({"n": [1, 2, 3, 3]})
    llm_map(table, "n?", engine=RecordingEngine(), output=Even, otlp_traces_endpoint=ENDPOINT)
    [job] = spans_of(exporter)
    assert job.attributes is not None and job.attributes["relay.rows.failed"] == 3


@dataclass
class NamedEngine(RecordingEngine):
    model_name: str = ""


def test_jobs_of_a_filter_name_their_models(exporter: InMemorySpanExporter) -> None:
    large, small = (NamedEngine(is_even, model_name=each) for each in ("large", "small"))
    options = JobOptions(otlp_traces_endpoint=ENDPOINT)
    table = pa.table({"n": [1, 2]})
    llm_filter(table, "Is {n} even?", engine=large, proxy=small, options=options)
    assert [each.name for each in spans_of(exporter)] == ["chat small", "chat large"]


NOTHING_IMPORTED = """
import sys
import pyarrow as pa
from tests.tables.recording_engine import RecordingEngine
from vllm_relay.tables import llm_map
llm_map(pa.table({"n": [1]}), "What?", engine=RecordingEngine())
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""


def test_without_an_endpoint_nothing_is_imported() -> None:
    subprocess.run([sys.executable, "-c", NOTHING_IMPORTED], check=True)


SENDING = """
import sys
import pyarrow as pa
from tests.tables.recording_engine import RecordingEngine
from vllm_relay.tables import llm_map
table = pa.table({"n": [1, 2]})
llm_map(table, "What?", engine=RecordingEngine(), otlp_traces_endpoint=sys.argv[1])
"""


def test_spans_are_sent_by_the_protocol_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "films")
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
            subprocess.run([sys.executable, "-c", SENDING, endpoint], check=True)
        finally:
            collector.shutdown()
            thread.join()
    [sent] = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    [resource] = sent.resource_spans
    names = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert names["service.name"] == "films"
    [span] = resource.scope_spans[0].spans
    assert span.name == "chat"


def test_an_unknown_protocol_is_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    engine = RecordingEngine()
    with pytest.raises(ValueError, match="'http/json' given, expected 'grpc' or 'http/protobuf'"):
        llm_map(pa.table({"n": [1]}), "?", engine=engine, otlp_traces_endpoint=ENDPOINT)
    assert not engine.messages


def test_without_opentelemetry_there_is_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tracing._tracer.cache_clear()
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    engine = RecordingEngine()
    with pytest.raises(ValueError, match="not installed .* pip install opentelemetry-sdk"):
        llm_map(pa.table({"n": [1]}), "?", engine=engine, otlp_traces_endpoint=ENDPOINT)
    assert not engine.messages
