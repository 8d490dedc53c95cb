"""Which tokens a query needs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exact:
    """Every visible token: full attention, the oracle that stands behind the same call as every approximation."""

    def __str__(self) -> str:
        return "exact"


Retrieval = Exact
