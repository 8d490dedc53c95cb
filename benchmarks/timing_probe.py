"""Can a tenant tell by the clock whether another has stored something?

    python -m benchmarks.timing_probe [--lookups 10000]

One tenant asks a server, over gRPC and in random order, for what another tenant has stored and for what nobody has: contexts by
name (`get`), and prompts by their tokens (`match`). `auc` is the share of pairs in which the one took longer than the other, or
shorter, whichever is more: 0.5 tells nothing, 1.0 everything. `auc_of_medians` is that of the median times of each context, for
who asks again and again: of 50 contexts beside 50, so that chance alone makes 0.6 of it now and then. `accuracy` is that of a
threshold on the time, chosen on four fifths of the look-ups and tried on the last, five times over. `own` is the control: the
tenant's own contexts beside none. Asked for: an AUC of at most 0.55 for another's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns

import numpy as np

import kvdb
from benchmarks.harness import argument_parser, machine, report
from kvdb.config import ServerConfig
from kvdb.database import Database
from kvdb.errors import NotFound
from kvdb.server.serve import Server
from kvdb.server.tenancy.tokens_file import new_token

SPEC = kvdb.ModelSpec("model", layers=1, q_heads=1, kv_heads=1, head_dim=16, dtype="float32")
CONTEXTS, TOKENS, FOLDS, WARM_UP = 50, 512, 5, 500


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--lookups", type=int, default=10_000, help="of each kind (default %(default)s)")
    lookups = parser.parse_args().lookups
    rng = np.random.default_rng(0)
    texts = {who: rng.integers(0, 150_000, (CONTEXTS, TOKENS)) for who in ("theirs", "own", "absent")}
    with tempfile.TemporaryDirectory() as folder, Database() as database:
        path = Path(folder) / "tokens.json"
        tokens = {tenant: new_token(path, tenant) for tenant in ("acme", "globex")}
        server = Server(database, ServerConfig(port=0, tokens_file=str(path), local_socket=""))
        server.start()
        with (
            kvdb.connect(server.target, token=tokens["acme"]) as acme,
            kvdb.connect(server.target, token=tokens["globex"]) as asks,
        ):
            fill(acme, "theirs", texts["theirs"])
            fill(asks, "owning", texts["own"])
            named: dict[str, Callable[[int], object]] = {
                "theirs": lambda i: get(asks, f"theirs-{i:04}"),
                "own": lambda i: get(asks, f"owning-{i:04}"),
                "absent": lambda i: get(asks, f"absent-{i:04}"),
            }
            matched: dict[str, Callable[[int], object]] = {
                "theirs": lambda i: asks.match(SPEC, texts["theirs"][i]),
                "own": lambda i: asks.match(SPEC, texts["own"][i]),
                "absent": lambda i: asks.match(SPEC, texts["absent"][i]),
            }
            for call, probes in (("get", named), ("match", matched)):
                for which in ("theirs", "own"):
                    probe(call, which, (probes[which], probes["absent"]), lookups, rng)
        server.stop(grace=0)


def fill(client: kvdb.Client, prefix: str, texts: np.ndarray) -> None:
    kv = np.zeros((1, TOKENS, 16), np.float32)
    for i, text in enumerate(texts):
        client.import_context(SPEC, text, [(kv, kv)], name=f"{prefix}-{i:04}")


def get(client: kvdb.Client, name: str) -> None:
    with suppress(NotFound):
        client.get(name)


def probe(
    call: str, which: str, probes: tuple[Callable[[int], object], Callable[[int], object]], lookups: int, rng: np.random.Generator
) -> None:
    """Ask both in random order, and report how well the times tell them apart."""
    order = rng.permutation(np.repeat([True, False], lookups))
    places = rng.integers(0, CONTEXTS, len(order))
    for i in range(WARM_UP):
        probes[i % 2](i % CONTEXTS)
    times = np.empty(len(order))
    for n, (stored, i) in enumerate(zip(order, places, strict=True)):
        ask = probes[0] if stored else probes[1]
        started = perf_counter_ns()
        ask(int(i))
        times[n] = perf_counter_ns() - started
    report(
        "timing_probe",
        call=call,
        stored=which,
        lookups=lookups,
        auc=round(auc(times[order], times[~order]), 4),
        auc_of_medians=round(auc(medians(times[order], places[order]), medians(times[~order], places[~order])), 4),
        accuracy=round(accuracy(times, order), 4),
        stored_us=round(float(np.median(times[order])) / 1e3, 1),
        absent_us=round(float(np.median(times[~order])) / 1e3, 1),
        **machine(),
    )


def auc(first: np.ndarray, second: np.ndarray) -> float:
    """The Mann-Whitney statistic, in either direction; ties count half. first, second: float `[n]`."""
    both = np.sort(np.concatenate([first, second]))
    ranks = (np.searchsorted(both, first, "left") + np.searchsorted(both, first, "right") + 1) / 2
    above = (ranks.sum() - len(first) * (len(first) + 1) / 2) / (len(first) * len(second))
    return float(max(above, 1 - above))


def medians(times: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The median time of each context that was asked for. times, places: `[n]`."""
    return np.array([np.median(times[places == place]) for place in np.unique(places)])


def accuracy(times: np.ndarray, stored: np.ndarray) -> float:
    """The share of look-ups that a threshold tells right which was chosen on others. times, stored: `[n]`."""
    fold = np.arange(len(times)) * FOLDS // len(times)
    right = 0
    for k in range(FOLDS):
        known, tried = fold != k, fold == k
        thresholds = np.quantile(times[known], np.linspace(0.01, 0.99, 99))
        scores = [np.mean((times[known] > threshold) == stored[known]) for threshold in thresholds]
        best = int(np.argmax(np.abs(np.array(scores) - 0.5)))
        told = (times[tried] > thresholds[best]) == stored[tried]
        right += int(np.sum(told if scores[best] >= 0.5 else ~told))
    return right / len(times)


if __name__ == "__main__":
    main()
