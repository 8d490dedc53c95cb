"""The one table of calls: what is said of each beside the contract.

From it come the stub of clients, their time limits and what they repeat, the methods of a database on a server, those that answer
them there, what tenants may ask for, and the requests through shared memory. CONTRIBUTING.md says how a call is added.
"""

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message

import kvdb.validate as validate
from kvdb.errors import InvalidArgument
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.call import Form, Tenant, WireCall, given
from kvdb.rpc.plans import from_choice, from_plan, to_choice, to_plan
from kvdb.rpc.query_options import put_query_options, to_query_options
from kvdb.rpc.shared_records import CallKind
from kvdb.types import (
    Array,
    BackedUp,
    Checked,
    DatabaseStatus,
    Dropped,
    Float32,
    IndexInfo,
    KeysValues,
    ModelSpec,
    PrefixMatch,
    SessionInfo,
    SessionStats,
    Space,
    TierStats,
    Tokens,
    UnknownFile,
)
from query_optimizer.query_options import QueryOptions

# size: one table, and how each call is said


def _list_contexts(prefix: str, limit: int | None, after: str, metadata: Mapping[str, Any]) -> Message:
    return pb.ListContextsRequest(prefix=prefix, limit=limit or 0, after=after, metadata=json.dumps(metadata))


def _match(spec: ModelSpec, tokens: Tokens, salt: str = "") -> Message:
    ids = codec.to_tokens(validate.token_ids(tokens))
    return pb.MatchPrefixRequest(spec=codec.to_spec(spec), tokens=ids, salt=validate.salt(salt))


def _drop_all(prefix: str, metadata: Mapping[str, Any]) -> Message:
    return pb.DropContextsRequest(matching=pb.Matching(prefix=prefix, metadata=json.dumps(dict(metadata))))


def _backup(said: pb.BackupRequest) -> tuple[str, bool]:
    """Raises InvalidArgument for a folder that depends on where the server was started."""
    if not PurePath(said.folder).is_absolute():
        raise InvalidArgument(f"a backup to {said.folder!r}; expected an absolute path on the server's machine")
    return said.folder, said.link


def _explain(request: Any, layer: int | None, options: QueryOptions, analyze: bool) -> Any:
    if layer is not None:
        request.layer = layer
    request.analyze = analyze
    put_query_options(request, options)
    return request


def _explained(said: Any) -> tuple[int | None, QueryOptions, bool]:
    return given(said, "layer"), to_query_options(said), said.analyze


def _attend_selected(
    layer: int, q: Array, kv: KeysValues | None, asked: tuple[Float32, Float32], start: int | None
) -> pb.AttendSelectedRequest:
    request = pb.AttendSelectedRequest(layer=layer, start=start)
    for message, array in zip((request.q, request.index_q, request.index_weights), (q, *asked), strict=True):
        codec.put_array(message, array)
    for message, array in () if kv is None else zip((request.k, request.v), kv, strict=True):
        codec.put_array(message, array)
    return request


def _selected(said: pb.AttendSelectedRequest) -> tuple[int, Array, KeysValues | None, tuple[Array, Array], int | None]:
    kv = (codec.from_array(said.k), codec.from_array(said.v)) if said.HasField("k") else None
    asked = codec.from_array(said.index_q), codec.from_array(said.index_weights)
    return said.layer, codec.from_array(said.q), kv, asked, given(said, "start")


INFO = Form(codec.to_info, codec.from_info)
INFOS = Form(
    lambda infos: pb.ListContextsReply(contexts=map(codec.to_info, infos)),
    lambda reply: [codec.from_info(info) for info in reply.contexts],
)
DROPPED = Form(
    lambda done: pb.DropContextsReply(dropped=done.names, in_use=done.in_use),
    lambda reply: Dropped(tuple(reply.dropped), tuple(reply.in_use)),
)
STATISTICS = Form(codec.to_statistics, codec.from_statistics)
CHOICE = Form(lambda choice: pb.PlanRecomputeReply(choice=to_choice(choice)), lambda reply: from_choice(reply.choice))
PLANS = Form(
    lambda plans: pb.ExplainContextReply(plans=map(to_plan, plans)), lambda reply: [from_plan(text) for text in reply.plans]
)

