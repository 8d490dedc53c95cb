"""The table of calls says each call once, and every floor calls it alike."""

from inspect import isfunction, signature

import pytest

import kvdb
from kvdb.client.remote.database import RemoteDatabase
from kvdb.database import Database
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.call import SERVICE, Tenant
from kvdb.rpc.calls import CALLS, OF_METHOD, OF_REQUEST
from kvdb.server.service import KvdbService, snake
from kvdb.server.tenancy.database import TenantDatabase

METHODS = sorted(OF_METHOD)


def test_the_table_has_every_call_of_the_contract():
    assert {call.rpc for call in CALLS} == {method.name for method in SERVICE.methods}
    assert {call.rpc for call in OF_REQUEST.values()} == {call.rpc for call in CALLS}


@pytest.mark.parametrize("method", METHODS)
def test_a_call_has_one_name_on_every_floor(method):
    assert isfunction(getattr(kvdb.Client, method, None)) or isfunction(getattr(kvdb.Context, method, None))
    assert all(isfunction(getattr(floor, method)) for floor in (Database, RemoteDatabase, TenantDatabase))


@pytest.mark.parametrize("method", METHODS)
def test_arguments_stand_in_their_order_in_the_request(method):
    call, (_, *parameters) = OF_METHOD[method], signature(getattr(Database, method)).parameters.values()
    if call.asks is None and not hasattr(KvdbService, snake(call.rpc)):
        names = [field.name for field in call.contract.input_type.fields]
        assert [parameter.name for parameter in parameters[: len(names)]] == names
        assert all(parameter.default is not parameter.empty for parameter in parameters[len(names) :])
    if call.tenant in {Tenant.OWN, Tenant.READS}:
        assert parameters[0].name == "name"


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
