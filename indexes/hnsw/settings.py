"""The settings of a graph: how it is built, and how it is walked."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The settings, all of which have defaults.

    links: M of HNSW; a key has up to 2 * links of them. spare: room for links that sample queries and inserted tokens add.
    width: efConstruction. neighbours: nearest keys of a sample query that are linked. random: tokens drawn at random, where walks
    begin and which stand for all others in estimates. starts: tokens where walks begin: token 0 and some near to sample queries.

    slack: how far beyond the range a walk goes, in betas. patience: steps that a query head may go outside of its range without
    coming closer. least: candidates that the paper's form of the walk expands whatever their score. dense: a query that, by the
    random tokens, wants more than this share of what it sees is not worth a walk. budget: a walk is broken off once it has met
    this share of the tokens, if that is more than 2,048; as many cost about a sixth of reading all keys and values.
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
        """Places for links of each key."""
        return 2 * self.links + self.spare
