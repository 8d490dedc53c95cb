"""Snapshots of a model's states at positions of a segment, and their files, `N.P.states` beside `N.segment`.

A recurrent layer keeps no token: what a prefix needs of it is one snapshot at exactly its length. A segment has a few, each of
all such layers. They are in main memory until the segment has a file, and beside that from then on.

Layout of a file, little-endian: length of the text that follows, uint32; the text, JSON in UTF-8: the version, the key of the
segment's file, the position, and of each array the layer, the name, the dtype and the shape; then the arrays, one behind the
other; last the CRC-32C of everything before, uint32. A file with any fault is dropped, and the prefix is reusable no further.
"""

import json
import logging
import math
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from threading import Lock

import numpy as np

from kvdb.errors import IntegrityError, KvdbError
from kvdb.storage.budget import CpuBudget, Reservation
from kvdb.storage.disk import DiskTier
from kvdb.storage.segment_head import checksum
from kvdb.storage.stored_segment import StoredSegment
from kvdb.types import STATE_DTYPES, Array

log = logging.getLogger(__name__)
SUFFIX = re.compile(r"\.([0-9]+)\.states")
VERSION = 1
NUMBER = struct.Struct("<I")
SNAPSHOTS_MAX = 8
"""The most snapshots that a segment or a session keeps."""

StateSnapshot = Mapping[int, Mapping[str, Array]]
"""The states of all layers that keep one, by the layer's number and the array's name."""


class SegmentStates:
    """The snapshots of one segment. A position is how many of its tokens they are of. Thread-safe."""

    __slots__ = ("_budget", "_held", "_lock", "_place", "_reservations")

    def __init__(self, budget: CpuBudget | None = None) -> None:
        """budget: of main memory, None where nothing is ever put."""
        self._held: dict[int, StateSnapshot] = {}
        self._reservations: dict[int, Reservation] = {}
        self._budget = budget
        self._place: tuple[DiskTier, StoredSegment] | None = None
        self._lock = Lock()

    @property
    def positions(self) -> tuple[int, ...]:
        """Those of all snapshots, ascending."""
        with self._lock:
            return tuple(sorted({*self._held, *self._stored()}))

    @property
    def nbytes(self) -> int:
        """The bytes of those in main memory."""
        with self._lock:
            return sum(nbytes_of(snapshot) for snapshot in self._held.values())

    def put(self, position: int, snapshot: StateSnapshot) -> None:
        """Keep a snapshot, in place of one of the same position, and not those of which there are too many. Raises CapacityError,
        or Unavailable where a file cannot be written; then it is not kept."""
        assert self._budget is not None
        reservation = Reservation(self._budget, nbytes_of(snapshot))
        with self._lock:
            self._drop(position)
            self._held[position], self._reservations[position] = snapshot, reservation
            for surplus in surplus_of({*self._held, *self._stored()}):
                self._drop(surplus)
                self._remove_file(surplus)
            if self._place is not None and position in self._held:
                with ExitStack() as undo:
                    undo.callback(self._drop, position)
                    self._write(position)
                    undo.pop_all()

    def get(self, position: int) -> StateSnapshot:
        """The snapshot at one of the positions. Raises IntegrityError or Unavailable where its file cannot be read, which is
        dropped if it is damaged."""
        with self._lock:
            held = self._held.get(position)
            if held is not None or self._place is None:
                assert held is not None
                return held
            disk, segment = self._place
            content = disk.read_beside(segment, _suffix(position))
            try:
                if content is None:
                    raise ValueError("it is gone")
                return unpack(segment.contents.key, position, content)
            except (ValueError, KeyError, TypeError, struct.error, OverflowError) as error:
                disk.remove_beside(segment, _suffix(position))
                raise IntegrityError(f"the states at {position} of {segment.place} cannot be used: {error}") from None

    def all(self) -> Iterator[tuple[int, StateSnapshot]]:
        """Every snapshot that can be read, with its position."""
        for position in self.positions:
            with suppress(KvdbError):
                yield position, self.get(position)

    def put_away(self, disk: DiskTier, segment: StoredSegment) -> None:
        """Keep them beside the segment, which is stored from now on. Those in memory stay there, too. What cannot be written is
        in memory alone, with a line in the log."""
        with self._lock:
            self._place = disk, segment
            for position in list(self._held):
                try:
                    self._write(position)
                except KvdbError as error:
                    log.warning("states at %d of %s stay in main memory alone: %s", position, segment.place, error)

    def evict(self) -> None:
        """Forget those in main memory that are beside the segment."""
        with self._lock:
            for position in self._stored():
                self._drop(position)

    def release(self) -> None:
        """Forget all that are in main memory."""
        with self._lock:
            for position in list(self._held):
                self._drop(position)

    def _stored(self) -> set[int]:
        if self._place is None:
            return set()
        matched = (SUFFIX.fullmatch(suffix) for suffix in self._place[0].kept_beside(self._place[1]))
        return {int(one[1]) for one in matched if one is not None}

    def _drop(self, position: int) -> None:
        if self._held.pop(position, None) is not None:
            self._reservations.pop(position).release()

    def _remove_file(self, position: int) -> None:
        if self._place is not None:
            self._place[0].remove_beside(self._place[1], _suffix(position))

    def _write(self, position: int) -> None:
        assert self._place is not None
        disk, segment = self._place
        disk.write_beside(segment, _suffix(position), pack(segment.contents.key, position, self._held[position]))


