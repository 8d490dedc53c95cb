"""Does the error budget hold on heads that are made to break it, and is a change of habits noticed? One JSON line a measurement.

Each adversary (benchmarks/adversaries.py) is stored with the indexes that can answer it, and decoded from with nothing asked for
but an error_max. Every answer is compared with attention in float64 over what is stored. `adversarial.decode`: proven_after: the
queries before the first that was not answered exactly for all heads, null for none. over_before, over_after: the share of answers
whose error exceeds error_max before that query and from it on, without those between a change of habits and its being noticed.
noticed_after: the queries from the change until of NOTICED answers at most one is over. exact_error: the largest error of exact
answers, which is that of the dtype. worst_hundred: the most answers over error_max among any WINDOW in a row, with
those between a change and its being noticed. own_tokens: that the session had added before the first query. speed: of the
decode's last queries, over exact attention.

With `--at-any-price` audits cost nothing, and every way that is proven is used, also where it takes longer than reading
everything: what is over then does not depend on how fast this machine is. With `--proven-first` that is so until the change of
habits, and what follows has the time that a session has.

`adversarial.sharp`: sharp heads as in benchmarks/workloads.py, by the default once it is proven and by a literal Dipr.

`python -m benchmarks.adversarial --tokens 16384 --sharp-tokens 0` is shorter.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kvdb
from benchmarks.adversaries import ADVERSARIES, Adversary, Size, make
from benchmarks.adversary_oracle import Float64, Oracle
from benchmarks.harness import argument_parser, machine, measure, report
from benchmarks.real_model_ways import at_any_price
from benchmarks.workloads import Shape, generate
from kvdb.config import Config, IndexConfig, OptimizerConfig

KINDS = ("flat", "quantized", "coarse-clusters")
ERRORS_MAX = (0.005, 0.01, 0.02, 0.05, 0.1)
PROVING, CHANGED = 1200, 400
"""Queries of a decode before and after the change of habits; without one, all are of the same kind."""
NOTICED = 20
WINDOW = 100
OWN = 256
"""A session's own tokens are copies of so many of the last that are stored, none of which has a role."""
SHARP_TOKENS = 1 << 17
CONFIG = Config(
    indexes=IndexConfig(on_demand="", automatic=False, tail_tokens=0), optimizer=OptimizerConfig(rules_off=("short_context",))
)
"""With what a session adds left to exact attention, so that every query tells of the adversary, however short the context."""


@dataclass(frozen=True)
class Decode:
    """The answers to a decode, in their order. errors: float64, relative to attention in float64. approximate: whether a head was
    not answered exactly. changed: the first query after the change of habits, None without one. ways: queries by way."""

    errors: Float64
    approximate: npt.NDArray[np.bool_]
    changed: int | None
    ways: dict[str, int]

    def over(self, error_max: float) -> npt.NDArray[np.bool_]:
        return ~(self.errors <= error_max)

    @property
    def proven_after(self) -> int | None:
        return int(self.approximate.argmax()) if self.approximate.any() else None

    def worst(self, error_max: float) -> int:
        """The most answers over error_max among any WINDOW in a row."""
        return int(np.convolve(self.over(error_max), np.ones(WINDOW, np.int64)).max())

    def noticed_after(self, error_max: float) -> int | None:
        """Queries from the change until NOTICED answers have at most one over error_max; None without a change, and for never."""
        if self.changed is None:
            return None
        over = self.over(error_max)[self.changed :]
        counts = np.convolve(over, np.ones(NOTICED, np.int64), "valid")
        return int((counts <= 1).argmax()) if (counts <= 1).any() else None

    def over_shares(self, error_max: float) -> tuple[float, float]:
        """The shares of answers over error_max before the proof, and from it on, but for those until a change is noticed."""
        over, proven = self.over(error_max), len(self.errors) if self.proven_after is None else self.proven_after
        counted = np.arange(len(over)) >= proven
        if self.changed is not None:
            noticed = self.noticed_after(error_max)
            counted[self.changed : len(over) if noticed is None else self.changed + noticed] = False
        return _share(over[:proven]), _share(over[counted])


