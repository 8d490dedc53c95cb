"""Does the optimizer take the fastest plan, does each rule earn its place, and what does planning cost?

A grid of context lengths, layers (sharp, mixed and diffuse heads), memory budgets, queries in a call and sessions on one segment.
At every point all plans are really run, in turn and behind a sweep of the caches: exact attention and each kind of index that the
budget allows. The time of the plan that the optimizer takes is divided by that of the fastest; then the same with each rule
switched off. `python -m benchmarks.optimizer --help` for a smaller grid; --cache keeps keys and indexes from run to run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter

import numpy as np

import indexes.registry as registry
import kvdb
from benchmarks.harness import argument_parser, machine, per_call, report
from benchmarks.heads import LAYERS, Heads
from indexes.retrieval import Dipr, Exact
from kvdb.catalog.evidence.statistics import Statistics
from kvdb.config import Config, IndexConfig
from kvdb.database import Database
from kvdb.planning.planner import Planner
from kvdb.session.state import SessionState
from query_optimizer.diffuse import ESTIMATED
from query_optimizer.query_options import Hints, QueryOptions
from query_optimizer.rules import base_rules

LENGTHS = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 17, 1 << 19)
KINDS = ("flat", "coarse-means", "coarse-clusters", "hnsw")
BUDGETS = {"none": None, "pages": 64, "codes": 190}
"""Bytes a token and KV head that the indexes of a layer may keep beside the window: pages alone, or flat's codes too."""
SESSIONS = (1, 4, 16)
ROUNDS, WARM_UP = 16, 40
SWEEP_NBYTES = 64 << 20
OWN_TOKENS = 1 << 16


@dataclass(frozen=True)
class Point:
    """One cell of the grid. tokens: that are visible, of stored; queries: of a call, those of the last tokens. known: whether
    there were queries before, so that something is known of the heads. own: whether the session added the tokens itself."""

    tokens: int
    stored: int
    layer: int
    budget: str
    queries: int
    sessions: int
    asked: bool
    known: bool = True
    own: bool = False

    def __str__(self) -> str:
        part = f" of {self.stored:,}" if self.stored > self.tokens else ""
        what = ("dipr asked for" if self.asked else "nothing asked for") + ("" if self.known else ", nothing known")
        whose = "own " if self.own else ""
        return (
            f"{self.tokens:,}{part} {whose}tokens, {LAYERS[self.layer]}, budget {self.budget}, {self.queries} queries, "
            f"{self.sessions} sessions, {what}"
        )


