"""What the optimizer returns: a frozen tree of access paths. `str(plan)` is EXPLAIN."""

from dataclasses import dataclass
from typing import Any

from indexes.retrieval import Retrieval


@dataclass(frozen=True)
class Access:
    """How one part is read. visible of stored tokens count. index: the kind that is searched, None where all is read."""

    part: str
    path: str
    tier: str
    visible: int
    stored: int
    nbytes: int
    index: str | None = None

    def __str__(self) -> str:
        tokens = (
            f"{self.visible:,} tokens" if self.visible == self.stored else f"visible {self.visible:,} of {self.stored:,} tokens"
        )
        return f"{self.path} on {self.part}  {self.tier}  {tokens}  {mebibytes(self.nbytes)}"


@dataclass(frozen=True)
class Refusal:
    """An earlier rule that did not fire, and why."""

    rule: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The way of one layer's queries. Good for contexts of [tokens_min, tokens_end) tokens, None for no end."""

    layer: int
    retrieval: Retrieval
    rule: str
    accesses: tuple[Access, ...]
    refusals: tuple[Refusal, ...]
    tokens_min: int = 0
    tokens_end: int | None = None

    @property
    def tokens(self) -> int:
        return sum(access.visible for access in self.accesses)

    @property
    def nbytes(self) -> int:
        return sum(access.nbytes for access in self.accesses)

    def holds_for(self, tokens: int) -> bool:
        """Whether the facts the plan depended on are still in their range."""
        return self.tokens_min <= tokens and (self.tokens_end is None or tokens < self.tokens_end)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for machines."""
        return {
            "layer": self.layer,
            "retrieval": str(self.retrieval),
            "rule": self.rule,
            "tokens": self.tokens,
            "nbytes": self.nbytes,
            "accesses": [
                {
                    "part": a.part,
                    "path": a.path,
                    "index": a.index,
                    "tier": a.tier,
                    "visible": a.visible,
                    "stored": a.stored,
                    "nbytes": a.nbytes,
                }
                for a in self.accesses
            ],
            "refusals": {r.rule: r.reason for r in self.refusals},
        }

    def __str__(self) -> str:
        parts = "1 part" if len(self.accesses) == 1 else f"{len(self.accesses)} parts"
        lines = [f"Attention  layer {self.layer}  retrieval {self.retrieval}  (rule: {self.rule})"]
        lines.append(f"└─ Merge  {parts}  {self.tokens:,} tokens  {mebibytes(self.nbytes)}")
        for i, access in enumerate(self.accesses):
            lines.append(f"   {'└' if i == len(self.accesses) - 1 else '├'}─ {access}")
        lines += [f"not taken: {r.rule} ({r.reason})" for r in self.refusals]
        return "\n".join(lines)


def mebibytes(nbytes: int) -> str:
    """A number of bytes, for people."""
    return f"{nbytes / (1 << 20):,.1f} MiB"
