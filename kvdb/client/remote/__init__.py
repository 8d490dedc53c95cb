"""The transport to a server: what the SDK's handles ask for, over gRPC."""

from kvdb.client.remote.database import RemoteDatabase

__all__ = ["RemoteDatabase"]
