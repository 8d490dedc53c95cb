"""One behaviour of both clients: the other one too with methods to be awaited."""

import asyncio
from dataclasses import replace

import kvdb
from kvdb.client.client import Client
from kvdb.client.context import Context
from kvdb.client.session import Session

SECONDS_MAX = 20.0


class Awaited:
    """The other client, or a session of it, with methods to be awaited."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        value = getattr(self.inner, name)
        if not callable(value):
            return value

        async def call(*arguments, **named):
            plain, also = [_plain(one) for one in arguments], {key: _plain(one) for key, one in named.items()}
            return _wrapped(await asyncio.to_thread(value, *plain, **also))

        return call


def _plain(value):
    if isinstance(value, kvdb.PromptPart):
        return replace(value, source=_plain(value.source))
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.inner if isinstance(value, Awaited) else value


def _wrapped(value):
    if isinstance(value, Session | Client | Context):
        return Awaited(value)
    return [_wrapped(one) for one in value] if isinstance(value, list) else value


async def connect_plain(target, **named):
    return Awaited(await asyncio.to_thread(lambda: kvdb.connect(target, **named)))


def run(behaviour):
    asyncio.run(asyncio.wait_for(behaviour(), SECONDS_MAX))
