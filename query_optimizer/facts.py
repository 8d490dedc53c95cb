"""What the optimizer sees of a query: numbers and names."""

from dataclasses import dataclass

from indexes.retrieval import Retrieval


@dataclass(frozen=True)
class IndexFacts:
    """An index that is built over a part. nbytes: what a search of it is expected to read."""

    kind: str
    nbytes: float


@dataclass(frozen=True)
class PartFacts:
    """One place that holds tokens. visible of `stored` tokens count; indexes: those built over it, with which `searchable` of
    the visible ones can be searched, the others belong to the window."""

    name: str
    visible: int
    stored: int
    tier: str
    indexes: tuple[IndexFacts, ...] = ()
    searchable: int = 0


@dataclass(frozen=True)
class Facts:
    """One query of one layer. new_tokens: how many of the last tokens ask. token_nbytes: K and V of one token, all KV heads.
    retrieval: what the caller asked for, None when the optimizer decides."""

    layer: int
    parts: tuple[PartFacts, ...]
    new_tokens: int
    token_nbytes: int
    retrieval: Retrieval | None = None

    @property
    def tokens(self) -> int:
        return sum(part.visible for part in self.parts)
