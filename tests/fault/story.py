"""What a process does to a store, step by step, and what has to be there afterwards. Both follow from a seed, the numbers of the
steps and what is stored, so that who kills the process needs to be told only which steps it began and which were acknowledged."""

from dataclasses import dataclass, replace

import numpy as np

import kvdb
from kvdb.config import IndexConfig
from kvdb.errors import CapacityError, NotFound
from tests.reference import attention, relative_error
from tests.stores import SPEC, config, holds, kv_of, put

NAMES = [f"c{number}" for number in range(12)]
"""Names that contexts may have."""
MAKE, CHANGE, READ = ("put", "fork", "blend"), ("pin", "unpin", "note", "rename"), ("offload", "open", "index", "compact")
SHARE_DROPPED = 0.4
"""How many of the steps at a context drop it, so that there are always names for new ones."""
NARROW = {"cpu_bytes_max": 700_000, "disk_bytes_max": 600_000}
"""Limits under which contexts leave main memory, and are dropped to make room."""
TTL_SECONDS = 100_000
_QUERY = np.random.default_rng(3).standard_normal((SPEC.q_heads, 1, SPEC.head_dim)).astype(np.float32)


@dataclass(frozen=True)
class Step:
    """One call. name: the context that it makes, changes or reads. other: that which it goes on from, or the new name, "" for
    none. number: what its tokens follow from, with the seed of its process."""

    action: str
    name: str
    other: str
    number: int

    @classmethod
    def from_words(cls, action, name, other, number):
        return cls(action, name, other.strip("-"), int(number))

    def __str__(self):
        return f"{self.action} {self.name} {self.other or '-'} {self.number}"


@dataclass(frozen=True)
class Kept:
    """What a context is. tokens: its ids. recomputed: how many of its first tokens a blend has recomputed, 0 for no blend. table:
    the number that their keys and values follow from. noted: the step that its metadata names, which has set when it ends too;
    None for no metadata."""

    tokens: np.ndarray
    recomputed: int = 0
    table: int = 0
    pinned: bool = False
    noted: int | None = None

    @property
    def life(self):
        return self.pinned, self.noted, self.noted is not None


def open_config(**storage):
    """The settings of a small database, in which contexts of 64 tokens may have indexes."""
    return replace(config(**storage), indexes=IndexConfig(on_demand="", automatic=False, segment_tokens_min=64))


def open_store(folder, **limits):
    """A client of the store in a folder."""
    return kvdb.connect(folder, config=open_config(**limits))


def tokens_of(seed, number):
    """The tokens of the context that a step imports: many begin alike."""
    rng = np.random.default_rng((seed, number))
    shared = int(rng.integers(0, 4)) * 60
    return np.r_[np.arange(shared), rng.integers(0, 64, int(rng.integers(1, 300)))]


def _forked(seed, number, tokens):
    """The length that a fork keeps of these tokens, and all that it holds in the end."""
    rng = np.random.default_rng((seed, number))
    kept = int(rng.integers(1, len(tokens) + 1))
    return kept, np.r_[tokens[:kept], rng.integers(0, 64, int(rng.integers(1, 80)))]


def _recomputed(table, tokens):
    """The keys and values that a blend has instead of those of its first tokens, a pair for each layer."""
    shape = (SPEC.layers, 2, SPEC.kv_heads, tokens, SPEC.head_dim)
    return np.random.default_rng(table).standard_normal(shape).astype(np.float32)


def choose(rng, infos, number):
    """The next step of a process. infos: of what is stored."""
    stored = {info.name: info for info in infos}
    exact = sorted(name for name, info in stored.items() if not info.blended)
    name = str(rng.choice(NAMES))
    if name not in stored:
        action = str(rng.choice(MAKE)) if exact else "put"
        return Step(action, name, "" if action == "put" else str(rng.choice(exact)), number)
    action = "drop" if rng.random() < SHARE_DROPPED else str(rng.choice(CHANGE + READ))
    free = [other for other in NAMES if other not in stored]
    if action == "rename" and not free:
        action = "open"
    return Step(action, name, str(rng.choice(free)) if action == "rename" else "", number)


