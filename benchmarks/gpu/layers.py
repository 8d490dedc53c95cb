"""What does a layer's decode step take beyond its kernel, for a caller whose tensors lie on the card?

A model of 32 layers: each appends a token to a session of the database and attends, by `session.attend`. With tensors on the card
nothing comes to main memory and the host waits for nothing; beside it the same with tensors in main memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

import kvdb
from benchmarks.gpu import reference
from benchmarks.gpu.cache import Cache, asking, random
from benchmarks.gpu.card import Card
from benchmarks.gpu.decoding import Decoding
from benchmarks.gpu.overlap import ANY
from benchmarks.gpu.results import Results, Wrong
from kvdb.client.client import Client
from kvdb.client.session import Session
from kvdb.config import Config, OptimizerConfig, StorageConfig
from kvdb.database import Database
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.slot import SlotLayout

TOKENS = 4000
LAYERS, LAYERS_SMALL = 32, 2
STEPS, STEPS_FEW = 48, 7
"""Steps before anything is timed: plans are made anew after 4, 8, 16 steps and so on."""
MORE_TOKENS = 1024
"""Tokens that there is room for on the card beside those that are stored."""
BEYOND_MS = 0.03
WAITING_MAX = 0.2
"""The largest share of these steps that may wait: those for which a plan is made, and the first."""


def run(card: Card, results: Results, seed: int) -> None:
    tokens, layers = (card.sizes.tokens, LAYERS_SMALL) if card.small else (TOKENS, LAYERS)
    case = f"{layers} layers, {tokens:,} tokens"
    alone = kernel(card, seed, tokens)
    for place in ("in main memory", "on the card"):
        with opened(card, layers, tokens, seed) as model:
            error, waited = model.checked(f"layers, {place}", place, STEPS if card.timed and not card.interpreted else STEPS_FEW)
            if place == "on the card" and waited > WAITING_MAX:
                raise Wrong(f"layers: {100 * waited:.0f} % of the steps with tensors on the card waited for it")
            wall = card.wall(partial(model.step, model.inputs(place, 0)), calls=100)
        fields: dict[str, object] = {"error": error}
        note = f"a layer; {100 * waited:.0f} % of {STEPS} steps waited" if card.timed else ""
        if wall is not None:
            beyond = wall / layers - alone["kernel"]
            fields |= {"ms": wall / layers, "ratio": beyond / BEYOND_MS}
            note += f"; {1e3 * beyond:.0f} us beyond the kernel's {1e3 * alone['kernel']:.0f}"
            if place == "on the card":
                fields |= {"reach": f"<= {1e3 * BEYOND_MS:.0f} us beyond", "holds": beyond <= BEYOND_MS}
        results.add(case, f"tensors {place}", **fields, note=note)


def kernel(card: Card, seed: int, tokens: int) -> Mapping[str, float]:
    """What the kernel alone takes over as many tokens."""
    cache = Cache(card, *random(card, seed, 1, tokens), seed)
    return card.time({"kernel": Decoding(card, cache, asking(card, seed, [cache.loaded(0)[0]]))})


class Model:
    """A session over random keys and values of each layer, which are kept to know what is right."""

    def __init__(self, card: Card, session: Session, k: torch.Tensor, v: torch.Tensor, seed: int) -> None:
        self._card, self._session, self._seed = card, session, seed
        self._kv = [[k[layer], v[layer]] for layer in range(len(k))]

    def inputs(self, place: str, number: int) -> list[tuple[torch.Tensor, ...]]:
        """q, k and v of a step for each layer."""
        seed, card = self._seed + 7 * number, self._card
        k, v = random(card, seed + 1, len(self._kv), 1)
        q = asking(card, seed, [keys for keys, _ in self._kv])[:, :, None]
        return [tuple(x.cpu() if place == "in main memory" else x for x in own) for own in zip(q, k, v, strict=True)]

    def step(self, inputs: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        """A token in every layer, and its answers."""
        return [self._session.attend(layer, *own, retrieval=kvdb.Exact()) for layer, own in enumerate(inputs)]

    def checked(self, what: str, place: str, steps: int) -> tuple[float, float]:
        """Take steps. Returns the largest relative error, and the share of the steps that waited for the card. Raises Wrong."""
        errors, waited = [], 0
        for number in range(steps):
            inputs = self.inputs(place, number)
            with noticing(self._card) as found:
                outs = self.step(inputs)
            waited += bool(found)
            for layer, ((q, k, v), out) in enumerate(zip(inputs, outs, strict=True)):
                device, kept = self._card.device, self._kv[layer]
                kept[:] = [torch.cat([old, new.to(device)], 1) for old, new in zip(kept, (k, v), strict=True)]
                if number % 8 == 7 or number < 2:
                    truth = reference.attention(q[:, 0].to(device), *kept, q.shape[-1] ** -0.5)
                    errors.append(reference.check(f"{what}, layer {layer}", out[:, 0].to(device), None, truth))
        return max(errors), waited / steps


@contextmanager
def noticing(card: Card) -> Iterator[list[str]]:
    """Notice what makes the host wait for the card, or copies from it; nothing without one."""
    found: list[str] = []
    if card.interpreted:
        yield found
        return
    torch.cuda.synchronize()
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=both) as profile:
        yield found
    names = [event.key for event in profile.key_averages()]
    found += [name for name in names if "DtoH" in name or name in {"cudaStreamSynchronize", "cudaEventSynchronize"}]


@contextmanager
def opened(card: Card, layers: int, tokens: int, seed: int) -> Iterator[Model]:
    """A session over so many tokens of a model, all of which lie on the card too."""
    sizes = card.sizes
    spec = kvdb.ModelSpec("benchmark", layers, sizes.q_heads, sizes.kv_heads, sizes.head_dim)
    slot = SlotLayout.of(BlockLayout.of(spec.shape(0), sizes.block_size)).nbytes
    room = layers * -(-(tokens + MORE_TOKENS) // sizes.block_size) * slot
    device = "interpreter" if card.interpreted else "cuda"
    storage = StorageConfig(block_size=sizes.block_size, gpu_bytes_max=2 * room, gpu_device=device)
    database = Database(Config(storage=storage, optimizer=OptimizerConfig(machine_file="")))
    k, v = random(card, seed, layers, tokens)
    ids = np.arange(tokens)
    with Client(database) as client:
        client.import_context(spec, ids, ((k[i].cpu(), v[i].cpu()) for i in range(layers)), name="context")
        assert database.gpu is not None
        if card.interpreted:
            database.gpu.machine = ANY
        with client.create_session(spec, ids) as session:
            session.explain(0)  # a plan asks for copies
            database.gpu.mirrors.wait_idle()
            yield Model(card, session, k, v, seed)
