"""The settings of a graph: how it is built, and how it is walked."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The settings, all of which have defaults.

    links: M of HNSW; a key has up to 2 * M links. spare: room for more links, from sample queries and inserted tokens. width:
    efConstruction. neighbours: the number of a sample query's nearest keys that are linked. random: the number of tokens drawn at
    random, at which walks begin and which represent all others in estimates. starts: the number of other tokens at which walks
    begin: token 0, and some near to sample queries.

    slack: how far beyond the range a walk goes, in units of beta. patience: the number of steps that a query head may go outside
    of its range without coming closer. least: the number of candidates that the paper's form of the walk expands whatever their
    score. dense: a walk is not begun for a query that wants more than this share of the tokens it sees, judged by the random
    tokens. budget: a walk is broken off once it has met this share of the tokens, if that is more than 2,048 tokens; a walk of
    that length costs about a sixth of reading all keys and values.
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
        """The number of links that each key has room for."""
        return 2 * self.links + self.spare