def surplus_of(positions: Collection[int], most: int = SNAPSHOTS_MAX) -> list[int]:
    """The positions of snapshots that go, so that at most so many stay: never the last, and of the others again and again the one
    that lies nearest to the one before it, for how far it is from the last. So they are the fewer, the older they are."""
    left, gone = sorted(positions), []
    while len(left) > most:
        last = left[-1]
        gaps = [(left[i] - (left[i - 1] if i else 0)) / (last - left[i] + 1) for i in range(len(left) - 1)]
        gone.append(left.pop(int(np.argmin(gaps))))
    return gone


def nbytes_of(snapshot: StateSnapshot) -> int:
    """The bytes of all arrays of a snapshot."""
    return sum(array.nbytes for arrays in snapshot.values() for array in arrays.values())


def pack(key: str, position: int, snapshot: StateSnapshot) -> bytes:
    """The contents of a file. key: of the segment's."""
    named = {dtype: name for name, dtype in STATE_DTYPES.items()}
    arrays = [(layer, name, array) for layer, one in snapshot.items() for name, array in one.items()]
    listed = [(layer, name, named[array.dtype], array.shape) for layer, name, array in arrays]
    text = json.dumps({"version": VERSION, "key": key, "position": position, "arrays": listed}).encode()
    content = b"".join([NUMBER.pack(len(text)), text, *(np.ascontiguousarray(array).tobytes() for _, _, array in arrays)])
    return content + NUMBER.pack(checksum(content))


def unpack(key: str, position: int, content: bytes) -> StateSnapshot:
    """What `pack` packed. Raises ValueError, KeyError, TypeError, OverflowError or struct.error for anything else."""
    if len(content) < 2 * NUMBER.size or NUMBER.unpack_from(content, len(content) - NUMBER.size)[0] != checksum(
        content[: -NUMBER.size]
    ):
        raise ValueError("it does not match its checksum")
    at = NUMBER.size + NUMBER.unpack_from(content)[0]
    fields = json.loads(content[NUMBER.size : at])
    if (fields["version"], fields["key"], fields["position"]) != (VERSION, key, position):
        raise ValueError(f"it is of version {fields['version']!r}, of {fields['key']!r} at {fields['position']!r}")
    snapshot: dict[int, dict[str, Array]] = {}
    for layer, name, dtype, shape in fields["arrays"]:
        array = np.frombuffer(content, STATE_DTYPES[dtype], math.prod(shape), at).reshape(shape)
        snapshot.setdefault(int(layer), {})[str(name)] = array
        at += array.nbytes
    if at != len(content) - NUMBER.size:
        raise ValueError("its arrays are of another size")
    return snapshot


def _suffix(position: int) -> str:
    return f".{position}.states"
