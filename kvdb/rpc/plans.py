"""Plans on the wire. They are JSON objects, because they are trees that change from version to version."""

import json

from kvdb.blend.controller import Choice
from kvdb.errors import Unsupported
from query_optimizer.plan import Plan


def to_plan(plan: Plan) -> str:
    return json.dumps(plan.to_dict())


def from_plan(text: str) -> Plan:
    """Raises Unsupported for a plan of another version."""
    try:
        return Plan.from_dict(json.loads(text))
    except ValueError as error:
        raise Unsupported(f"the server's plan cannot be read ({error}); run client and server from one version") from None


def to_choice(choice: Choice) -> str:
    return json.dumps(choice.to_dict())


def from_choice(text: str) -> Choice:
    """Raises Unsupported for a choice of another version."""
    try:
        return Choice.from_dict(json.loads(text))
    except ValueError as error:
        raise Unsupported(f"the server's choice cannot be read ({error}); run client and server from one version") from None
