"""Pings that gRPC sends of its own accord, as when calls are broken off, are no reason to end a connection."""

import socket
import struct

from kvdb.config import Config, ServerConfig
from kvdb.database import Database
from kvdb.server.serve import Server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1
MANY = 20


def frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """A frame of HTTP/2 (RFC 9113, 4.1) of the connection itself."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, 0) + payload


def until_answered(file, ping: bytes) -> bool:
    """Whether the answer to a ping comes; False where the connection ends instead."""
    while len(head := file.read(9)) == 9:
        kind, flags, _ = struct.unpack(">BBI", head[3:])
        payload = file.read(int.from_bytes(head[:3], "big"))
        if (kind, flags, payload) == (PING, ACK, ping):
            return True
        if kind == GOAWAY:
            break
    return False


def test_a_client_may_ping_as_often_as_it_likes():
    with Database(Config()) as engine:
        server = Server(engine, ServerConfig(port=0))
        server.start()
        host, _, port = server.target.rpartition("/")[2].rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=10) as connection, connection.makefile("rb") as file:
                connection.sendall(PREFACE + frame(SETTINGS))
                for number in range(MANY):
                    ping = struct.pack(">Q", number)
                    connection.sendall(frame(PING, ping))
                    assert until_answered(file, ping), f"the connection ended at ping {number}"
        finally:
            server.stop(grace=0)
