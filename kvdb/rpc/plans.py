"""Plans on the wire: JSON objects, for they are trees that change from version to version."""

import json

from kvdb.errors import Unsupported
from query_optimizer.plan import Plan


def to_plan(plan: Plan) -> str:
    return json.dumps(plan.to_dict())


def from_plan(text: str) -> Plan:
    """Raises Unsupported for what another version made of a plan."""
    try:
        return Plan.from_dict(json.loads(text))
    except ValueError as error:
        raise Unsupported(f"the server's plan cannot be read ({error}); run client and server from one version") from None
