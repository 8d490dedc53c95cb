"""Do the card's part and the processor's part of one context run at the same time? Asked of the database as users ask it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

import kvdb
from benchmarks.gpu import reference
from benchmarks.gpu.cache import asking, random
from benchmarks.gpu.card import Card
from benchmarks.gpu.results import Results, Wrong
from kvdb.client.client import Client
from kvdb.client.session import Session
from kvdb.config import Config, OptimizerConfig, StorageConfig
from kvdb.database import Database
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.slot import SlotLayout
from query_optimizer.cost import GpuMachine

SHARE = 0.1
"""The share of all pages that the card holds."""
BLOCKS_MIN = 8
"""The fewest blocks that are worth copying."""
RATIO_MAX = 1.3
ANY = GpuMachine(call_s=1e-9, step_s=1e-9)
"""So quick to ask that plans take the interpreter for a few hundred tokens too."""
TIERS = {"card alone": {"gpu"}, "processor alone": {"cpu"}, "both": {"cpu", "gpu"}}


def run(card: Card, results: Results, seed: int) -> None:
    sizes = card.sizes
    k, v = (x[0] for x in random(card, seed, 1, sizes.long_tokens))
    q = asking(card, seed, [k])[0]
    held = max(int(SHARE * sizes.long_tokens) // sizes.block_size, BLOCKS_MIN) * sizes.block_size
    cut = sizes.long_tokens - held  # the card takes the last blocks
    ways = {"card alone": (slice(cut, None), held), "processor alone": (slice(0, cut), 0), "both": (slice(None), held)}
    times: dict[str, float] = {}
    for name, (part, on_card) in ways.items():
        truth = reference.attention(q, k[:, part], v[:, part], sizes.head_dim**-0.5)
        with opened(card, k[:, part], v[:, part], on_card) as session:
            planned = {access.tier for access in session.explain(0, retrieval=kvdb.Exact()).accesses}
            if planned != TIERS[name]:
                raise Wrong(f"overlap, {name}: the plan reads {planned}, and should read {TIERS[name]}")
            step = asked(session, q)
            error = reference.check(f"overlap, {name}", step().to(card.device), None, truth)
            ms = card.wall(step, calls=50)
        fields: dict[str, object] = {"error": error}
        if ms is not None:
            times[name] = fields["ms"] = ms
        if name == "both" and times:
            ratio = times["both"] / max(times["card alone"], times["processor alone"])
            fields |= {"ratio": ratio, "reach": f"<= {RATIO_MAX} x the slower", "holds": ratio <= RATIO_MAX}
        note = f"{k[:, part].shape[1]:,} tokens, and room for {on_card:,} on the card"
        results.add(f"{sizes.long_tokens:,} tokens", name, **fields, note=note)


@contextmanager
def opened(card: Card, k: torch.Tensor, v: torch.Tensor, on_card: int) -> Iterator[Session]:
    """A session over these keys and values, `[kv_heads, n, head_dim]`, in a database whose card has room for so many tokens, and
    has taken what it can."""
    sizes = card.sizes
    spec = kvdb.ModelSpec("benchmark", 1, sizes.q_heads, sizes.kv_heads, sizes.head_dim)
    slot = SlotLayout.of(BlockLayout.of(spec.shape(0), sizes.block_size)).nbytes
    storage = StorageConfig(
        block_size=sizes.block_size,
        gpu_bytes_max=on_card // sizes.block_size * slot,
        gpu_device="interpreter" if card.interpreted else "cuda",
    )
    ids = np.arange(k.shape[1])
    database = Database(Config(storage=storage, optimizer=OptimizerConfig(machine_file="")))
    with Client(database) as client:
        client.import_context(spec, ids, [(k.cpu(), v.cpu())], name="context")
        if database.gpu is not None and card.interpreted:
            database.gpu.machine = ANY
        with client.create_session(spec, ids) as session:
            session.explain(0)  # a plan asks for copies
            if database.gpu is not None:
                database.gpu.mirrors.wait_idle()
            yield session


def asked(session: Session, q: torch.Tensor) -> Callable[[], torch.Tensor]:
    """One decode step over all that is stored, of q `[q_heads, head_dim]`."""
    host = q.cpu()[:, None]

    def step() -> torch.Tensor:
        out: torch.Tensor = session.attention(0, host, retrieval=kvdb.Exact())
        return out[:, 0]

    return step
