"""/metrics: everything that is measured, in the text form that Prometheus reads."""

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvdb.server.http.routes import Reply, Request, Route


def metrics_route(registry: CollectorRegistry) -> Route:
    """Answers in OpenMetrics where the request asks for that, else in Prometheus' own form."""

    def page(request: Request) -> Reply:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Reply(encode(registry), kind)

    return Route("/metrics", page)
