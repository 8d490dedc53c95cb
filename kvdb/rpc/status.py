"""The one table between the errors of `kvdb.errors` and gRPC statuses, and how an error passes from server to client.

Several classes share a status, so the class's name travels beside it in the trailing metadata `kvdb-error`, and the client raises
the class that the engine raised, with its message. A status without it came from gRPC itself.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import grpc

import kvdb.errors as errors
from kvdb.errors import KvdbError
from kvdb.rpc.error_details import details_of
from kvdb.types import CallTimings

ERROR_KEY = "kvdb-error"
DETAILS_KEY = "grpc-status-details-bin"
QUEUE_KEY, ENGINE_KEY = "kvdb-queue-us", "kvdb-engine-us"
"""Trailing metadata of a unary call: the microseconds that it waited, and that it took then."""
MESSAGE_BYTES_MAX = 8 << 10
"""The longest text of an error that is sent; a status travels in a header, percent-encoded, and headers are bounded."""

STATUS: Mapping[type[KvdbError], grpc.StatusCode] = {
    errors.KvdbError: grpc.StatusCode.UNKNOWN,
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ShapeError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.DtypeError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.LayerError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NonFiniteError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SpecError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PositionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SpecMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SessionClosed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ForkedProcess: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.MessageTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QuotaExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.GpuLost: grpc.StatusCode.UNAVAILABLE,
    errors.IntegrityError: grpc.StatusCode.DATA_LOSS,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}

_CLASSES = {kind.__name__: kind for kind in STATUS}


def set_status(context: grpc.ServicerContext, error: KvdbError) -> None:
    """Set the error's status on a call on the server; the call ends with it."""
    code, text = _status_of(context, error)
    context.set_code(code)
    context.set_details(text)


def abort(context: grpc.ServicerContext, error: KvdbError) -> NoReturn:
    """End a call on the server, which runs in this thread, with the error's status."""
    context.abort(*_status_of(context, error))
    raise AssertionError("abort returned")


def _status_of(context: grpc.ServicerContext, error: KvdbError) -> tuple[grpc.StatusCode, str]:
    """Code and text, beside which the class's name travels."""
    kind = next(known for known in type(error).__mro__ if known in STATUS)
    text = _bounded(str(error))
    details = details_of(kind.__name__, STATUS[kind].value[0], text)
    context.set_trailing_metadata(((ERROR_KEY, kind.__name__), *(((DETAILS_KEY, details),) if details else ())))
    return STATUS[kind], text


def to_error(failure: grpc.RpcError, target: str) -> KvdbError:
    """The error that ended a call, on the client: the server's own error, or the one that stands for a status of gRPC.

    target: the server's address, for the message. `failure` is one that a call raised, so it carries a status.
    """
    code, text = failure.code(), failure.details() or ""
    trailing: Any = failure.trailing_metadata()
    for key, value in trailing or ():
        if key == ERROR_KEY and (kind := _CLASSES.get(str(value))):
            return kind(text)
    return too_late(target, text) if code is grpc.StatusCode.DEADLINE_EXCEEDED else _of_grpc(code, text, target)


def timings_in(trailing: Any) -> CallTimings | None:
    """What the server says of the time that a call took; None where it says nothing."""
    said = {key: value for key, value in trailing or () if key in {QUEUE_KEY, ENGINE_KEY} and str(value).isdecimal()}
    if len(said) < 2:
        return None
    return CallTimings(int(said[QUEUE_KEY]) / 1e6, int(said[ENGINE_KEY]) / 1e6)


def code_of(error: KvdbError) -> grpc.StatusCode:
    """The status that stands for an error."""
    return STATUS[next(known for known in type(error).__mro__ if known in STATUS)]


def class_of(error: KvdbError) -> str:
    """The name of the error's class, as the other side knows it."""
    return next(known for known in type(error).__mro__ if known in STATUS).__name__


def error_of(name: str, text: str) -> KvdbError:
    """The error of this class and text; an InternalError for a class that this side does not know."""
    return _CLASSES.get(name, errors.InternalError)(text)


def too_late(target: str, text: str = "") -> errors.DeadlineExceeded:
    """The error for a server that does not answer in time. text: what gRPC says of it, "" for nothing."""
    return errors.DeadlineExceeded(
        f"the server at {target} did not answer in time ({text or 'the time of the call is over'}); pass a longer timeout= to "
        "the call, its session or connect"
    )


def _of_grpc(code: grpc.StatusCode, text: str, target: str) -> KvdbError:
    match code:
        case grpc.StatusCode.OK | grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            said = f"the server at {target} does not answer ({text or 'it ended the call'})"
            return errors.Unavailable(f"{said}; {_what_to_do(text, target)}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in text:
            return errors.MessageTooLarge(
                f"a message is over the limit of the server at {target} ({text}); "
                "send fewer tokens at a time, or raise server.message_bytes_max"
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.CapacityError(f"the server at {target} is out of room ({text}); close sessions and try again")
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return errors.Unauthenticated(f"the server at {target} refuses this client ({text}); pass token= to connect")
        case grpc.StatusCode.UNIMPLEMENTED:
            return errors.Unsupported(
                f"the server at {target} does not know this call ({text}); run the client and the server from one version"
            )
        case _:
            return errors.InternalError(f"the server at {target} failed with {code.name}: {text}")


def _what_to_do(text: str, target: str) -> str:
    """Words for who could not reach the server, by what gRPC says of it: the wrong scheme and a certificate that this client does
    not trust look like a server that does not answer."""
    scheme, _, address = target.partition("://")
    trusting = f"kvdbs://{address} with tls=kvdb.Tls(ca=...), or KVDB_TLS_CA for the command line"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"its certificate is signed by nobody whom this client trusts: connect to {trusting}, naming who signed it"
    if "WRONG_VERSION_NUMBER" in text:
        return (
            f"it speaks no TLS: connect to kvdb://{address}, or start it with server.tls_cert and server.tls_key and connect to "
            f"{trusting}"
        )
    if scheme == "kvdb" and "failed to connect" in text and "refused" not in text:
        return f"if it speaks TLS, connect to {trusting}; if not, look whether kvdb serve runs well there"
    return "expected a running kvdb serve there: start it or correct the address, and connect again"


def _bounded(text: str) -> str:
    raw = text.encode(errors="replace")
    if len(raw) <= MESSAGE_BYTES_MAX:
        return raw.decode()
    return raw[:MESSAGE_BYTES_MAX].decode(errors="ignore") + " ..."
