"""Spans of calls, by OpenTelemetry's own exporter in memory."""

from threading import Thread

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import kvdb
from kvdb import errors
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.server.admission.fair_queue import Work

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


def below(found, span):
    """The spans right below one."""
    return [one for one in found if one.parent is not None and one.parent.span_id == span.context.span_id]


@pytest.mark.parametrize("local_socket", ["", "auto"], ids=["grpc", "shared memory"])
def test_the_stages_of_a_query_are_spans_below_it(spans, serve, eventually, spec, local_socket):
    server = serve(traces=True, local_socket=local_socket)
    q, k = np.ones((4, 1, 16), np.float32), np.ones((2, 1, 16), np.float32)
    with kvdb.connect(server.target) as db, db.create_session(spec, [1]) as session:
        for _ in range(4):
            session.attend(1, q, k, k)
        with pytest.raises(errors.LayerError):
            db.attend([session], 9, q[None], k[None], k[None])
        with session.fork() as twin:
            twin.attention(1, q)
    ends = {"kvdb.attend", "kvdb.attention", "kvdb.v1.Kvdb/CloseSession", *([] if local_socket else ["kvdb.v1.Kvdb/Decode"])}
    eventually(lambda: {span.name for span in spans()} >= ends)
    found = spans()
    queries = [span for span in found if span.name == "kvdb.attend"]
    assert len(queries) == 4
    assert [query.attributes["kvdb.layer"] for query in queries] == [1] * 4
    for query in queries:
        stages = below(found, query)
        assert "kvdb.stage.attend" in {stage.name for stage in stages}
        assert all(query.start_time <= stage.start_time <= stage.end_time for stage in stages)
        assert sum(stage.end_time - stage.start_time for stage in stages) <= query.end_time - query.start_time
    assert "kvdb.stage.plan" in {stage.name for query in queries for stage in below(found, query)}
    calls = {span.context.span_id for span in found if span.name == "kvdb.v1.Kvdb/Decode"}
    assert {query.parent.span_id for query in queries if query.parent} <= calls
    assert bool(calls) is not bool(local_socket)


@pytest.mark.parametrize("local_socket", ["", "auto"], ids=["grpc", "shared memory"])
def test_a_query_of_several_sessions_is_one_span_with_the_stages_of_all(spans, serve, eventually, spec, local_socket):
    server = serve(traces=True, local_socket=local_socket)
    q, k = np.ones((3, 4, 1, 16), np.float32), np.ones((3, 2, 1, 16), np.float32)
    with kvdb.connect(server.target) as db:
        sessions = [db.create_session(spec, [1]) for _ in range(3)]
        db.attend(sessions, 1, q, k, k)
        db.attention(sessions, 1, q)
        with pytest.raises(errors.PositionError):
            db.attend(sessions, 1, q, k, k, starts=[7, 7, 7])
        db.close_sessions(sessions)
    eventually(lambda: "kvdb.v1.Kvdb/CloseSessions" in {span.name for span in spans()})
    found = [span for span in spans() if span.name.endswith("_together")]
    assert [span.name for span in found] == ["kvdb.attend_together", "kvdb.attention_together", "kvdb.attend_together"]
    assert [span.attributes["kvdb.sessions"] for span in found] == [3] * 3
    for query in found[:2]:
        stages = below(spans(), query)
        assert "kvdb.stage.attend" in {stage.name for stage in stages}
        assert sum(stage.end_time - stage.start_time for stage in stages) <= query.end_time - query.start_time
    assert found[2].status.status_code is trace.StatusCode.ERROR


@pytest.mark.parametrize("together", [False, True], ids=["unary", "shared memory"])
def test_waiting_for_the_engine_is_a_span(spans, serve, eventually, spec, together):
    server = serve(traces=True, requests_max=1, local_socket="auto" if together else "")
    q = np.ones((4, 1, 16), np.float32)
    with kvdb.connect(server.target) as db, db.create_session(spec, [1]) as session:
        session.update(1, q[:2], q[:2])
        work = Work("somebody", 1)
        server._admission.wait(work)
        asked = Thread(target=db.attention, args=([session], 1, q[None]))
        asked.start()
        eventually(lambda: server._admission.waiting == 1)
        server._admission.end(work)
        asked.join()
        eventually(lambda: "kvdb.queue" in {span.name for span in spans()})
    (queued,) = (span for span in spans() if span.name == "kvdb.queue")
    (query,) = (span for span in spans() if span.name == "kvdb.attention_together")
    assert queued.start_time < queued.end_time <= query.start_time
    assert queued.attributes["kvdb.request_id"] == query.attributes["kvdb.request_id"] != ""
    assert (queued.parent is None) is together
