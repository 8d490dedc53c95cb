"""How fast does the card copy its own memory? The yardstick of everything else: bytes read and written."""

from __future__ import annotations

import torch

from benchmarks.gpu.card import Card
from benchmarks.gpu.results import Results, Wrong

SMALL_BYTES = 1 << 20
COPIED_BYTES = 4 << 30


def run(card: Card, results: Results, seed: int) -> None:
    nbytes = SMALL_BYTES if card.small or not card.room_for(3 * COPIED_BYTES) else COPIED_BYTES
    copying = Copying(card, nbytes)
    copying.source.random_(generator=card.generator(seed))
    copying()
    if not torch.equal(copying.source, copying.target):
        raise Wrong("a copy is not what was copied")
    times = card.time({"copy": copying})
    results.add("", "torch copy", **copying.speed(times), note=f"{nbytes >> 20} MiB read and as many written")


class Copying:
    """A copy of so many bytes within the card."""

    def __init__(self, card: Card, nbytes: int = COPIED_BYTES) -> None:
        self.source = torch.zeros(nbytes, dtype=torch.uint8, device=card.device)
        self.target = torch.full_like(self.source, 0xFF)

    def __call__(self) -> None:
        self.target.copy_(self.source)

    def speed(self, times: dict[str, float]) -> dict[str, object]:
        """ms and gb_s; nothing where nothing was timed."""
        return {"ms": times["copy"], "gb_s": self.gb_s(times)} if times else {}

    def gb_s(self, times: dict[str, float]) -> float:
        return 2 * self.source.numel() / times["copy"] / 1e6
