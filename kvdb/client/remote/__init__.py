"""The transport to a server: the calls of the SDK's handles, over gRPC."""

from kvdb.client.remote.database import RemoteDatabase

__all__ = ["RemoteDatabase"]
