"""How much space do contexts take, beside the least that holds what they name?

    python -m benchmarks.space [--store] [--decode]

Chats are stored turn by turn, by one session that stays open or by a session for each turn; a long context is dropped of which
another shares one token; contexts branch off each other at random and half of them are dropped. `held` are the blocks of all
layers when everything that is open is closed, `least` are those of the runs of a trie of all tokens that are named. --store: of a
durable database, and its files are counted. --decode: instead, how long a session waits for a decode step while `db.compact`
works on the very segments that it stands on and on others, and how long without that; embedded and through a server.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from time import perf_counter

import numpy as np

import kvdb
from benchmarks.harness import argument_parser, report
from kvdb.catalog.compaction.reachable import reachable_blocks
from kvdb.client.client import Client
from kvdb.client.session import Session
from kvdb.config import Config, IndexConfig, ServerConfig
from kvdb.server.serve import Server
from kvdb.types import Array, Tokens

SPEC = kvdb.ModelSpec("space", layers=4, q_heads=4, kv_heads=2, head_dim=32, dtype="bfloat16")
BLOCK, TURNS, TURN, LONG, BRANCHES = 64, 100, 10, 20_000, 200
CHATS, STEPS = 60, 3_000


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--decode", action="store_true")
    store, decodes = (args := parser.parse_args()).store, args.decode
    if decodes:
        for how in ("embedded", "server"):
            decode(store, how)
        return
    for name, scenario in (
        ("one session", one_session),
        ("a session a turn", session_per_turn),
        ("bos", bos),
        ("traces", traces),
    ):
        with database(store) as db:
            begun = perf_counter()
            named = scenario(db)
            seconds = perf_counter() - begun
            if store:
                db.compact()
            least = SPEC.layers * reachable_blocks(named, BLOCK)
            used = held(db, "disk" if store else "cpu")
            report("space", what=name, held=used, least=least, ratio=round(used / least, 2), seconds=round(seconds, 2))


def one_session(db: Client) -> list[Tokens]:
    """A chat in a session that is open all the time."""
    ids = tokens_of(1, TURNS * TURN)
    with db.create_session(SPEC, ids[:0]) as session:
        for end in range(TURN, len(ids) + 1, TURN):
            for layer, (k, v) in enumerate(kv(TURN)):
                session.update(layer, k, v)
            db.store(session, name=f"turn {end}", tokens=ids[:end])
    return [ids]


def session_per_turn(db: Client) -> list[Tokens]:
    """A chat that is taken up anew for each turn."""
    ids = tokens_of(2, TURNS * TURN)
    for end in range(TURN, len(ids) + 1, TURN):
        with db.create_session(SPEC, ids[:end]) as session:
            for layer, (k, v) in enumerate(kv(end - session.reused)):
                session.update(layer, k, v)
            db.store(session, name=f"turn {end}", tokens=ids[:end])
    return [ids]


def bos(db: Client) -> list[Tokens]:
    """A long context is dropped, and another one shares its first token."""
    ids, other = tokens_of(3, LONG), tokens_of(4, 100)
    other[0] = ids[0]
    put(db, "long", ids)
    put(db, "other", other)
    db.drop("long")
    return [other]


def traces(db: Client) -> list[Tokens]:
    """Contexts go on from somewhere in one before them, and half of all are dropped, in any order."""
    rng = np.random.default_rng(5)
    named: dict[str, Tokens] = {}
    for number in range(BRANCHES):
        own = tokens_of(100 + number, int(rng.integers(1, 400)))
        parent = named[str(rng.choice(list(named)))] if named else own[:0]
        ids = np.concatenate([parent[: int(rng.integers(0, len(parent) + 1))], own])
        put(db, str(number), ids)
        named[str(number)] = ids
        if number % 2:
            gone = str(rng.choice(list(named)))
            db.drop(gone)
            del named[gone]
    return list(named.values())


def decode(store: bool, how: str) -> None:
    """Decode steps, one after the other, alone and while everything is compacted in another thread."""
    with database(store) as db, ExitStack() as ends:
        engine = db._transport
        engine._compactor.stop()  # so that all of it waits for `compact`
        shared = [leave_behind(db, number) for number in range(CHATS)]
        client = db
        if how == "server":
            server = Server(engine, ServerConfig(host="127.0.0.1", port=0))
            server.start()
            ends.callback(server.stop, grace=0)
            client = ends.enter_context(kvdb.connect(server.target))
        session = ends.enter_context(client.create_session(SPEC, shared[0]))
        alone = np.array([step(session) for _ in range(STEPS)])
        before = held(db, "cpu")
        with ThreadPoolExecutor(1) as other:
            begun, done = perf_counter(), other.submit(client.compact)
            beside = []
            while not done.done():
                beside.append(step(session))
            seconds = perf_counter() - begun
            done.result()
        median, slow = (np.percentile(beside, share) / np.percentile(alone, share) for share in (50, 99))
        numbers = {
            f"{name}_{share}_us": round(1e6 * float(np.percentile(times, share)))
            for name, times in (("alone", alone), ("beside", beside))
            for share in (50, 99, 100)
        }
        waits = {"p50_ratio": round(float(median), 2), "p99_ratio": round(float(slow), 2)}
        given = before - held(db, "cpu")
        report(
            "space",
            what="decode",
            how=how,
            store=store,
            steps=len(beside),
            blocks=given,
            seconds=round(seconds, 2),
            **waits,
            **numbers,
        )


def leave_behind(db: Client, number: int) -> Tokens:
    """A text that goes on from the middle of one that was dropped, turn by turn. Returns it."""
    ids = tokens_of(1000 + number, LONG // 4)
    put(db, f"long {number}", ids)
    for end in range(LONG // 8 + 13, LONG // 8 + 13 * 8, 13):
        own = np.concatenate([ids[: LONG // 8], tokens_of(2000 + number, 13 * 8)])
        put(db, f"turn {number} {end}", own[:end])
    db.drop(f"long {number}")
    return own[:end]


def step(session: Session) -> float:
    """Seconds of one decode step: an attend in every layer."""
    q = np.ones((SPEC.q_heads, 1, SPEC.head_dim), SPEC.numpy_dtype)
    begun = perf_counter()
    for layer, (k, v) in enumerate(kv(1)):
        session.attend(layer, q, k, v)
    return perf_counter() - begun


def put(db: Client, name: str, ids: Tokens) -> None:
    """Import a context."""
    db.import_context(SPEC, ids, kv(len(ids)), name=name)


def kv(n: int) -> list[tuple[Array, Array]]:
    """Keys and values of n tokens, which are all the same, of each layer."""
    ones = np.ones((SPEC.kv_heads, n, SPEC.head_dim), SPEC.numpy_dtype)
    return [(ones, ones)] * SPEC.layers


def tokens_of(seed: int, n: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 30_000, n).astype(np.int32)


def held(db: Client, tier: str) -> int:
    """The used blocks of a tier."""
    return sum(stats.blocks_used for stats in db.tiers() if stats.name == tier)


@contextmanager
def database(store: bool) -> Iterator[Client]:
    """An empty database, which keeps nothing or a folder that is removed again."""
    with tempfile.TemporaryDirectory() as folder:
        config = Config(indexes=IndexConfig(on_demand="", automatic=False))
        db = kvdb.connect(f"{folder}/store", config=config) if store else kvdb.connect(config=config)
        with db:
            yield db


if __name__ == "__main__":
    main()
