"""How many blocks must be held for what is named: the yardstick of the space that a database takes."""

from collections.abc import Iterable, Sequence

from kvdb.catalog.contexts.prefix_tree import common_prefix
from kvdb.types import Tokens


def run_lengths(texts: Iterable[Tokens]) -> list[int]:
    """The lengths of all runs of a trie of these texts, int32 `[n]` each: stretches of tokens, each after the same tokens, along
    which it does not branch. Each token that follows the same tokens is counted once."""
    ordered = [text for _, text in sorted((text.astype(">i4").tobytes(), text) for text in _distinct(texts))]
    lengths: list[int] = []
    branches = [0]  # where the path to the last text branches, ascending, and where it ends
    before: Tokens | None = None
    for text in ordered:
        common = 0 if before is None else common_prefix(before, text)
        if before is not None and common == len(before):  # the text goes on where the one before it ends
            branches.pop()
        else:
            _climb(branches, common, lengths)
        branches.append(len(text))
        before = text
    _climb(branches, 0, lengths)
    return lengths


def reachable_blocks(texts: Iterable[Tokens], block_size: int) -> int:
    """The least number of blocks of one layer that hold these texts, where no block is shared by two runs."""
    return sum(-(-length // block_size) for length in run_lengths(texts))


def _distinct(texts: Iterable[Tokens]) -> Sequence[Tokens]:
    return list({text.tobytes(): text for text in texts if len(text)}.values())


def _climb(branches: list[int], depth: int, lengths: list[int]) -> None:
    """Leave the path behind the first `depth` tokens, where the next text branches off, and note the runs that end with it."""
    if branches[-1] > depth and depth not in branches:
        branches.append(depth)
        branches.sort()
    while branches[-1] > depth:
        end = branches.pop()
        lengths.append(end - branches[-1])