CALLS = (
    WireCall("Hello", repeated=True, tenant=Tenant.ALIKE),
    # Of stored contexts.
    WireCall("ImportContext", group="progress", tenant=Tenant.BY_HAND),
    WireCall("ReadContext", group="progress", tenant=Tenant.READS),
    WireCall(
        "ListContexts",
        "contexts",
        repeated=True,
        tenant=Tenant.BY_HAND,
        asks=Form(_list_contexts, lambda said: (said.prefix, said.limit or None, said.after, codec.from_metadata(said.metadata))),
        answers=INFOS,
    ),
    WireCall("GetContext", "get", repeated=True, tenant=Tenant.BY_HAND, answers=INFO),
    WireCall("ContextTokens", "token_ids", repeated=True, tenant=Tenant.READS),
    WireCall(
        "MatchPrefix",
        "match",
        repeated=True,
        tenant=Tenant.BY_HAND,
        asks=Form(_match, lambda said: (codec.from_spec(said.spec), codec.from_tokens(said.tokens), said.salt)),
        answers=PrefixMatch,
    ),
    WireCall(
        "UpdateContext",
        "rename",
        group="store",
        tenant=Tenant.BY_HAND,
        asks=Form(lambda name, new: pb.UpdateContextRequest(name=name, new_name=new), lambda said: (said.name, said.new_name)),
        answers=INFO,
        holds=lambda said: {field.name for field, _ in said.ListFields()} == {"name", "new_name"},
    ),
    WireCall(
        "UpdateContext",
        "update",
        group="store",
        tenant=Tenant.BY_HAND,
        asks=Form(codec.to_update, lambda said: (said.name, codec.from_update(said))),
        answers=INFO,
    ),
    WireCall(
        "DropContexts",
        "drop_all",
        group="store",
        tenant=Tenant.BY_HAND,
        asks=Form(_drop_all, lambda said: (said.matching.prefix, codec.from_metadata(said.matching.metadata))),
        answers=DROPPED,
        holds=lambda said: said.HasField("matching"),
    ),
    WireCall(
        "DropContexts",
        "drop",
        group="store",
        tenant=Tenant.BY_HAND,
        asks=Form(lambda *names: pb.DropContextsRequest(names=pb.Names(names=names)), lambda said: said.names.names),
        answers=DROPPED,
    ),
    WireCall("OffloadContext", "offload", group="store", tenant=Tenant.BY_HAND),
    WireCall("ContextStatistics", "statistics", repeated=True, tenant=Tenant.OWN, answers=STATISTICS),
    WireCall(
        "ExplainContext",
        "explain",
        group="attend",
        repeated=True,
        tenant=Tenant.OWN,
        asks=Form(
            lambda name, *rest: _explain(pb.ExplainContextRequest(name=name), *rest), lambda said: (said.name, *_explained(said))
        ),
        answers=PLANS,
    ),
    # Of what is built over them, and whether it is whole.
    WireCall("BuildIndex", "build_index", group="maintain", tenant=Tenant.OWN, long=True, answers=IndexInfo),
    WireCall("ListIndexes", "indexes", repeated=True, tenant=Tenant.OWN, answers=IndexInfo),
    WireCall("CheckContext", "verify", group="maintain", repeated=True, tenant=Tenant.OWN, long=True, answers=Checked),
    WireCall(  # asked by clients before 0.1.0, whose check of indexes was a call of its own
        "VerifyIndexes",
        "verify",
        group="maintain",
        repeated=True,
        tenant=Tenant.OWN,
        long=True,
        answers=Form(lambda checked: pb.VerifyIndexesReply(indexes=checked.indexes), lambda reply: reply.indexes),
    ),
    # Of the database.
    WireCall("CheckStore", "verify_store", group="maintain", repeated=True, long=True),
    WireCall("UnknownFiles", "unknown_files", group="maintain", long=True, answers=UnknownFile),
    WireCall(
        "Backup",
        "backup",
        group="maintain",
        long=True,
        asks=Form(lambda folder, link: pb.BackupRequest(folder=folder, link=link), _backup),
        answers=BackedUp,
    ),
    WireCall("Compact", "compact", group="maintain", long=True),
    WireCall("Space", "space", repeated=True, tenant=Tenant.BY_HAND, long=True, answers=Space),
    WireCall("Status", "status", repeated=True, tenant=Tenant.BY_HAND, answers=DatabaseStatus),
    WireCall("ListTiers", "tiers", repeated=True, tenant=Tenant.BY_HAND, answers=TierStats),
    WireCall("ListSessions", "sessions", repeated=True, tenant=Tenant.BY_HAND, answers=SessionInfo),
    WireCall(
        "ExplainSession",
        "explain_session",
        group="attend",
        repeated=True,
        tenant=Tenant.BY_HAND,
        asks=Form(
            lambda label, *rest: _explain(pb.ExplainSessionRequest(label=label), *rest),
            lambda said: (said.label, *_explained(said)),
        ),
        answers=PLANS,
    ),
    # Of sessions.
    WireCall("CreateSession", "create_session", group="attend", tenant=Tenant.BY_HAND),
    WireCall("CreateSessions", group="attend", tenant=Tenant.BY_HAND),
    WireCall("Update", group="attend", tenant=Tenant.ALIKE, shared=CallKind.UPDATE),
    WireCall("UpdateSessions", "update_sessions", group="attend", tenant=Tenant.ALIKE, shared=CallKind.UPDATE_TOGETHER),
    WireCall("Attention", group="attend", repeated=True, tenant=Tenant.ALIKE, shared=CallKind.ATTENTION),
    WireCall("Attend", group="attend", tenant=Tenant.ALIKE, shared=CallKind.ATTEND),
    WireCall("AttendTogether", "attend", group="attend", tenant=Tenant.ALIKE, shared=CallKind.ATTEND_TOGETHER),
    WireCall(
        "AttentionTogether", "attention", group="attend", repeated=True, tenant=Tenant.ALIKE, shared=CallKind.ATTENTION_TOGETHER
    ),
    WireCall("Decode", group="attend", tenant=Tenant.ALIKE),
    WireCall("Fork", group="attend", tenant=Tenant.ALIKE),
    WireCall("Truncate", group="attend", repeated=True, tenant=Tenant.ALIKE),
    WireCall("TruncateSessions", "truncate_sessions", group="attend", repeated=True, tenant=Tenant.ALIKE),
    WireCall("Store", group="store", tenant=Tenant.BY_HAND),
    WireCall(
        "Explain",
        "explain",
        group="attend",
        repeated=True,
        tenant=Tenant.ALIKE,
        asks=Form(lambda *values: _explain(pb.ExplainRequest(), *values), _explained),
        answers=Form(lambda plan: pb.ExplainReply(plan=to_plan(plan)), lambda reply: from_plan(reply.plan)),
    ),
    WireCall(
        "State",
        "state",
        group="attend",
        repeated=True,
        tenant=Tenant.ALIKE,
        answers=Form(lambda arrays: pb.StateReply(arrays=codec.to_arrays(arrays)), lambda reply: codec.from_arrays(reply.arrays)),
    ),
    WireCall(
        "PutState",
        "put_state",
        group="attend",
        repeated=True,
        tenant=Tenant.ALIKE,
        asks=Form(
            lambda layer, arrays, position: pb.PutStateRequest(layer=layer, arrays=codec.to_arrays(arrays), position=position),
            lambda said: (said.layer, codec.from_arrays(said.arrays), given(said, "position")),
        ),
    ),
    WireCall(
        "AttendSelected",
        "attend_selected",
        group="attend",
        tenant=Tenant.ALIKE,
        asks=Form(_attend_selected, _selected),
        answers=Form(lambda out: pb.AttentionReply(out=codec.to_array(out)), lambda reply: codec.from_array(reply.out).copy()),
    ),
    WireCall(
        "PutSinks",
        "put_sinks",
        group="attend",
        repeated=True,
        tenant=Tenant.ALIKE,
        asks=Form(
            lambda layer, sinks: pb.PutSinksRequest(layer=layer, sinks=codec.to_array(sinks)),
            lambda said: (said.layer, codec.from_array(said.sinks)),
        ),
    ),
    WireCall("PlanRecompute", "plan_recompute", group="attend", repeated=True, tenant=Tenant.ALIKE, answers=CHOICE),
    WireCall("Stats", "stats", repeated=True, tenant=Tenant.ALIKE, answers=SessionStats),
    WireCall("CloseSession", tenant=Tenant.ALIKE),
    WireCall("CloseSessions", "close_sessions", tenant=Tenant.ALIKE),
)

OF_REQUEST: Mapping[type[Message], WireCall] = {call.request_type: call for call in reversed(CALLS)}
"""The call of each kind of request; where there are several, the first."""
OF_METHOD: Mapping[str, WireCall] = {call.method: call for call in reversed(CALLS) if call.method and not call.of_session}
"""The call that a method of the database asks."""
OF_SESSION: Mapping[str, WireCall] = {call.method: call for call in CALLS if call.method and call.of_session}
"""The call that a method of a session asks."""
SHARED: Mapping[int, WireCall] = {call.shared: call for call in CALLS if call.shared is not None}
"""The call that each kind of request through shared memory is."""


class Stub:
    """The calls of the contract on one channel, each under its name there."""

    if TYPE_CHECKING:

        def __getattr__(self, rpc: str) -> Any: ...

    def __init__(self, channel: grpc.Channel) -> None:
        for call in OF_REQUEST.values():
            setattr(self, call.rpc, call.open(channel))