def grid(lengths: tuple[int, ...]) -> Iterator[Point]:
    """Every length, layer and budget; more sessions, prompts and partial reuse at some of the lengths."""
    for tokens, layer, asked in product(lengths, range(len(LAYERS)), (False, True)):
        for budget in BUDGETS:
            yield Point(tokens, tokens, layer, budget, 1, 1, asked)
    for tokens, layer, sessions in product(lengths[2:5], range(len(LAYERS)), SESSIONS[1:]):
        yield Point(tokens, tokens, layer, "none", 1, sessions, False)
    for tokens, layer in product(lengths[2:5], range(len(LAYERS))):
        yield Point(tokens, tokens, layer, "none", 64, 1, False)
        yield Point(tokens, tokens, layer, "none", 64, 1, False, known=False)
        yield Point(tokens, tokens, layer, "none", 1, 1, False, known=False)
    for tokens, layer in product(lengths[2:], range(len(LAYERS))):
        for visible in (tokens // 8, tokens // 4, 3 * tokens // 4):
            if visible >= LENGTHS[1]:
                yield Point(visible, tokens, layer, "none", 1, 1, False)
    for layer in range(len(LAYERS)):
        yield Point(OWN_TOKENS, OWN_TOKENS, layer, "none", 1, 1, False, own=True)


class Document:
    """A context of three layers with every kind of index, and sessions over it."""

    def __init__(self, tokens: int, cache: Path | None) -> None:
        self.heads = Heads(tokens, cache)
        self.database = Database(Config(indexes=IndexConfig(on_demand="")))
        self._ids = np.arange(tokens, dtype=np.int32)
        self.heads.store(self.database, "document", self._ids)
        self._views = self.database._catalog.acquire("document").views
        segment = self._views[0].segment
        for layer, kind in product(range(len(LAYERS)), KINDS):
            if tokens >= IndexConfig().segment_tokens_min:
                segment.indexes.put(layer, self.heads.index(kind, layer, segment.tables[layer].keys(tokens)))
        self.kept = {kind: index.nbytes for kind, index in segment.indexes.of(0).items()}
        self._sessions: dict[tuple[int, int], list[SessionState]] = {}
        self._own: dict[tuple[int, str], SessionState] = {}

    def sessions(self, tokens: int, count: int) -> list[SessionState]:
        """Sessions that see the first `tokens` tokens."""
        if (tokens, count) not in self._sessions:
            self._sessions[tokens, count] = [
                self.database.create_session(self.heads.spec, self._ids[:tokens]) for _ in range(count)
            ]
        return self._sessions[tokens, count]

    def own(self, layer: int, way: str) -> SessionState:
        """A session whose tokens of one layer are its own; of each way of answering, for indexes over them are its own too."""
        if (layer, way) not in self._own:
            while self._own and next(iter(self._own))[0] != layer:
                self._own.pop(next(iter(self._own))).close()
            session = self._own[layer, way] = self.database.create_session(self.heads.spec, np.zeros(0, np.int32))
            for k, v in self.heads.pieces(layer):
                session.update(layer, k, v)
        return self._own[layer, way]

    def forget(self, point: Point) -> None:
        """What is known of the heads, and what was planned by it."""
        self._views[0].segment.statistics = Statistics()
        for session in [] if point.own else self.sessions(point.tokens, point.sessions):
            session._layers[point.layer].planner._prepared.clear()

    def budget(self, point: Point) -> int | None:
        """In bytes of one layer."""
        per_token, spec = BUDGETS[point.budget], self.heads.spec
        window = self.database.config.window
        least = (window.sink_tokens + window.recent_tokens) * spec.token_nbytes
        return None if per_token is None else least + per_token * spec.kv_heads * point.stored

    def close(self) -> None:
        self.database.close()


class Sweep:
    """Fills the caches with something else, as the other layers of a model do."""

    def __init__(self) -> None:
        self._memory = np.zeros(SWEEP_NBYTES // 8)

    def __call__(self) -> None:
        self._memory += 1


def plans(document: Document, point: Point) -> dict[str, QueryOptions]:
    """Everything that could be done at a point, by name."""
    asked, budget = (Dipr() if point.asked else None), document.budget(point)
    found = {"exact": QueryOptions(Exact())}
    if point.own:
        return found | {"flat": QueryOptions(asked, hints=Hints(rules_off=("diffuse_head",)))}
    for kind, kept in document.kept.items():
        window = document.database.config.window
        room = None if budget is None else budget - (window.sink_tokens + window.recent_tokens) * document.heads.spec.token_nbytes
        if room is None or kept <= room:
            found[kind] = QueryOptions(asked, hints=Hints(index=kind))
            if kind == "coarse-clusters" and not point.asked:
                found["estimated"] = QueryOptions(ESTIMATED, estimate_tail=True, hints=Hints(index=kind))
    return found


def run(document: Document, point: Point, candidates: Mapping[str, QueryOptions], sweep: Sweep) -> dict[str, float]:
    """Median seconds of each candidate, one call of each in every round."""
    sessions = [] if point.own else document.sessions(point.tokens, point.sessions)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    slow = document.heads.nbytes(point.tokens) * point.queries > 1 << 33
    for i in range(5 if slow else ROUNDS):
        q = document.heads.query(point.layer, i, point.queries)
        for name, options in candidates.items():
            if not point.known:
                document.forget(point)
            session = document.own(point.layer, name) if point.own else sessions[i % len(sessions)]
            sweep()
            begin = perf_counter()
            session.attention(point.layer, q, options)
            seconds[name].append(perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def learn(document: Document, point: Point, options: QueryOptions) -> None:
    """What a session knows of its heads after some steps."""
    for i, session in product(range(WARM_UP), document.sessions(point.tokens, point.sessions)):
        session.attention(point.layer, document.heads.query(point.layer, i, 1), options)


def show(document: Document, point: Point, rules: list[str], sweep: Sweep) -> dict[str, float]:
    """Measures one point; the ratio of the chosen plan to the fastest, and with each rule off."""
    budget, asked = document.budget(point), Dipr() if point.asked else None
    chosen = QueryOptions(asked, hints=Hints(memory_budget=budget))
    document.forget(point)
    if point.known and not point.own:
        learn(document, point, chosen)
    candidates = plans(document, point)
    off = {f"without {rule}": QueryOptions(asked, hints=Hints(rules_off=(rule,), memory_budget=budget)) for rule in rules}
    taken = {name: way(document, point, name, options) for name, options in {"chosen": chosen, **off}.items()}
    changed = {name: options for name, options in off.items() if taken[name] != taken["chosen"]}
    seconds = run(document, point, {"chosen": chosen, **candidates, **changed}, sweep)
    best = min(candidates, key=lambda name: seconds[name])
    ratios = {"chosen": seconds["chosen"] / seconds[best]}
    ratios |= {name: seconds[name] / seconds[best] for name in changed}
    report(
        "optimizer",
        point=str(point),
        way=taken["chosen"],
        best=best,
        ratio=ratios["chosen"],
        milliseconds={name: round(1e3 * value, 3) for name, value in seconds.items()},
    )
    return ratios


def way(document: Document, point: Point, name: str, options: QueryOptions) -> str:
    """What a plan does, without its numbers."""
    session = document.own(point.layer, name) if point.own else document.sessions(point.tokens, point.sessions)[0]
    for _ in range(3 if point.own else 0):
        session.attention(point.layer, document.heads.query(point.layer, 0, 1), options)  # after which old tokens are indexed
    plan = session._layers[point.layer].planner.plan(options, point.queries)
    return "; ".join(
        f"{a.index or 'exact'} {a.retrieval} on {len(a.heads)} by {a.rule}" for a in plan.accesses if a.rule != "window"
    )


def summary(measured: list[tuple[Point, dict[str, float]]], rules: list[str]) -> None:
    """The distribution of the chosen plans, and what it becomes without each rule."""
    for known in (True, False):
        usual = [ratio["chosen"] for point, ratio in measured if point.known == known]
        report("optimizer.chosen", known=known, points=len(usual), **distribution(usual))
    ratios = [ratio for _, ratio in measured]
    for rule in rules:
        name = f"without {rule}"
        changed = [(point["chosen"], point[name]) for point in ratios if name in point]
        report(
            "optimizer.rule",
            off=rule,
            changed=len(changed),
            slower=sum(without > 1.1 * chosen for chosen, without in changed),
            faster=sum(chosen > 1.1 * without for chosen, without in changed),
            **distribution([point.get(name, point["chosen"]) for point in ratios]),
        )


def distribution(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [float("nan")]
    return {
        "median": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))],
        "worst": ordered[-1],
    }


def planning(document: Document) -> None:
    """Microseconds of finding a prepared plan, and of making one."""
    session = document.sessions(document.heads.tokens, 1)[0]
    planner: Planner = session._layers[0].planner
    options = QueryOptions()

    def prepared() -> None:
        planner.prepare(1, options).uses = 9  # so that it is not made anew

    made: Callable[[], object] = lambda: planner.prepare_once(1, options)  # noqa: E731
    report(
        "optimizer.planning",
        prepared_us=1e6 * per_call(prepared, 2000),
        anew_us=1e6 * per_call(made, 200),
        parts=1,
        kinds=len(document.kept),
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of the contexts")
    parser.add_argument("--cache", type=Path, help="a folder that keeps keys and indexes")
    given = parser.parse_args()
    rules = [rule.name for rule in base_rules()[:-1]]
    report("optimizer.machine", **machine(), kvdb=kvdb.__version__, kinds=list(registry.KINDS))
    sweep, measured = Sweep(), []
    points = list(grid(tuple(given.lengths)))
    for stored in given.lengths:
        document = Document(stored, given.cache)
        if stored == 1 << 16 or len(given.lengths) == 1:
            planning(document)
        here = [point for point in points if point.stored == stored]
        for done, point in enumerate(here):
            measured.append((point, show(document, point, rules, sweep)))
            print(f"{stored:,} tokens: {done + 1} of {len(here)} points", file=sys.stderr)
        document.close()
    summary(measured, rules)


if __name__ == "__main__":
    main()
