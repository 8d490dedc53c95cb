"""How full the tiers are, as the metrics and the console tell it."""

from typing import NamedTuple

from kvdb.server.tenancy.tenants import AnyDatabase

PART_OF = {"paged": "cpu", "gpu tables": "gpu"}
"""Tiers of the engine that are in the memory of another, and under its limit."""


class TierUse(NamedTuple):
    """A tier, blocks of all sizes together. used: bytes of the blocks that hold KV. taken: bytes that it takes, with blocks that
    wait to be used. limit: the most that it may take, None for no limit."""

    name: str
    used: int
    taken: int
    limit: int | None


def tier_uses(database: AnyDatabase) -> list[TierUse]:
    """Each tier that was ever used."""
    limits = database.tier_limits()
    found: dict[str, TierUse] = {}
    for tier in database.tiers():
        name = PART_OF.get(tier.name, tier.name)
        so_far = found.get(name, TierUse(name, 0, 0, limits.get(name)))
        used, taken = so_far.used + tier.blocks_used * tier.block_nbytes, so_far.taken + tier.nbytes
        found[name] = so_far._replace(used=used, taken=taken)
    return list(found.values())
