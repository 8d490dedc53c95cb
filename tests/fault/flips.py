"""Changes single bits of a store's files, or cuts one short, and looks at what is answered from it.

python -m tests.fault.flips --flips 10000 --seed 1
"""

import argparse
import logging
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

import kvdb
from indexes.retrieval import Dipr
from kvdb.attention.signs import SIGNS
from kvdb.catalog.evidence.way_record import Audit
from kvdb.config import IndexConfig, OptimizerConfig, WindowConfig
from kvdb.errors import IntegrityError, KvdbError, NotFound
from query_optimizer.query_options import QueryOptions
from query_optimizer.ways import Way
from tests.reference import relative_error
from tests.stores import SPEC, config, holds, kv_of, names, put

CONTEXTS = {"doc": np.arange(300) % 50, "longer": np.r_[np.arange(300) % 50, 7, 8], "other": np.arange(200) % 31}
NOTED = {"of": "doc"}
OBSERVED = 12
"""Searches, of which statistics are made."""
SEARCH = QueryOptions(Dipr(0.5))
WAY = Way("flat", Dipr(0.5))
AUDIT = Audit(
    np.full((1, 1), 1e-3, np.float32),
    np.full((1, 1), -9, np.float32),
    np.zeros((SIGNS, 1, 1), np.float32),
    np.ones(1, bool),
    np.zeros((1, 1), bool),
    0.2,
)
STORES = ("closed", "killed")
MEMORY = Path("/dev/shm")
_QUERY = np.random.default_rng(4).standard_normal((SPEC.q_heads, 1, SPEC.head_dim)).astype(np.float32)


def open_store(folder):
    """A client of the store in a folder, which searches whatever has an index."""
    optimizer = OptimizerConfig(short_context_tokens=64, rules_off=("short_context", "diffuse_head"), machine_file="")
    indexes = IndexConfig(on_demand="", automatic=False, segment_tokens_min=64)
    settings = replace(config(), optimizer=optimizer, window=WindowConfig(8, 16), indexes=indexes)
    return kvdb.connect(folder, config=settings)


def make(folder):
    """Two stores with files of every kind: "closed", and "killed", of whose catalogue a part stands in the log. Returns what both
    answer."""
    with open_store(folder / "open") as db:
        put(db, CONTEXTS["doc"], "doc")
        put(db, CONTEXTS["longer"], "longer")
        put(db, CONTEXTS["other"], "other")
        put(db, CONTEXTS["other"][::-1], "gone")
        db.update("doc", pinned=True, ttl=100_000, metadata=NOTED)
        with db.create_session(SPEC, parts=["doc"]) as session:
            for layer, (k, v) in enumerate(kv_of(np.arange(40))):
                session.overlay(layer, np.arange(40), k, v)
            session.store("blend")
        db.compact()
        db.build_index("doc", "flat")
        for _ in range(OBSERVED):
            _searched(db)
        for view in db._transport._catalog.get("doc").views:
            view.segment.evidence.add(0, WAY, AUDIT)
    shutil.copytree(folder / "open", folder / "closed")
    with open_store(folder / "open") as db:
        db.drop("gone")
        shutil.copytree(folder / "open", folder / "killed")
        return {part: ask(db) for part, ask in PARTS.items()}


def files_of(folder):
    """The files of both stores, as paths in the folder. Raises AssertionError where a kind of them is missing."""
    files = sorted(path.relative_to(folder) for name in STORES for path in (folder / name).rglob("*") if path.is_file())
    kinds = {path.suffix or path.name for path in files}
    assert kinds >= {".segment", ".index", ".evidence", ".statistics", ".db", ".db-wal", ".json"}, kinds
    return files


def _lives(db):
    infos = [context.info for context in db.contexts()]
    return [(info.name, info.pinned, info.expires, dict(info.metadata)) for info in infos if info.name in CONTEXTS]


def _statistics(db):
    """What is known of a context's queries; nothing, or what was."""
    return [segment.retrieved for segment in db.statistics("doc").segments if segment.queries.any()]


def _evidence(db):
    """What is proven of a context's answers; nothing, or what was."""
    ways = [view.segment.known_evidence().of(0) for view in db._transport._catalog.get("doc").views]
    return [one.rows for way in ways for one in way.values()]


