"""The protocol of a place that holds blocks in slots, as the CPU and the GPU tier do."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvdb.types import Addresses, TierStats

Blocks = npt.NDArray[np.int64]


class Tier(Protocol):
    """Slots of `block_nbytes` bytes, named by physical block numbers. A block has one owner, or several that share it."""

    name: str
    block_nbytes: int

    def allocate(self, count: int, *, evict: bool = False) -> Blocks:
        """`count` blocks with one reference each. evict: whether contexts may go to make room, in tiers that hold them; then the
        caller has locked no segment and no catalogue. Raises CapacityError, and then takes none."""
        ...

    def make_room(self, count: int) -> None:
        """Have contexts go, in tiers that hold them, until `count` blocks could be taken; takes none. The caller has locked no
        segment and no catalogue. Raises CapacityError where not enough can go."""
        ...

    def retain(self, blocks: Blocks) -> None:
        """Add one reference to each of the (distinct) blocks."""
        ...

    def release(self, blocks: Blocks) -> None:
        """Drop one reference to each of the (distinct) blocks; those without any are free again."""
        ...

    def shared(self, block: int) -> bool:
        """Whether the block has more than one owner, so that it must be copied before it is written."""
        ...

    def addresses(self, blocks: Blocks) -> Addresses:
        """The address at which each block begins, uint64, for the kernels."""
        ...

    def stats(self) -> TierStats: ...

    def check_integrity(self, owned: Sequence[Blocks] | None = None) -> None:
        """Prove that free + used == total and that no block is both free and used. owned: the blocks of every owner; then also
        that each block has as many references as owners. Raises IntegrityError."""
        ...

    def close(self) -> None:
        """Give all memory back. Nothing may be used afterwards."""
        ...
