"""What an error says of itself to clients of any language: google.rpc's error model, as other services send it.

The message `google.rpc.Status` travels in the trailing metadata `grpc-status-details-bin`, with ErrorInfo (the error's class),
RetryInfo where the same call may succeed later, and ResourceInfo where something of a name is or is not there.
"""

from collections.abc import Mapping

try:
    from google.protobuf.duration_pb2 import Duration
    from google.rpc import error_details_pb2, status_pb2
except ImportError:  # a client needs none of it
    status_pb2 = None

DOMAIN = "kvdb"
TEXT_BYTES_MAX = 1 << 10
"""The longest text that is repeated here; all of it is in the status."""
RETRY_SECONDS: Mapping[str, float] = {"CapacityError": 1.0, "Unavailable": 1.0, "GpuLost": 0.1}
"""After how long a call may be made again, by the class of its error."""
RESOURCES: Mapping[str, str] = {"NotFound": "context or session", "AlreadyExists": "context", "SessionClosed": "session"}
"""What an error is about, by its class."""


def details_of(kind: str, code: int, text: str) -> bytes:
    """The serialized `google.rpc.Status` of an error; empty where googleapis-common-protos is not installed. kind: the name of
    its class. code: the number of its gRPC status."""
    if status_pb2 is None:
        return b""
    short = text.encode()[:TEXT_BYTES_MAX].decode(errors="ignore")
    status = status_pb2.Status(code=code, message=short)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=kind, domain=DOMAIN))
    if kind in RETRY_SECONDS:
        delay = Duration()
        delay.FromMilliseconds(round(RETRY_SECONDS[kind] * 1000))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if kind in RESOURCES:
        status.details.add().Pack(error_details_pb2.ResourceInfo(resource_type=RESOURCES[kind], description=short))
    serialized: bytes = status.SerializeToString()
    return serialized
