"""The scores that a selector gave to the tokens of one layer, while they are in main memory."""

import numpy as np
import numpy.typing as npt

from kvdb.errors import InvalidArgument
from kvdb.selectors.base import Selector
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.budget import CpuBudget, Reservation
from kvdb.types import Addresses

Float16 = npt.NDArray[np.float16]
TOKENS_AT_ONCE = 4096
"""How many tokens a selector is shown in one call."""
FLOAT16_MAX = float(np.finfo(np.float16).max)


class TokenScores:
    """Scores of one layer, float16 `[kv_heads, n]`, whose bytes count in the budget until `release`. selector: its name."""

    def __init__(self, selector: str, values: Float16, budget: CpuBudget) -> None:
        """Raises CapacityError."""
        self.selector = selector
        self.values = values
        self._room = Reservation(budget, values.nbytes)

    def release(self) -> None:
        """They no longer count in the budget. Releasing twice does nothing."""
        self._room.release()


def scored(selector: Selector, layer: int, layout: BlockLayout, addresses: Addresses, tokens: int) -> Float16:
    """The scores of the first tokens of a run, which are those of a layer, float16 `[kv_heads, tokens]`. Raises InvalidArgument
    where the selector gives others."""
    scores = np.empty((layout.kv_heads, tokens), np.float16)
    for start in range(0, tokens, TOKENS_AT_ONCE):
        n = min(TOKENS_AT_ONCE, tokens - start)
        given = selector.scores(layer, *layout.read(addresses, start, n))
        if given.shape != (layout.kv_heads, n) or np.isnan(given).any():
            raise InvalidArgument(
                f"the selector {selector.name!r} gave {given.shape} scores to {layout.kv_heads} KV heads of {n} tokens, or NaN; "
                "expected a number for each"
            )
        scores[:, start : start + n] = np.clip(given, -FLOAT16_MAX, FLOAT16_MAX)
    return scores
