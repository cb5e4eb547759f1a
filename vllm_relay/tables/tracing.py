# SPDX-License-Identifier: Apache-2.0
"""Spans of OpenTelemetry for statements and jobs; those of vLLM's requests are their children.

Names are those of OpenTelemetry's semantic conventions for generative AI where these have some.
Spans hold numbers and names of models, no texts of questions, rows or answers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from vllm_relay.tables.jobs.report import JobReport
from vllm_relay.tables.question import Question

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

Attributes: TypeAlias = "Mapping[str, str | int | float]"

_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_SERVICE_NAME = "vllm-relay"

_is_on: ContextVar[bool] = ContextVar("relay_tracing", default=False)


@contextmanager
def span(
    endpoint: str | None, name: str, attributes: Attributes, *, is_request: bool = False
) -> Iterator[Callable[[Attributes], None]]:
    """A span around what is done within; yields what gives it further attributes.

    Args:
        endpoint: of OTLP, to which spans are sent; None makes none.
        is_request: whether it stands for requests to a model.

    Raises:
        ValueError: OpenTelemetry is not installed, or its environment asks for an unknown protocol.
    """
    if endpoint is None:
        yield lambda _: None
        return
    tracer = _tracer(endpoint)
    from opentelemetry.trace import SpanKind, StatusCode

    with tracer.start_as_current_span(
        name,
        kind=SpanKind.CLIENT if is_request else SpanKind.INTERNAL,
        attributes=attributes,
        # messages may hold rows
        record_exception=False,
        set_status_on_exception=False,
    ) as made:
        was_on = _is_on.set(True)
        try:
            yield made.set_attributes
        except BaseException as error:
            made.set_attribute("error.type", type(error).__qualname__)
            made.set_status(StatusCode.ERROR)
            raise
        finally:
            _is_on.reset(was_on)


def trace_headers() -> dict[str, str]:
    """W3C trace context of the span around the caller, as headers of requests; none without."""
    headers: dict[str, str] = {}
    if _is_on.get():
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(headers)
    return headers


def of_question(question: Question, model_name: str) -> Attributes:
    """What is asked of whom.

    Args:
        model_name: "" if it is not known.
    """
    found: dict[str, str | int | float] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.temperature": question.temperature,
        "gen_ai.output.type": "json" if question.output.is_json else "text",
    }
    if model_name:
        found["gen_ai.request.model"] = model_name
    if question.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = question.max_tokens
    if question.seed is not None:
        found["gen_ai.request.seed"] = question.seed
    return found


def of_report(report: JobReport) -> Attributes:
    """What was done."""
    return {
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": report.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
        "relay.rows": report.num_rows,
        "relay.prompts": report.num_prompts,
        "relay.prompts.known": report.num_known,
        "relay.rows.failed": report.num_errors,
        "relay.tokens.saved": report.saved_tokens,
    }


@cache
def _tracer(endpoint: str) -> Tracer:
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = span_exporter(endpoint)
    except ImportError as error:
        raise ValueError(
            f"otlp_traces_endpoint={endpoint!r} given, but OpenTelemetry is not installed ({error})"
            f": pip install opentelemetry-sdk opentelemetry-exporter-otlp"
        ) from None
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: _SERVICE_NAME}))
    # not the one of the process, which may be vLLM's or the application's; sends what is left at
    # the end of the process
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider.get_tracer("vllm_relay.tables")


def span_exporter(endpoint: str) -> SpanExporter:
    """By the protocol that OpenTelemetry's environment names, as vLLM does."""
    protocol = os.environ.get(_PROTOCOL, "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        is_open = not endpoint.lower().startswith("https://")
        return OTLPSpanExporter(endpoint=endpoint, insecure=is_open)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

        return over_http.OTLPSpanExporter(endpoint=endpoint)
    raise ValueError(f"{_PROTOCOL}={protocol!r} given, expected 'grpc' or 'http/protobuf'")