def carry_out(db, seed, step, durability):
    """Make the call of a step. Raises what it raises."""
    if step.action == "put":
        put(db, tokens_of(seed, step.number), step.name, durability)
    elif step.action == "fork":
        _fork(db, seed, step, durability)
    elif step.action == "blend":
        with db.create_session(SPEC, parts=[step.other]) as session:
            count = min(40, session.start)
            for layer, (k, v) in enumerate(_recomputed(seed + step.number, count)):
                session.overlay(layer, np.arange(count), k, v)
            db.store(session, name=step.name, durability=durability)
    elif step.action == "open":
        with db.create_session(SPEC, parts=[step.name]) as session:
            _last_answers(session)
    elif step.action == "note":
        db.update(step.name, metadata={"step": step.number}, ttl=TTL_SECONDS)
    elif step.action == "rename":
        db.rename(step.name, step.other)
    elif step.action == "compact":
        db.compact()
    elif step.action == "index":
        db.build_index(step.name, "flat")
    else:
        {"drop": db.drop, "pin": db.pin, "unpin": db.unpin, "offload": db.offload}[step.action](step.name)


def _last_answers(session):
    """What a query at the last position is answered, by layer."""
    return [session.attention(layer, _QUERY, positions=[session.start - 1]) for layer in range(SPEC.layers)]


def _fork(db, seed, step, durability):
    """Open a session on a context, cut it, let a fork go on, and store that."""
    with db.create_session(SPEC, parts=[step.other]) as session:
        stored = session.tokens
    kept, tokens = _forked(seed, step.number, stored)
    with db.create_session(SPEC, stored) as session:
        session.truncate(kept)
        with session.fork() as twin:
            for layer, (k, v) in enumerate(kv_of(tokens)):
                twin.update(layer, k[:, twin.start :], v[:, twin.start :])
            db.store(twin, name=step.name, tokens=tokens, durability=durability)


def possible(state, step):
    """Whether a step can be taken where this is stored."""
    if step.action in MAKE:
        return step.name not in state and (step.action == "put" or step.other in state)
    return step.action == "compact" or (step.name in state and step.other not in state)


def after(state, seed, step):
    """What is stored once a step is done, contexts by name. state: what was before, which stays as it is."""
    now, name = dict(state), step.name
    if step.action == "put":
        now[name] = Kept(tokens_of(seed, step.number))
    elif step.action == "fork":
        now[name] = Kept(_forked(seed, step.number, state[step.other].tokens)[1])
    elif step.action == "blend":
        tokens = state[step.other].tokens
        now[name] = Kept(tokens, min(40, len(tokens)), seed + step.number)
    elif step.action == "drop":
        del now[name]
    elif step.action in {"pin", "unpin"}:
        now[name] = replace(now[name], pinned=step.action == "pin")
    elif step.action == "note":
        now[name] = replace(now[name], noted=step.number)
    elif step.action == "rename":
        now[step.other] = now.pop(name)
    return now


def lives(db):
    """What a store says of its contexts: whether they are pinned, the step that is noted, and whether they end, by name."""
    infos = [context.info for context in db.contexts()]
    return {info.name: (info.pinned, info.metadata.get("step"), info.expires is not None) for info in infos}


def is_whole(db, name, kept):
    """Whether a context is found, by its tokens if it is no blend. Raises AssertionError where it answers by anything but its own
    keys and values."""
    if not kept.recomputed:
        return holds(db, kept.tokens)
    with db.create_session(SPEC, parts=[name]) as session:
        if not np.array_equal(session.tokens, kept.tokens):
            return False
        answers = _last_answers(session)
    for stored, new, answer in zip(kv_of(kept.tokens), _recomputed(kept.table, kept.recomputed), answers, strict=True):
        k, v = (np.concatenate([new[side], stored[side][:, kept.recomputed :]], axis=1) for side in range(2))
        assert relative_error(answer, attention(_QUERY, k, v, SPEC.softmax_scale)[0]) < 1e-5, "a wrong answer"
    return True


REFUSED = (CapacityError, NotFound)
"""What a step may meet where room is short, and its context went: then it has done nothing."""
