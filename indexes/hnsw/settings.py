"""How a graph is built, and how it is walked."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """links: M of HNSW; a key has up to 2 * links of them. spare: room for links that sample queries and added tokens ask for.
    width: efConstruction. neighbours: nearest keys of a sample query that are linked. random: tokens drawn at random, where walks
    begin and which stand for all others in estimates. starts: tokens where walks begin, token 0 and some that samples want.

    slack: how far beyond the range a walk goes, in betas. patience: steps that a query head may go outside of its range without
    coming closer. least: of the paper's form, candidates that are expanded whatever their score. dense: a query that, by the
    random tokens, wants more than this share of what it sees is not worth a walk. budget: nor is the rest of a walk that has met
    this share, if that is more than 2,048 tokens; as many cost about a sixth of reading all keys and values.
    """

    links: int = 12
    spare: int = 8
    width: int = 64
    neighbours: int = 100
    random: int = 512
    starts: int = 256
    slack: float = 0.0
    patience: int = 16
    least: int = 64
    dense: float = 1 / 128
    budget: float = 1 / 64

    @property
    def degree(self) -> int:
        return 2 * self.links + self.spare
