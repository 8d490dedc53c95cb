"""What a durable catalogue keeps of specs, segments and contexts: values, their rows, and the rows' checksums."""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

import kvdb.codecs.registry as codecs
from kvdb.catalog.contexts.life import Life
from kvdb.catalog.segments.packed_ids import PackedIds
from kvdb.codecs.base import Rounding
from kvdb.errors import KvdbError
from kvdb.types import ModelSpec, Tokens

R = TypeVar("R")
Row = tuple[str | int | float | bytes | None, ...]
"""The columns of a row, its key first; in the file its checksum stands behind them."""


class SpecRecord(NamedTuple):
    """A model's spec, by its digest."""

    digest: str
    spec: ModelSpec

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        return cls(spec.digest, spec)

    @classmethod
    def from_row(cls, digest: str, fields: str) -> Self:
        spec = ModelSpec.from_dict(json.loads(fields))
        if spec.digest != digest:
            raise ValueError(f"the spec of {digest} has the digest {spec.digest}")
        return cls(digest, spec)

    def row(self) -> Row:
        return self.digest, json.dumps(self.spec.to_dict(), sort_keys=True)


class SegmentRecord(NamedTuple):
    """What is kept of a segment beside what is stored. file: its key. spec: the digest of its model's spec. format: of its
    blocks, see `BlockLayout`. base, standalone, rounding: see `Segment`. digest: what must be stored under it, see
    `StoredSegment`."""

    file: str
    spec: str
    block_size: int
    base: int
    standalone: bool
    ids: PackedIds
    format: str = ""
    rounding: Rounding = Rounding.of_all(())
    digest: str = ""

    @classmethod
    def from_row(cls, file: str, spec: str, block_size: int, base: int, standalone: int, *rest: Any) -> Self:
        """rest: the tokens, from version 2 on format and rounding, and from version 3 on the digest."""
        older = "", "[0, 0, 0, 0]", ""
        tokens, format, rounding, digest = rest + older[len(rest) - 1 :]  # noqa: A001  # the field's name
        ids = PackedIds.from_bytes(tokens) if len(rest) > 1 else PackedIds(_ids(tokens))
        if format not in codecs.CODECS:
            raise ValueError(f"the format {format!r} is not known")
        return cls(file, spec, block_size, base, bool(standalone), ids, format, Rounding(*json.loads(rounding)), digest)

    def row(self) -> Row:
        return *self[:4], int(self.standalone), self.ids.to_bytes(), self.format, json.dumps(self.rounding), self.digest


class ViewRecord(NamedTuple):
    """A view of the segment with that key; see `SegmentView`."""

    file: str
    visible: int
    shift: int


class OverlayRecord(NamedTuple):
    """What is kept of a context's recomputed tokens beside what is stored: its key, "" for no tokens, what it must hold, and
    their positions by layer."""

    file: str
    block_size: int
    positions: tuple[Tokens, ...]
    digest: str = ""

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        head, _, rest = content.partition(b"\n")
        file, block_size, rows, *digest = json.loads(head)
        ends = np.cumsum(rows)
        if not isinstance(file, str) or len(rest) != 4 * (ends[-1] if len(rows) else 0):
            raise ValueError("the record of an overlay has another length")
        return cls(file, block_size, tuple(np.split(_ids(rest), ends[:-1])), *digest)

    def to_bytes(self) -> bytes:
        kept = [self.file, self.block_size, [len(positions) for positions in self.positions]]
        head = json.dumps([*kept, self.digest] if self.digest else kept)  # older rows have none
        return b"".join([head.encode(), b"\n", *map(_bytes, self.positions)])


class ContextRecord(NamedTuple):
    """What is kept of a context and never changes but for its name. tokens: None where its views show all of them. salt: what a
    lookup must say beside the tokens. overlay: None for a context that is no blend. The rest: see `Layout`."""

    name: str
    spec: str
    length: int
    prefix_end: int
    views: tuple[ViewRecord, ...]
    tokens: Tokens | None
    salt: str = ""
    overlay: OverlayRecord | None = None

    @classmethod
    def from_row(cls, name: str, spec: str, length: int, prefix_end: int, views: str, *rest: Any) -> Self:
        """rest: the tokens, and from version 2 on salt and overlay."""
        tokens, salt, overlay = rest if len(rest) > 1 else (*rest, "", None)
        listed = tuple(ViewRecord(*view) for view in json.loads(views))
        ids = None if tokens is None else _ids(tokens)
        recomputed = None if overlay is None else OverlayRecord.from_bytes(overlay)
        return cls(name, spec, length, prefix_end, listed, ids, salt, recomputed)

    def row(self) -> Row:
        ids = None if self.tokens is None else _bytes(self.tokens)
        overlay = None if self.overlay is None else self.overlay.to_bytes()
        return *self[:4], json.dumps(self.views), ids, self.salt, overlay


class LifeRecord(NamedTuple):
    """What changes of a context while it is stored."""

    name: str
    life: Life

    @classmethod
    def from_row(
        cls, name: str, pinned: int, expires: float | None, metadata: str, created: float, used: float, uses: int
    ) -> Self:
        noted, shared_with = json.loads(metadata), []
        if isinstance(noted, list):
            noted, shared_with = noted
        return cls(name, Life(bool(pinned), expires, noted, created, used, uses, tuple(shared_with)))

    def row(self) -> Row:
        life = self.life
        noted: Any = dict(life.metadata)
        if life.shared_with:
            noted = [noted, life.shared_with]  # the table is older than these
        noted = json.dumps(noted, sort_keys=True)
        return self.name, int(life.pinned), life.expires, noted, life.created, life.used, life.uses


@dataclass(frozen=True)
class Records:
    """Everything in a catalogue that is as it was written. lives: by the names of contexts. damaged: the names of the other
    contexts. whole: whether every row that was written is here, but for those of lives."""

    specs: dict[str, ModelSpec]
    segments: dict[str, SegmentRecord]
    contexts: list[ContextRecord]
    lives: dict[str, Life]
    damaged: list[str]
    whole: bool


def checksum(row: Row) -> int:
    """The CRC-32 of a row's values, each with its type and length."""
    total = 0
    for value in row:
        content = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        total = zlib.crc32(content, zlib.crc32(f"{type(value).__name__} {len(content)} ".encode(), total))
    return total


def parse(from_row: Callable[..., R], row: Row, found: object) -> R | None:
    """The record of a row whose checksum was found to be `found`; None where it is not as it was written."""
    try:
        return from_row(*row) if checksum(row) == found else None
    except (KvdbError, ValueError, TypeError):
        return None


def _bytes(ids: Tokens) -> bytes:
    return ids.astype("<i4").tobytes()


def _ids(content: bytes) -> Tokens:
    return np.frombuffer(content, "<i4").astype(np.int32)