def _searched(db):
    """What searches of a context answer. Raises NotFound where it is not found by its tokens."""
    with db.create_session(SPEC, CONTEXTS["doc"]) as session:
        if session.reused != len(CONTEXTS["doc"]):
            raise NotFound("doc")
        assert db._transport.wait_for_builds(20)
        return [session.attention(layer, _QUERY, options=SEARCH) for layer in range(SPEC.layers)]


def _blended(db):
    with db.create_session(SPEC, parts=["blend"]) as session:
        return [session.attention(layer, _QUERY, positions=[session.start - 1]) for layer in range(SPEC.layers)]


PARTS = {"lives": _lives, "statistics": _statistics, "evidence": _evidence, "searched": _searched, "blended": _blended}
MAY_GO = ("statistics", "evidence")
"""What is gathered anew where its file was changed."""


class Said(logging.Handler):
    """What a store says of itself in the log. level: the highest so far, 0 for nothing."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.worst = 0

    def emit(self, record):
        self.worst = max(self.worst, record.levelno)


def _same(got, expected):
    """Whether two answers of one part are the same."""
    if len(got) != len(expected):
        return False
    if expected and isinstance(expected[0], np.ndarray):
        return all(
            one.shape == other.shape and relative_error(one, other) < 1e-5 for one, other in zip(got, expected, strict=True)
        )
    return got == expected


def _answered(db, expected, said):
    """Whether everything is there as it was. Raises AssertionError for a wrong answer, and for what is gone without a word."""
    whole = True  # what is gathered as it is used comes first
    for part, ask in PARTS.items():
        try:
            got = ask(db)
        except (IntegrityError, NotFound):
            whole = False
        else:
            dropped = part in MAY_GO and not got
            whole &= not dropped
            told = said.worst > 0
            assert _same(got, expected[part]) or (told and (dropped or part == "lives")), (
                f"{part}: {got} and not {expected[part]}"
            )
    for name, tokens in CONTEXTS.items():
        try:
            found = holds(db, tokens) and name in names(db)
        except IntegrityError:
            whole = False
        else:
            whole &= found
            assert found or said.worst >= logging.ERROR, f"{name} is gone, and nobody was told"
    return whole


def outcome(folder, expected):
    """What a store that was changed does: "refused" to be opened, "told" that something is damaged, or "harmless". expected: what
    it answered before. Raises as `_answered` does."""
    said = Said()
    logger = logging.getLogger("kvdb")
    logger.addHandler(said)
    try:
        try:
            db = open_store(folder)
        except KvdbError:
            return "refused"
        with db:
            whole = _answered(db, expected, said)
        return "harmless" if whole and not said.worst else "told"
    finally:
        logger.removeHandler(said)


def change(path, rng, *, cut):
    """Change a bit of a file, or cut it short. Returns what was done, in words."""
    content = bytearray(path.read_bytes())
    at, bit = int(rng.integers(len(content) or 1)), int(rng.integers(8))
    if cut:
        del content[at:]
    elif content:
        content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"cut to {at} bytes" if cut else f"bit {bit} of byte {at}"


def run(flips, seed):
    """The number of changes by what came of them, for each kind of file."""
    rng = np.random.default_rng(seed)
    outcomes = {}
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        root = Path(name)
        expected = make(root)
        files = files_of(root)
        for number in range(flips):
            file = files[int(rng.integers(len(files)))]
            shutil.copytree(root / file.parts[0], root / "changed")
            what = change(root / "changed" / Path(*file.parts[1:]), rng, cut=number % 8 == 0)
            try:
                came = outcome(root / "changed", expected)
            except AssertionError as error:
                raise AssertionError(f"change {number} of seed {seed}, {file}, {what}: {error}") from None
            outcomes.setdefault(file.suffix or file.name, Counter())[came] += 1
            shutil.rmtree(root / "changed")
    return outcomes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.getLogger("kvdb").propagate = False
    outcomes = run(given.flips, given.seed)
    kinds = [
        f"{kind} {' '.join(f'{n} {came}' for came, n in sorted(counts.items()))}" for kind, counts in sorted(outcomes.items())
    ]
    sys.stdout.write(f"{given.flips} changes, no wrong answer: {', '.join(kinds)}\n")


if __name__ == "__main__":
    main()
