"""The documents that a RAG engine holds. They go when they expire, or when there is no room for them."""

import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import kvdb
from kvdb.errors import AlreadyExists, CapacityError, InvalidArgument, NotFound

Clock = Callable[[], float]
"""A clock: seconds since any fixed moment."""

CHUNK_NAME = re.compile(r"(?P<id>.+)/(?P<number>\d+)of(?P<total>\d+)(?:\.r(?P<revision>\d+))?", re.DOTALL)


@dataclass(frozen=True, eq=False)
class Chunk:
    """A stored chunk. text: equal for chunks of one text, which is stored once."""

    context: kvdb.Context
    text: str


@dataclass(eq=False)
class Document:
    """A document with its chunks. added, expires: times of the clock; expires is None for never. revision: the number of
    documents that had this id before, and may still be there. used: the number of answers that used it. readers: the number of
    answers under way that hold it, so that its chunks stay. resident: whether it is in memory."""

    id: str
    pinned: bool = False
    chunks: list[Chunk] = field(default_factory=list)
    revision: int = 0
    added: float = 0.0
    expires: float | None = None
    used: int = 0
    readers: int = 0
    resident: bool = True


@dataclass(frozen=True)
class DocumentInfo:
    """A description of a document. nbytes: the bytes of its chunks' blocks; blocks shared with other documents count in full.
    age_seconds: the time since it was added. expires_seconds: the time until it is dropped, None for never. used: the number of
    answers that used it."""

    id: str
    tokens: int
    chunks: int
    nbytes: int
    age_seconds: float
    expires_seconds: float | None
    pinned: bool
    used: int
    resident: bool


