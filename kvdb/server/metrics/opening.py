"""Puts together what a server measures."""

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector

from kvdb.database import Database
from kvdb.server.http.routes import Reply, Request, Route
from kvdb.server.metrics.database import DatabaseCollector
from kvdb.server.metrics.events import EventCounts


def open_registry(database: Database) -> CollectorRegistry:
    """Everything that is measured of a server over that database: one registry a server, none of the process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry)
    registry.register(DatabaseCollector(database))
    counts = EventCounts()
    registry.register(counts)
    database.events.add(counts)
    return registry


def metrics_route(registry: CollectorRegistry) -> Route:
    """Answers in OpenMetrics where the request asks for that, else in Prometheus' own form."""

    def page(request: Request) -> Reply:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Reply(encode(registry), kind)

    return Route("/metrics", page)
