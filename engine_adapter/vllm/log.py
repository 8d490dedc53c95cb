"""kvdb's log in vLLM: below vLLM's own, so that each line has its format, with level and time, and goes where its lines go."""

import logging

LOG = logging.getLogger("vllm.kvdb")


def join_vllm() -> None:
    """Let what kvdb's own rooms say in this process, such as of a database in a folder, come out as vLLM's lines do."""
    rooms = logging.getLogger("kvdb")
    if not rooms.handlers:
        rooms.handlers = logging.getLogger("vllm").handlers
