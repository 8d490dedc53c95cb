"""Spans of calls, by OpenTelemetry's own exporter in memory."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvdb.rpc import kvdb_pb2 as pb

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch):
    """The spans that ended."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter.get_finished_spans
    provider.shutdown()


def test_a_call_is_a_span_below_the_clients(spans, serve, stub_of, eventually):
    stub = stub_of(serve(traces=True))
    metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("x-request-id", "mine"))
    stub.ListTiers(pb.ListTiersRequest(), metadata=metadata)
    eventually(lambda: len(spans()) == 1)
    (span,) = spans()
    assert span.name == "kvdb.v1.Kvdb/ListTiers"
    assert span.kind is trace.SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.attributes["kvdb.request_id"] == "mine"
    assert span.attributes["rpc.grpc.status_code"] == 0
    assert span.status.status_code is trace.StatusCode.UNSET


def test_a_call_that_fails_says_why(spans, serve, stub_of, eventually):
    stub = stub_of(serve(traces=True))
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        stub.CreateSession(pb.CreateSessionRequest())
    eventually(lambda: len(spans()) == 1)
    assert spans()[0].status.status_code is trace.StatusCode.ERROR
    assert spans()[0].attributes["rpc.grpc.status_code"] == 3


def test_without_the_setting_there_are_none(spans, serve, stub_of):
    stub_of(serve()).ListTiers(pb.ListTiersRequest())
    assert spans() == ()
