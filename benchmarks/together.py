"""What does a step of several sessions over one stored document take in one call, beside a call for each? One JSON line a
measurement.

`together.step`: a token of each session, in one layer. seconds_each: one call after the other. bytes_read: of keys and values,
of all sessions.
"""

from functools import partial

import numpy as np

import kvdb
from benchmarks.harness import machine, measure, report
from kvdb.types import DTYPES, Array

RNG = np.random.default_rng(6)
SPEC = kvdb.ModelSpec("bench", 1, 32, 8, 128, "bfloat16")
SESSIONS = (1, 8, 32)
TOKENS, OWN_TOKENS = 32_768, 200
ROUNDS = 11


def main() -> None:
    report("machine", **machine())
    ids = np.arange(TOKENS)
    with kvdb.connect() as db:
        db.import_context(SPEC, ids, [(random(8, TOKENS), random(8, TOKENS))], name="doc")
        for count in SESSIONS:
            step(db, ids, count)


def step(db: kvdb.Client, ids: np.ndarray, count: int) -> None:
    together, apart = ([db.create_session(SPEC, ids) for _ in range(count)] for _ in range(2))
    for one, other in zip(together, apart, strict=True):
        own = random(8, OWN_TOKENS), random(8, OWN_TOKENS)
        one.update(0, *own)
        other.update(0, *own)
    q, k, v = (np.stack([random(heads, 1) for _ in range(count)]) for heads in (32, 8, 8))
    run_together = partial(db.attend, together, 0, q, k, v, retrieval=kvdb.Exact())

    def run_apart() -> np.ndarray:
        return np.stack([session.attend(0, q[i], k[i], v[i], retrieval=kvdb.Exact()) for i, session in enumerate(apart)])

    outs = [run().astype(np.float32) for run in (run_together, run_apart)]
    before = [read(sessions) for sessions in (together, apart)]
    seconds = measure({"together": run_together, "apart": run_apart}, ROUNDS)
    nbytes = [read(sessions) - had for sessions, had in zip((together, apart), before, strict=True)]
    report(
        "together.step",
        sessions=count,
        context_tokens=TOKENS,
        own_tokens=OWN_TOKENS,
        seconds=seconds["together"],
        seconds_each=seconds["apart"],
        ratio=seconds["apart"] / seconds["together"],
        bytes_ratio=nbytes[1] / nbytes[0],
        relative_error=float(np.linalg.norm(outs[0] - outs[1]) / np.linalg.norm(outs[1])),
    )
    for session in (*together, *apart):
        session.close()


def random(heads: int, tokens: int) -> Array:
    return RNG.standard_normal((heads, tokens, 128), np.float32).astype(DTYPES["bfloat16"])


def read(sessions: list[kvdb.Session]) -> int:
    """Bytes of keys and values that these sessions have read."""
    return sum(session.stats().bytes_read for session in sessions)


if __name__ == "__main__":
    main()