class Documents:
    """The documents by their ids. Thread-safe. Their chunks are contexts of the database, named "<namespace>/<id>/1of3" and so
    on.

    memory_bytes: the most bytes that all of them may take, where shared text counts once; None for no limit. When that is too
    little, the least recently used document that is not pinned goes first: it is dropped or, with `offload`, written to disk,
    from where the next answer that names it brings it back. A dropped document that an answer holds can no longer be named, and
    its memory is freed when the answer ends.
    """

    def __init__(self, db: kvdb.Client, namespace: str, memory_bytes: int | None, clock: Clock, *, offload: bool = False) -> None:
        if memory_bytes is not None and memory_bytes < 1:
            raise InvalidArgument(f"memory_bytes is {memory_bytes}; expected at least 1, or None for no bound")
        self._db = db
        self._namespace = namespace
        self._memory_bytes = memory_bytes
        self._clock = clock
        self._offload = offload
        self._lock = RLock()
        self._held: dict[str, Document] = {}  # in the order of their last use
        self._coming: set[str] = set()
        self._leaving: list[Document] = []
        self._left_over: dict[str, list[str]] = {}

    def adopt(self, spec: kvdb.ModelSpec) -> None:
        """Find the documents that an earlier engine of the same model has left in the database; none of them expires or is
        pinned."""
        stored: dict[tuple[str, int, int], list[tuple[int, kvdb.Context]]] = {}
        for context in self._db.contexts():
            name = CHUNK_NAME.fullmatch(context.name.removeprefix(f"{self._namespace}/"))
            if name is None or not context.name.startswith(f"{self._namespace}/"):
                continue
            if context.spec == spec and context.info.chunk:
                whole = (name["id"], int(name["revision"] or 0), int(name["total"]))
                stored.setdefault(whole, []).append((int(name["number"]), context))
            else:
                self._left_over.setdefault(name["id"], []).append(context.name)
        now = self._clock()
        for (doc_id, revision, total), numbered in sorted(stored.items(), key=lambda item: item[0]):
            if len(numbered) < total:  # adding it was cut short
                self._left_over.setdefault(doc_id, []).extend(context.name for _, context in numbered)
                continue
            before = self._held.pop(doc_id, None)  # it was being replaced
            if before is not None:
                self._left_over.setdefault(doc_id, []).extend(chunk.context.name for chunk in before.chunks)
            ordered = sorted(numbered, key=lambda pair: pair[0])
            chunks = [Chunk(context, context.name) for _, context in ordered]
            self._held[doc_id] = Document(doc_id, chunks=chunks, revision=revision, added=now)

    @contextmanager
    def coming(self, new: Document, nbytes: Mapping[str, int], *, replace: bool) -> Iterator[None]:
        """Reserve a document's id while it is being added, and make room: nbytes says about how many bytes each of its texts
        takes.

        Raises AlreadyExists for an id that is taken, CapacityError where there can be no room.
        """
        with self._lock:
            if new.id in self._coming or (new.id in self._held and not replace):
                raise AlreadyExists(f"there is a document {new.id!r}; take another id, delete it first, or pass replace=True")
            for name in self._left_over.pop(new.id, []):
                self._drop(name)
            self._check_room(new.id, nbytes)
            self._make_room({new.id}, nbytes)
            self._coming.add(new.id)
            namesakes = [d for d in (*self._held.values(), *self._leaving) if d.id == new.id]
            new.revision = 1 + max((d.revision for d in namesakes), default=-1)
        try:
            yield
        finally:
            with self._lock:
                self._coming.discard(new.id)

    def name(self, new: Document, number: int, total: int) -> str:
        """The name of the context of one of its chunks."""
        revision = f".r{new.revision}" if new.revision else ""
        return f"{self._namespace}/{new.id}/{number}of{total}{revision}"

    def put(self, new: Document, ttl: float | None) -> DocumentInfo:
        """Hold a complete document; the document that had its id before goes. Raises CapacityError where there is no room."""
        with self._lock:
            self._check_room(new.id, _sizes([new]))
            self._make_room({new.id}, _sizes([new]))
            now = self._clock()
            new.added, new.expires = now, None if ttl is None else now + ttl
            before = self._held.pop(new.id, None)
            self._held[new.id] = new
            if before is not None:
                self._let_go(before)
            return _info(new, now)

    def discard(self, chunks: Iterable[Chunk]) -> None:
        """Drop the chunks of a document that was not added after all."""
        for chunk in chunks:
            self._drop(chunk.context.name)

    @contextmanager
    def read(self, ids: Sequence[str]) -> Iterator[list[Document]]:
        """The documents of these ids, in this order, for an answer. Raises NotFound, naming the first that is not there."""
        with self._lock:
            documents = [self._get(doc_id) for doc_id in ids]
            once = list({id(document): document for document in documents}.values())
            for document in once:
                document.readers += 1
                document.used += 1
                document.resident = True
                self._held[document.id] = self._held.pop(document.id)
        try:
            if self._offload:
                with self._lock:
                    self._make_room({document.id for document in once}, _sizes(once))
            yield documents
        finally:
            with self._lock:
                for document in once:
                    document.readers -= 1
                    if document in self._leaving and not document.readers:
                        self._leaving.remove(document)
                        self.discard(document.chunks)

    def delete(self, doc_id: str) -> None:
        """Raises NotFound."""
        with self._lock:
            self._get(doc_id)
            self._let_go(self._held.pop(doc_id))

    def pin(self, doc_id: str, *, pinned: bool) -> None:
        """Raises NotFound."""
        with self._lock:
            self._get(doc_id).pinned = pinned

    def expire(self) -> None:
        """Drop every document whose time is over, also pinned ones."""
        with self._lock:
            now = self._clock()
            for document in [d for d in self._held.values() if d.expires is not None and d.expires <= now]:
                self._let_go(self._held.pop(document.id))

    def infos(self) -> list[DocumentInfo]:
        """A description of every document, in the order of their ids."""
        with self._lock:
            now = self._clock()
            return [_info(self._held[doc_id], now) for doc_id in sorted(self._held)]

    @property
    def nbytes(self) -> int:
        """The bytes of all documents, text that several share counted once."""
        with self._lock:
            return sum(_sizes(self._held.values()).values())

    def _check_room(self, doc_id: str, nbytes: Mapping[str, int]) -> None:
        """Raises CapacityError where a document with texts of these sizes would not fit beside what is pinned."""
        pinned = [document for document in self._held.values() if document.pinned and document.id != doc_id]
        least = sum({**nbytes, **_sizes(pinned)}.values())
        if self._memory_bytes is not None and least > self._memory_bytes:
            raise CapacityError(
                f"document {doc_id!r} and what is pinned take {least:,} bytes; memory_bytes is {self._memory_bytes:,}, so unpin "
                "or delete documents, or raise it"
            )

    def _make_room(self, staying: Collection[str], nbytes: Mapping[str, int]) -> None:
        """Drop other documents until texts of these sizes fit, or nothing else can go; the documents of an answer have to be in
        memory together."""
        if self._memory_bytes is None:
            return
        others = [document for document in self._held.values() if document.resident and document.id not in staying]
        going = deque(document for document in others if not document.pinned)
        while going and sum({**nbytes, **_sizes(others)}.values()) > self._memory_bytes:
            oldest = going.popleft()
            others.remove(oldest)
            if self._offload:
                for chunk in oldest.chunks:
                    self._db.offload(chunk.context.name)
                oldest.resident = False
            else:
                self._let_go(self._held.pop(oldest.id))

    def _get(self, doc_id: str) -> Document:
        try:
            return self._held[doc_id]
        except KeyError:
            raise NotFound(
                f"there is no document {doc_id!r}: it was never added, was deleted, has expired, or was dropped for room; add it"
            ) from None

    def _let_go(self, document: Document) -> None:
        """Drop it from the database, now or when the last answer that holds it ends."""
        if document.readers:
            self._leaving.append(document)
        else:
            self.discard(document.chunks)

    def _drop(self, name: str) -> None:
        with suppress(NotFound):  # somebody else has dropped it
            self._db.drop(name)


def check_id(doc_id: Any) -> None:
    """Raises InvalidArgument unless the value can be a document's id."""
    if not isinstance(doc_id, str) or not doc_id:
        raise InvalidArgument(f"a document's id is {doc_id!r}; expected a string that is not empty")


def check_ttl(ttl: float | None) -> None:
    """Raises InvalidArgument unless the value can be a time to live."""
    if ttl is not None and (isinstance(ttl, bool) or not math.isfinite(ttl) or ttl <= 0):
        raise InvalidArgument(f"ttl is {ttl!r}; expected seconds above 0, or None for a document that stays")


def _sizes(documents: Iterable[Document]) -> dict[str, int]:
    """The bytes of each text in these documents."""
    return {chunk.text: chunk.context.info.nbytes for document in documents for chunk in document.chunks}


def _info(document: Document, now: float) -> DocumentInfo:
    return DocumentInfo(
        id=document.id,
        tokens=sum(chunk.context.tokens for chunk in document.chunks),
        chunks=len(document.chunks),
        nbytes=sum(chunk.context.info.nbytes for chunk in document.chunks),
        age_seconds=now - document.added,
        expires_seconds=None if document.expires is None else document.expires - now,
        pinned=document.pinned,
        used=document.used,
        resident=document.resident,
    )
