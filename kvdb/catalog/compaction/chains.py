"""Chains of segments, each the only one behind the one before it, and which of them should become one segment.

A chat that is stored turn by turn leaves a short segment for each turn, and contexts that were dropped leave the ends of segments
that nobody sees. Both take more blocks than the tokens need that contexts name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

from kvdb.catalog.compaction.relayout import Piece
from kvdb.catalog.contexts.prefix_tree import Place, PrefixTree, common_prefix, places
from kvdb.catalog.segments.segment import Segment
from kvdb.types import Tokens

WASTE_MAX, WASTE_GOAL = 1.1, 1.05
"""A chain that takes more than WASTE_MAX times its least blocks is laid out anew until it takes WASTE_GOAL times as many. So
long segments, with what is known of them, stay as they are while short ones come behind them."""
PIECES_MIN, PIECE_BLOCKS = 4, 16
"""A chain has at most PIECES_MIN segments, and one more for each PIECE_BLOCKS blocks."""


class Chain(NamedTuple):
    """Segments one behind the other, as far as any context sees them, the first at `place`. Nothing else hangs between them."""

    place: Place
    pieces: tuple[Piece, ...]

    @property
    def segments(self) -> list[Segment]:
        return [piece.segment for piece in self.pieces]


class Twins(NamedTuple):
    """Segments one behind the other, the first at `place`, that begin with the same `common` tokens as another segment there: all
    of these pieces but the end of the last."""

    place: Place
    pieces: tuple[Piece, ...]
    other: Piece
    common: int

    @property
    def segments(self) -> list[Segment]:
        return [*(piece.segment for piece in self.pieces), self.other.segment]


def chains_along(tree: PrefixTree, tokens: Tokens) -> list[Chain]:
    """The chains that a text, int32 `[n]`, goes through, as far as it is stored."""
    chains: list[tuple[Place, list[Piece]]] = []
    end: Place | None = None  # where the last chain goes on, if it does
    for place, view in places(tree.match(tokens)):
        visible = tree.alike(place, view.segment.ids.first)[view.segment].visible
        if place != end:
            chains.append((place, []))
        chains[-1][1].append(Piece(view.segment, visible))
        end = _continued(tree, chains[-1][1][-1])
    while end is not None:
        chains[-1][1].append(_only_child(tree, end))
        end = _continued(tree, chains[-1][1][-1])
    return [Chain(place, tuple(pieces)) for place, pieces in chains]


def twins_along(tree: PrefixTree, tokens: Tokens) -> Twins | None:
    """Segments on the way of a text, or beside it, that hold what another one holds; None where every token is stored once."""
    for place, view in places(tree.match(tokens)):
        twins = _twins_at(tree, place, view.segment.ids.first) or _overlapping(tree, place, view.segment)
        if twins is not None:
            return twins
    return None


def _overlapping(tree: PrefixTree, place: Place, segment: Segment) -> Twins | None:
    """A segment and what hangs in its middle and begins like what follows there, if anybody sees both."""
    other = Piece(segment, tree.alike(place, segment.ids.first)[segment].visible)
    for at, token in tree.overlaps(segment).items():
        if at < other.length:
            child, contexts = next(iter(tree.alike((segment.number, at), token).items()))
            behind = Piece(child, contexts.visible)
            return _twins(tree, place, [Piece(segment, at), behind], _common(behind, other, at), other)
    return None


def _twins_at(tree: PrefixTree, place: Place, token: int) -> Twins | None:
    """The twins among the segments at a place that begin with a token: those behind them first, so that all that goes on like the
    longest goes over to it at once."""
    alike = tree.alike(place, token)
    if len(alike) < 2:
        return None
    first, other = sorted((Piece(segment, contexts.visible) for segment, contexts in alike.items()), key=_length)[-2:]
    return _twins(tree, place, [first], _common(first, other, 0), other)


def _twins(tree: PrefixTree, place: Place, pieces: list[Piece], within: int, other: Piece) -> Twins:
    """These pieces, and what goes on behind them like the other segment. within: how many tokens of the last piece the other one
    holds as well; it holds all of the pieces before."""
    common = sum(piece.length for piece in pieces[:-1]) + within
    while common < other.length:
        behind, following = (pieces[-1].segment.number, within), int(other.segment.ids.unpack(common, common + 1)[0])
        deeper = _twins_at(tree, behind, following)
        if deeper is not None:
            return deeper
        child = next((Piece(segment, contexts.visible) for segment, contexts in tree.alike(behind, following).items()), None)
        if child is None:
            break
        pieces[-1:] = [Piece(pieces[-1].segment, within), child]
        within = _common(child, other, common)
        common += within
    return Twins(place, tuple(pieces), other, common)


def _common(piece: Piece, other: Piece, start: int) -> int:
    """How many tokens of a piece are those of another one from `start` on."""
    return common_prefix(piece.segment.ids.unpack(0, piece.length), other.segment.ids.unpack(start, other.length))


def groups_of(pieces: Sequence[Piece], block_size: int) -> list[slice]:
    """The stretches of a chain that should each become one new segment, of what contexts see of it; none where little would be
    gained."""
    groups = [_Group(i, i + 1, piece.length, _blocks(len(piece.segment), block_size)) for i, piece in enumerate(pieces)]
    least = _blocks(sum(piece.length for piece in pieces), block_size)
    pieces_max = PIECES_MIN + least // PIECE_BLOCKS
    if len(groups) <= pieces_max and _held(groups) <= WASTE_MAX * least:
        return []
    for group in sorted(groups, key=lambda group: _blocks(group.tokens, block_size) - group.blocks):
        if _held(groups) > WASTE_GOAL * least:
            group.trim(block_size)
    while len(groups) > 1 and (len(groups) > pieces_max or _held(groups) > WASTE_GOAL * least):
        first, second = min(pairwise(groups), key=lambda pair: pair[0].tokens + pair[1].tokens)
        first.merge(second, block_size)
        groups.remove(second)
    return [slice(group.first, group.last) for group in groups if group.is_new]


@dataclass
class _Group:
    """Pieces [first, last) of a chain, the tokens of them that are seen, and the blocks that hold these."""

    first: int
    last: int
    tokens: int
    blocks: int
    is_new: bool = False

    def trim(self, block_size: int) -> None:
        least = _blocks(self.tokens, block_size)
        self.is_new |= least < self.blocks
        self.blocks = least

    def merge(self, other: "_Group", block_size: int) -> None:
        self.last, self.tokens, self.is_new = other.last, self.tokens + other.tokens, True
        self.blocks = _blocks(self.tokens, block_size)


def _continued(tree: PrefixTree, piece: Piece) -> Place | None:
    """The place behind a piece, if exactly one segment hangs there."""
    place = (piece.segment.number, piece.length)
    return place if len(list(islice(tree.children(place), 2))) == 1 else None


def _only_child(tree: PrefixTree, place: Place) -> Piece:
    ((segment, contexts),) = tree.children(place)
    return Piece(segment, contexts.visible)


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _held(groups: list[_Group]) -> int:
    return sum(group.blocks for group in groups)


def _length(piece: Piece) -> int:
    return piece.length
