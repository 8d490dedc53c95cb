"""What every selector does: it says how much each token is worth keeping, and drops none.

What is best stays in main memory; the rest lies on the disk, and is read when it is asked for.
"""

from typing import Protocol

from kvdb.types import Array, Float32


class Selector(Protocol):
    """Gives a score to each token of each layer and KV head of a segment, once, when it is imported or stored.

    name: in settings and in stores, so that it never changes.
    """

    @property
    def name(self) -> str: ...

    def scores(self, layer: int, k: Array, v: Array) -> Float32:
        """The scores of tokens of one layer that stand one behind the other, float32 `[kv_heads, n]`; higher is more worth
        keeping. They are kept as float16. k, v: `[kv_heads, n, head_dim]`, as the model computed them, some thousand tokens at a
        time."""
        ...
