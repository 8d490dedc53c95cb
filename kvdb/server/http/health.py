"""Whether the process lives, and whether it takes calls: what a load balancer and an orchestrator ask."""

from collections.abc import Callable, Sequence
from http import HTTPStatus

from kvdb.server.http.routes import Reply, Request, Route


def health_routes(ready: Callable[[], bool]) -> Sequence[Route]:
    """/healthz answers 200 as long as the process answers at all; /readyz answers 503 before the server takes calls and from the
    moment that it drains. Both are public."""

    def live(_request: Request) -> Reply:
        return Reply.text("ok")

    def may_come(_request: Request) -> Reply:
        return Reply.text("ok") if ready() else Reply.text("draining", HTTPStatus.SERVICE_UNAVAILABLE)

    return Route("/healthz", live, public=True, probe=True), Route("/readyz", may_come, public=True, probe=True)
