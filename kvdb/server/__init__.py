"""The gRPC service over one engine: `serve` runs it, `service` answers the calls."""
