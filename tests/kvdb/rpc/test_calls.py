"""The table of calls says each call once, and every floor calls it alike."""

import ast
from inspect import isfunction, signature
from pathlib import Path

import pytest

import kvdb
import kvdb.client
from kvdb.client.remote.database import RemoteDatabase
from kvdb.client.remote.session import RemoteSession
from kvdb.database import Database
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.call import SERVICE, Tenant
from kvdb.rpc.calls import CALLS, OF_METHOD, OF_REQUEST, OF_SESSION
from kvdb.server.service import KvdbService, snake
from kvdb.server.tenancy.database import TenantDatabase
from kvdb.session.state import SessionState

METHODS = sorted(OF_METHOD)
BY_HAND = sorted(
    name
    for name, method in vars(RemoteDatabase).items()
    if isfunction(method) and not name.startswith("_") and name != "step" and "values" not in signature(method).parameters
)
"""What a database on a server does otherwise than by asking; `step` is never carried out there."""


def test_the_table_has_every_call_of_the_contract():
    assert {call.rpc for call in CALLS} == {method.name for method in SERVICE.methods}
    assert {call.rpc for call in OF_REQUEST.values()} == {call.rpc for call in CALLS}


@pytest.mark.parametrize("method", METHODS)
def test_a_call_has_one_name_on_every_floor(method):
    assert isfunction(getattr(kvdb.Client, method, None)) or isfunction(getattr(kvdb.Context, method, None))
    assert all(isfunction(getattr(floor, method)) for floor in (Database, RemoteDatabase, TenantDatabase))


@pytest.mark.parametrize("method", sorted(OF_SESSION))
def test_a_call_of_a_session_too(method):
    assert all(isfunction(getattr(floor, method)) for floor in (kvdb.Session, SessionState, RemoteSession))
    parameters = [*signature(getattr(SessionState, method)).parameters][1:]
    assert parameters == [*signature(getattr(RemoteSession, method)).parameters][1:]
    if OF_SESSION[method].asks is None:
        assert ["session_id", *parameters] == [field.name for field in OF_SESSION[method].contract.input_type.fields]


@pytest.mark.parametrize("method", METHODS)
def test_arguments_stand_in_their_order_in_the_request(method):
    call, (_, *parameters) = OF_METHOD[method], signature(getattr(Database, method)).parameters.values()
    if call.asks is None and not hasattr(KvdbService, snake(call.rpc)):
        names = [field.name for field in call.contract.input_type.fields]
        assert [parameter.name for parameter in parameters[: len(names)]] == names
        assert all(parameter.default is not parameter.empty for parameter in parameters[len(names) :])
    if call.tenant in {Tenant.OWN, Tenant.READS}:
        assert parameters[0].name == "name"


@pytest.mark.parametrize("name", BY_HAND)
def test_a_database_on_a_server_takes_the_same_arguments(name):
    """But for those that have a default, and are for the server alone."""
    given, taken = (signature(getattr(kind, name)).parameters for kind in (RemoteDatabase, Database))
    assert [parameter for parameter in taken if parameter in given] == list(given)
    assert all(taken[left].default is not taken[left].empty for left in set(taken) - set(given))


def test_what_a_client_asks_is_there_on_both_transports():
    asked = {
        node.attr
        for file in ("client", "context")
        for node in ast.walk(ast.parse(Path(f"{kvdb.client.__path__[0]}/{file}.py").read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self._transport"
    }
    assert len(asked) > 30
    assert all(hasattr(transport, name) for name in asked for transport in (Database, RemoteDatabase))


def test_one_call_of_the_contract_may_be_several():
    for request, method in (
        (pb.UpdateContextRequest(name="a", new_name="b"), "rename"),
        (pb.UpdateContextRequest(name="a", pinned=False), "update"),
        (pb.UpdateContextRequest(name="a", new_name="b", pinned=False), "update"),
        (pb.DropContextsRequest(names=pb.Names(names=["a"])), "drop"),
        (pb.DropContextsRequest(matching=pb.Matching(prefix="a")), "drop_all"),
        (pb.DropContextsRequest(), "drop"),
    ):
        meant = [call for call in CALLS if call.request_type is type(request)]
        assert next(call for call in meant if call.holds(request)).method == method