def _share(flags: npt.NDArray[np.bool_]) -> float:
    return float(flags.mean()) if len(flags) else 0.0


class Stored:
    """An adversary in a database, with its indexes."""

    def __init__(self, adversary: Adversary, config: Config = CONFIG) -> None:
        self.adversary = adversary
        kv_heads, tokens, head_dim = adversary.k.shape
        self.spec = kvdb.ModelSpec("adversary", 1, len(adversary.before), kv_heads, head_dim, adversary.k.dtype.name)
        self.ids = np.arange(tokens, dtype=np.int32)
        self.database = kvdb.connect(config=config)
        self.database.import_context(self.spec, self.ids, [(adversary.k, adversary.v)], name="adversary")
        for kind in KINDS:
            self.database.build_index("adversary", kind)

    def session(self) -> kvdb.Session:
        return self.database.create_session(self.spec, np.append(self.ids, 0))

    def close(self) -> None:
        self.database.close()


@dataclass(frozen=True)
class Asked:
    """before, after: the queries before the change of habits and from it on. own_tokens: that the session adds before all of
    them. proven_first: whether audits cost nothing before the change."""

    before: int = PROVING
    after: int = CHANGED
    seed: int = 0
    own_tokens: int = 0
    proven_first: bool = False


def decode(stored: Stored, session: kvdb.Session, oracle: Oracle, options: kvdb.QueryOptions, asked: Asked) -> Decode:
    """The queries are asked, each with a token like the last stored ones."""
    rng, adversary, proving = np.random.default_rng(asked.seed), stored.adversary, asked.before
    errors, approximate, ways = [], [], session.stats().ways
    first = ExitStack()
    if asked.proven_first:
        first.enter_context(at_any_price())
    for step in range(proving + asked.after):
        if step == proving:
            first.close()
        late = step >= proving and adversary.after is not None
        pool = adversary.after if late and adversary.after is not None else adversary.before
        number = int(rng.integers(pool.shape[1]))
        q = np.ascontiguousarray(pool[:, number : number + 1])
        token = -1 - step % OWN
        k, v = (np.ascontiguousarray(array[:, token, None]) for array in (adversary.k, adversary.v))
        oracle.append(k, v)
        out = session.attend(0, q, k, v, options=options).astype(np.float64)
        right = oracle.answer(q, number, late=late)
        errors.append(float(np.linalg.norm(out - right) / np.linalg.norm(right)))
        before, ways = ways, session.stats().ways
        approximate.append(any(count > before.get(way, 0) for way, count in ways.items() if way != "exact"))
    return Decode(np.array(errors), np.array(approximate), proving if adversary.after is not None else None, dict(ways))


def add_own(stored: Stored, session: kvdb.Session, oracle: Oracle, tokens: int) -> None:
    """Let the session add so many tokens like the last that are stored."""
    places = -1 - np.arange(tokens) % OWN
    k, v = (np.ascontiguousarray(array[:, places]) for array in (stored.adversary.k, stored.adversary.v))
    session.update(0, k, v)
    oracle.append(k, v)


def measure_adversary(name: str, size: Size, errors_max: list[float], asked: Asked) -> None:
    adversary = make(name, size, asked.seed)
    oracle = Oracle(adversary, size.head_dim**-0.5)
    for error_max in errors_max:
        measure_budget(adversary, size, oracle, error_max, asked)
        oracle.forget()


