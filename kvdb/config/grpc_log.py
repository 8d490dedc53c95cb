"""What gRPC itself writes to stderr."""

import os


def quiet_grpc() -> None:
    """Keep gRPC's own lines from the terminal, as errors say what they say. gRPC reads this once, when it is imported; what the
    user has set stays."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
