"""What is said of a call once; `kvdb.rpc.calls` says it of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from enum import Enum, auto
from functools import cached_property
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.shared_records import CallKind

SERVICE = pb.DESCRIPTOR.services_by_name["Kvdb"]


class Tenant(Enum):
    """What a call is to a tenant; its names are those of `kvdb.server.tenancy.names`."""

    REFUSED = auto()
    """It tells of what all tenants have, or changes it."""
    ALIKE = auto()
    """It names nothing of the database; sessions of one tenant are in no other's registry."""
    OWN = auto()
    """Its first argument names a context of the tenant's own."""
    READS = auto()
    """Its first argument names such a context, or one that is shared with the tenant."""
    BY_HAND = auto()
    """`kvdb.server.tenancy.database.TenantDatabase` has a method of it."""


class Form(NamedTuple):
    """How values become a message, and a message values."""

    to: Callable[..., Message]
    of: Callable[[Any], Any]


@dataclass(frozen=True)
class WireCall:
    """One call of the contract (`proto/kvdb/rpc/kvdb.proto`), which says what its messages hold.

    rpc: its name there. method: its name everywhere else: of the client, of what carries it, of the database; "" for one
    that is part of several methods. group: the field of `Timeouts` that limits it. repeated: whether gRPC
    makes it again where the server is unavailable, because done twice it does what it does once. tenant: what it is to a tenant.
    long: whether it holds a thread of the server for long, and counts among the streams therefore. shared: the request that
    carries it through shared memory; such a call uses the engine as steps of decoding do.

    asks: how the method's arguments become the request and back; None for one argument a field, in their order. answers: how
    what the method returns becomes the reply and back; a dataclass of the same fields, of which there are many where the
    reply has one field of messages; None for the value of its only field, or none. holds: whether a request is of this call,
    where the contract has one for several; the first that holds is meant."""

    rpc: str
    method: str = ""
    _: KW_ONLY
    group: str = "lookup"
    repeated: bool = False
    tenant: Tenant = Tenant.REFUSED
    long: bool = False
    shared: CallKind | None = None
    asks: Form | None = None
    answers: Form | type[Any] | None = None
    holds: Callable[[Any], bool] = lambda _request: True

    @cached_property
    def contract(self) -> MethodDescriptor:
        """What the contract says of it."""
        return SERVICE.methods_by_name[self.rpc]

    @cached_property
    def request_type(self) -> type[Any]:
        """The message."""
        return GetMessageClass(self.contract.input_type)

    @cached_property
    def reply_type(self) -> type[Any]:
        """The message."""
        return GetMessageClass(self.contract.output_type)

    @cached_property
    def of_session(self) -> bool:
        """Whether its method is a session's, which the request names beside the method's arguments."""
        return "session_id" in self.contract.input_type.fields_by_name

    @property
    def path(self) -> str:
        """Its name for gRPC."""
        return f"/{SERVICE.full_name}/{self.rpc}"

    def open(self, channel: grpc.Channel) -> Any:
        """What makes the call on a channel."""
        ways = ("stream" if many else "unary" for many in (self.contract.client_streaming, self.contract.server_streaming))
        make = getattr(channel, "_".join(ways))
        return make(self.path, self.request_type.SerializeToString, self.reply_type.FromString)

    def request(self, *values: Any, **named: Any) -> Message:
        """The request of the method's arguments. Raises what `validate` raises."""
        if self.asks is not None:
            return self.asks.to(*values, **named)
        request: Message = self.request_type(**dict(zip(self._fields, values, strict=False)), **named)
        return request

    def arguments(self, request: Message) -> Sequence[Any]:
        """The method's arguments in a request. Raises InvalidArgument, SpecError or Unsupported."""
        if self.asks is not None:
            arguments: Sequence[Any] = self.asks.of(request)
            return arguments
        return [given(request, name) for name in self._fields]

    def reply(self, value: Any) -> Message:
        """The reply of what the method returned."""
        if isinstance(self.answers, Form):
            return self.answers.to(value)
        if self.answers is None:
            said = {field.name: value for field in self.contract.output_type.fields}
        else:
            said = {self._listed: [vars(one) for one in value]} if self._listed else vars(value)
        reply: Message = self.reply_type(**said)
        return reply

    def value(self, reply: Message) -> Any:
        """What the method returned, out of its reply. Raises Unsupported for what another version says."""
        if isinstance(self.answers, Form):
            return self.answers.of(reply)
        if self.answers is None:
            value = next((getattr(reply, field.name) for field in self.contract.output_type.fields), None)
            return value if isinstance(value, str | bytes | int | float | None) else list(value)
        listed = self._listed
        return [_record(self.answers, one) for one in getattr(reply, listed)] if listed else _record(self.answers, reply)

    @cached_property
    def _fields(self) -> list[str]:
        """The fields of a request that are the method's arguments."""
        return [field.name for field in self.contract.input_type.fields if field.name != "session_id"]

    @cached_property
    def _listed(self) -> str:
        """The reply's only field where it is a list of messages, "" otherwise."""
        names = [field.name for field in self.contract.output_type.fields if field.message_type is not None]
        return names[0] if len(self.contract.output_type.fields) == 1 and names else ""


def given(message: Message, field: str) -> Any:
    """The value of a field, None where it is absent and may be."""
    absent = message.DESCRIPTOR.fields_by_name[field].has_presence and not message.HasField(field)
    return None if absent else getattr(message, field)


def _record(kind: type[Any], message: Message) -> Any:
    """A dataclass whose fields are those of a message."""
    values = {field.name: getattr(message, field.name) for field in fields(kind)}
    return kind(**{name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()})