def measure_budget(adversary: Adversary, size: Size, oracle: Oracle, error_max: float, asked: Asked) -> None:
    """One decode from nothing known on. oracle: without tokens of a session."""
    stored, options = Stored(adversary), kvdb.QueryOptions(error_max=error_max)
    with stored.session() as session:
        if asked.own_tokens:
            add_own(stored, session, oracle, asked.own_tokens)
        found = decode(stored, session, oracle, options, asked)
        before, after = found.over_shares(error_max)
        q = np.ascontiguousarray((adversary.before if adversary.after is None else adversary.after)[:, :1])
        seconds = measure(
            {
                "exact": lambda: session.attention(0, q, retrieval=kvdb.Exact()),
                "default": lambda: session.attention(0, q, options=options),
            },
            rounds=31,
        )
        exact = found.errors[~found.approximate]
        report(
            "adversarial.decode",
            heads=adversary.name,
            tokens=size.tokens,
            own_tokens=asked.own_tokens,
            seed=asked.seed,
            error_max=error_max,
            queries=len(found.errors),
            proven_after=found.proven_after,
            over_before=before,
            over_after=after,
            worst_hundred=found.worst(error_max),
            approximate=float(found.approximate.mean()),
            largest=float(found.errors.max()),
            exact_error=float(exact.max()) if len(exact) else 0.0,
            changed_at=found.changed,
            noticed_after=found.noticed_after(error_max),
            ways=found.ways,
            speed=seconds["exact"] / seconds["default"],
        )
    stored.close()


def measure_sharp(tokens: int, kv_heads: int, cache: Path | None) -> None:
    """Sharp heads by the default, proven, and by the Dipr that it would be without a budget."""
    layer = generate("sharp", Shape(tokens, kv_heads), queries=64, query_samples=64, cache=cache)
    pool = layer.queries.astype(layer.k.dtype)
    stored = Stored(Adversary("sharp", layer.k, layer.v, pool, None))
    rng = np.random.default_rng(0)
    with stored.session() as session:
        k, v = rng.standard_normal((2, kv_heads, 1, layer.k.shape[2])).astype(np.float32).astype(layer.k.dtype)
        session.update(0, k, v)
        asked = [np.ascontiguousarray(pool[:, i : i + 1]) for i in range(pool.shape[1])]
        for step in range(PROVING):
            session.attention(0, asked[step % len(asked)])
        turn = iter(range(1 << 30))
        candidates = {"default": None, "dipr": kvdb.Dipr(), "exact": kvdb.Exact()}

        def ask(retrieval: kvdb.Dipr | kvdb.Exact | None) -> object:
            return session.attention(0, asked[next(turn) % len(asked)], retrieval=retrieval)

        seconds = measure({name: lambda r=r: ask(r) for name, r in candidates.items()}, rounds=61)
        report(
            "adversarial.sharp",
            tokens=tokens,
            kv_heads=kv_heads,
            queries=PROVING,
            ways=dict(session.stats().ways),
            speed_over_exact=seconds["exact"] / seconds["default"],
            speed_over_dipr=seconds["dipr"] / seconds["default"],
        )
    stored.close()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1 << 16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--queries", type=int, nargs=2, default=[PROVING, CHANGED], help="before and after a change of habits")
    parser.add_argument("--heads", nargs="*", default=list(ADVERSARIES), choices=list(ADVERSARIES))
    parser.add_argument("--error-max", nargs="*", type=float, default=list(ERRORS_MAX))
    parser.add_argument("--sharp-tokens", type=int, default=SHARP_TOKENS, help="0 leaves the sharp heads out")
    parser.add_argument("--own-tokens", type=int, default=0, help="that the session adds before the first query")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, help="a folder that keeps keys of sharp heads from run to run")
    parser.add_argument("--at-any-price", action="store_true", help="audits cost nothing, and whatever is proven is used")
    parser.add_argument("--proven-first", action="store_true", help="the same until the change of habits")
    given = parser.parse_args()
    size = Size(given.tokens, given.kv_heads, given.group)
    asked = Asked(*given.queries, given.seed, given.own_tokens, given.proven_first)
    report("machine", **machine())
    for name in given.heads:
        with at_any_price() if given.at_any_price else nullcontext():
            measure_adversary(name, size, given.error_max, asked)
    if given.sharp_tokens:
        measure_sharp(given.sharp_tokens, given.kv_heads, given.cache)


if __name__ == "__main__":
    main()
