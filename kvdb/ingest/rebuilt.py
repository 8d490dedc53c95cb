"""Segments that are made of the tokens of others."""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import numpy as np

from kvdb.catalog.segments.segment import Segment
from kvdb.catalog.segments.stored_queries import StoredQueries
from kvdb.codecs.base import Rounding
from kvdb.errors import CapacityError
from kvdb.ingest.new_segment import NewSegment
from kvdb.storage.block_table import BlockTable
from kvdb.storage.store import BlockStore
from kvdb.storage.token_scores import Float16, TokenScores


class RebuiltPart(NamedTuple):
    """Tokens [start, stop) of a segment."""

    segment: Segment
    start: int
    stop: int

    @property
    def in_whole_blocks(self) -> bool:
        """Whether it begins and ends with blocks."""
        size = self.segment.tables[0].layout.block_size
        return self.start % size == 0 and self.stop % size == 0


def copyable(parts: Sequence[RebuiltPart]) -> bool:
    """Whether these parts, one behind the other, can lie in blocks of one format without being rounded again: quantized ones only
    where all of their blocks stay whole, but for the last; and none behind others that hold the end of a window alone."""
    first, *others = {part.segment.format for part in parts}
    *before, last = parts
    if any(part.segment.unseen for part in parts[1:]):  # what stands before would be lost
        return False
    whole = all(part.in_whole_blocks for part in before) and last.start % last.segment.tables[0].layout.block_size == 0
    return not others and (not first or whole)


def rebuilt(parts: Sequence[RebuiltPart], blocks: BlockStore, format: str | None = None) -> Segment:  # noqa: A002  # the field's name
    """A segment of these parts, one behind the other, which are copyable. Blocks are shared where they lie in both as they are.
    format: that they are to have, of parts as they came; None for that which they have. Raises CapacityError, also where one of
    them does not fit into main memory as a whole, and InvalidArgument for numbers that cannot be quantized."""
    for segment in [part.segment for part in parts if not part.segment.whole]:
        raise CapacityError(
            f"segment {segment.number} of {segment.nbytes:,} bytes cannot be laid out anew, as it does not fit into main "
            "memory as a whole; close sessions, or raise storage.cpu_bytes_max"
        )
    first, scores = parts[0], _joined_scores(parts)
    tables: list[BlockTable] = []
    with ExitStack() as undo:
        for number, like in enumerate(first.segment.tables):
            tables.append(like.empty())
            undo.callback(_release, tables, number)
            for part in parts:
                part.segment.wait(number)
                tables[-1].extend(part.segment.tables[number], part.start, part.stop)
            if scores is not None:
                with suppress(CapacityError):  # only the tokens must be kept
                    tables[-1].scores = TokenScores(scores[0], scores[1][number], blocks.budget)
            if format is not None:
                blocks.encode(tables, number, format)
        undo.pop_all()
    longest = max(parts, key=lambda part: part.stop - part.start).segment
    queries = StoredQueries.as_far_as_they_fit(blocks.budget, longest.indexes.queries)
    tokens = np.concatenate([part.segment.ids.unpack(part.start, part.stop) for part in parts])
    new = NewSegment(tokens, tables, first.segment.base + first.start, queries)
    segment = new.view(blocks.budget, standalone=first.segment.standalone and not first.start).segment
    offset = 0
    for part in parts:
        for position, snapshot in part.segment.states.all():
            if part.start < position <= part.stop:
                with suppress(CapacityError):  # the prefix is reusable up to another one then
                    segment.states.put(offset + position - part.start, snapshot)
        offset += part.stop - part.start
    if format is None:
        segment.rounding = Rounding.of_all([part.segment.rounding for part in parts])  # of all of their tokens
    return segment


def _joined_scores(parts: Sequence[RebuiltPart]) -> tuple[str, Float16] | None:
    """The name of the selector that scored all of these parts, and their scores, `[layers, kv_heads, tokens]`; None where none
    did."""
    found = [part.segment.scores.read(part.segment.place) for part in parts]
    known = [one for one in found if one is not None]
    if len(known) < len(parts) or len({selector for selector, _ in known}) > 1:
        return None
    cut = [values[..., part.start : part.stop] for (_, values), part in zip(known, parts, strict=True)]
    return known[0][0], np.concatenate(cut, axis=-1)


def _release(tables: list[BlockTable], number: int) -> None:
    tables[number].release()
