"""The settings of the endpoint."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EndpointSettings:
    """model: the name under which clients ask for the model. alias: another such name, "" for none. token: that they have to
    send, "" for none. new_tokens: the most tokens of an answer where a request says nothing. waiting_max: the most answers, and
    calls for documents, that wait; more are refused. body_bytes_max, body_seconds: how large a body may be, and how long it may
    take to come."""

    model: str
    alias: str = ""
    token: str = ""
    new_tokens: int = 256
    waiting_max: int = 64
    body_bytes_max: int = 16 * 2**20
    body_seconds: float = 30.0
