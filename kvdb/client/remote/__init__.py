"""The transport to a server: the calls of the SDK's handles, over gRPC."""
