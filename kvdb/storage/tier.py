"""What a place that holds blocks can do: the CPU tier now, GPU, disk and remote beside it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvdb.types import Addresses, TierStats

Blocks = npt.NDArray[np.int64]


class Tier(Protocol):
    """Fixed slots of `block_nbytes`, named by physical block numbers. Every block has one owner or several that share it."""

    name: str
    block_nbytes: int

    def allocate(self, count: int) -> Blocks:
        """`count` blocks with one reference each. Raises CapacityError, and then takes none."""
        ...

    def retain(self, blocks: Blocks) -> None:
        """One more reference to each of the (distinct) blocks."""
        ...

    def release(self, blocks: Blocks) -> None:
        """One reference less to each of the (distinct) blocks; those without any are free again."""
        ...

    def pin(self, blocks: Blocks) -> None:
        """Forbid moving these blocks to another tier until `unpin`."""
        ...

    def unpin(self, blocks: Blocks) -> None: ...

    def shared(self, block: int) -> bool:
        """Whether the block has more than one owner, so that it must be copied before it is written."""
        ...

    def addresses(self, blocks: Blocks) -> Addresses:
        """Where each block begins in memory, for the kernels."""
        ...

    def stats(self) -> TierStats: ...

    def check_integrity(self, owned: Sequence[Blocks] | None = None) -> None:
        """Prove that free + used == total and that no block is both free and used; with the blocks of every owner given,
        that each block has as many references as owners. Raises IntegrityError."""
        ...

    def close(self) -> None:
        """Give all memory back. Nothing may be used afterwards."""
        ...
