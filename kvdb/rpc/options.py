"""gRPC's options for channels and servers. Those for imports were chosen by the figures of `benchmarks/service.py`."""

import json

from kvdb.config import MIB
from kvdb.rpc.call import SERVICE
from kvdb.rpc.calls import OF_REQUEST

Options = list[tuple[str, int | str]]

METADATA_BYTES_MAX = 64 << 10
KEEPALIVE_SECONDS = 10
KEEPALIVE_TIMEOUT_SECONDS = 10
"""A peer that hangs, or whose machine vanished, is detected after the sum of both."""
RECONNECT_SECONDS_MAX = 2
"""How long a client waits at most before it tries again to connect to a server that is gone; a fifth of a second at first."""
REPEATED = tuple(call.rpc for call in OF_REQUEST.values() if call.repeated)
"""The calls that gRPC makes again where the server is unavailable."""
RETRY = {
    "maxAttempts": 4,
    "initialBackoff": "0.05s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}

_SHARED: Options = [
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),  # an error's text travels as metadata
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.http2.max_frame_size", 4 * MIB),  # import: one frame a chunk, not 64
    ("grpc.http2.lookahead_bytes", 8 * MIB),  # import: chunks to come while one is written into blocks
    ("grpc.http2.bdp_probe", 0),  # the window is set, so it need not be estimated
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),  # a minute otherwise, whatever the timeout above
    ("grpc.http2.max_pings_without_data", 0),  # an idle decode stream may stay open
]


def server_options(message_bytes_max: int, calls_max: int, connections_max: int) -> Options:
    """Options of a server. message_bytes_max: the largest message that a client may send; answers have no limit of their own.
    calls_max: the most calls of one connection at a time; more wait at the client. connections_max: the most connections."""
    return [
        *_SHARED,
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_concurrent_streams", calls_max),
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a coin toss for each client
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 500),
        ("grpc.http2.max_ping_strikes", 0),  # gRPC pings of its own accord too; who was only busy would be sent away
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def client_options() -> Options:
    """Options of a channel. It sets no limit on messages: the client asks the server for its limit, and checks that itself."""
    return [
        *_SHARED,
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_http_proxy", 0),  # KV goes to the server that was named
        ("grpc.use_local_subchannel_pool", 1),  # one connection a database, closed with it
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_SECONDS_MAX * 1000),
        ("grpc.service_config", _service_config()),
    ]


def _service_config() -> str:
    """The calls that are made again, as gRPC's service config."""
    names = [{"service": SERVICE.full_name, "method": method} for method in REPEATED]
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": RETRY}]})
