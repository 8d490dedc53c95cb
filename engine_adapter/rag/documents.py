"""The documents of a RAG engine: chunks in the database, which alone knows what they are and how long they stay."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import kvdb
from engine_adapter.rag.document import OWN, Document, DocumentInfo, NewDocument, is_chunk, revision_of
from kvdb.errors import AlreadyExists, CapacityError, InvalidArgument, NotFound

PAGE_CONTEXTS = 1000
"""How many contexts are listed by one call."""


class Documents:
    """The documents of one model under one namespace. Thread-safe, as it keeps nothing: engines of the same model and namespace,
    in whatever process, see the same documents.

    A document's chunks are contexts named "<namespace>/<id>/1of3" and so on, whose metadata says which chunk of which document
    they are. A document is there while all of its chunks are; its time to live, its pin and its uses are theirs. One that is
    replaced stays until the new one is whole, whose names end with a higher revision.

    memory_bytes: the most bytes that all of them may take, where shared text counts once; None for no limit. When that is too
    little, the least recently used document that is not pinned goes first: it is dropped or, with `offload`, written to disk,
    from where the next answer that names it brings it back. An answer under way goes on over documents that are dropped.
    """

    def __init__(
        self, db: kvdb.Client, spec: kvdb.ModelSpec, namespace: str, memory_bytes: int | None, *, offload: bool = False
    ) -> None:
        if memory_bytes is not None and memory_bytes < 1:
            raise InvalidArgument(f"memory_bytes is {memory_bytes}; expected at least 1, or None for no bound")
        self._db = db
        self._spec = spec
        self.namespace = namespace
        self._memory_bytes = memory_bytes
        self._offload = offload

    def begin(self, new: NewDocument, nbytes: Mapping[str, int]) -> NewDocument:
        """Make room for a document that is about to be stored, and give it its revision. nbytes: about how many bytes each of its
        texts takes. Raises AlreadyExists for an id that is taken, CapacityError where there can be no room."""
        contexts = list(self._contexts(new.id, of_any_model=True))
        if not new.replace and _whole(context for context in contexts if context.spec == self._spec):
            raise AlreadyExists(f"there is a document {new.id!r}; take another id, delete it first, or pass replace=True")
        self._make_room_for(new, nbytes)
        return replace(new, revision=1 + max(map(revision_of, contexts), default=-1))

    def finish(self, new: NewDocument) -> DocumentInfo:
        """Let a document whose chunks are stored take the place of those that had its id before. Raises AlreadyExists where
        another engine stored one meanwhile, and CapacityError."""
        contexts = list(self._contexts(new.id))
        own = _whole(context for context in contexts if revision_of(context) == new.revision).get(new.id)
        others = [context for context in contexts if revision_of(context) != new.revision]
        if own is None or (_whole(others) and not new.replace):
            raise AlreadyExists(f"document {new.id!r} was added by somebody else meanwhile, or dropped for room or time")
        self._make_room_for(new, own.sizes)
        # Whoever finished a later revision meanwhile may have looked before all of this one was stored.
        superseded = bool(_whole(context for context in others if revision_of(context) > new.revision))
        self.discard([context.name for context in contexts if revision_of(context) < new.revision + superseded])
        return own.info(time.time())

    def discard(self, names: Iterable[str]) -> None:
        """Drop contexts, as far as they are there."""
        listed = list(names)
        try:
            self._db.drop(*listed)
        except NotFound:  # somebody else has dropped one
            for name in listed:
                with suppress(NotFound):
                    self._db.drop(name)

    def read(self, ids: Sequence[str]) -> list[Document]:
        """The documents of these ids, in this order, for an answer. Raises NotFound, naming the first that is not there."""
        once = {doc_id: self._get(doc_id) for doc_id in dict.fromkeys(ids)}
        if self._offload and self._memory_bytes is not None:
            self._make_room(once, _sizes(once.values()), self._all())
        return [once[doc_id] for doc_id in ids]

    def find(self, doc_id: str) -> Document | None:
        """The document of this id, None where there is none."""
        return _whole(self._contexts(doc_id)).get(doc_id)

    def token_ids(self, document: Document) -> list[list[int]]:
        """The tokens of each of its chunks; none of them where somebody has dropped it."""
        try:
            return [chunk.token_ids().tolist() for chunk in document.chunks]
        except NotFound:
            return []

    def update(
        self, document: Document, *, ttl: float | None, pinned: bool | None, own: Mapping[str, Any] | None = None
    ) -> DocumentInfo:
        """Change how long a document stays, and its application's metadata; None leaves what there is. Raises NotFound."""
        if ttl is not None or pinned is not None or own is not None:
            for chunk in document.chunks:
                noted = None if own is None else {**chunk.info.metadata, OWN: dict(own)}
                self._db.update(chunk.name, ttl=ttl, pinned=pinned, metadata=noted)
            document = self._get(document.id)
        return document.info(time.time())

    def delete(self, doc_id: str) -> None:
        """Raises NotFound."""
        self._get(doc_id)
        self.discard([context.name for context in self._contexts(doc_id)])

    def pin(self, doc_id: str, *, pinned: bool) -> None:
        """Raises NotFound."""
        for context in self._get(doc_id).chunks:
            self._db.update(context.name, pinned=pinned)

    def info(self, doc_id: str) -> DocumentInfo:
        """Raises NotFound."""
        return self._get(doc_id).info(time.time())

    def infos(self) -> list[DocumentInfo]:
        """A description of every document, in the order of their ids."""
        now, documents = time.time(), self._all()
        return [documents[doc_id].info(now) for doc_id in sorted(documents)]

    def _all(self) -> dict[str, Document]:
        return _whole(self._contexts())

    def _get(self, doc_id: str) -> Document:
        document = self.find(doc_id)
        if document is None:
            raise NotFound(
                f"there is no document {doc_id!r}: it was never added, was deleted, has expired, or was dropped for room; add it"
            )
        return document

    def _contexts(self, doc_id: str = "", *, of_any_model: bool = False) -> Iterator[kvdb.Context]:
        """The chunks that are stored, of one document or of all, in the order of their names, page by page."""
        prefix = f"{self.namespace}/{doc_id}/" if doc_id else f"{self.namespace}/"
        wanted = {"document": doc_id} if doc_id else {}
        after = ""
        while page := self._db.contexts(prefix, metadata=wanted, limit=PAGE_CONTEXTS, after=after):
            yield from (one for one in page if is_chunk(one) and (of_any_model or one.spec == self._spec))
            if len(page) < PAGE_CONTEXTS:
                return
            after = page[-1].name

    def _check_room(self, doc_id: str, nbytes: Mapping[str, int], documents: Mapping[str, Document]) -> None:
        """Raises CapacityError where a document with texts of these sizes would not fit beside what is pinned."""
        pinned = [document for document in documents.values() if document.pinned and document.id != doc_id]
        least = sum({**nbytes, **_sizes(pinned)}.values())
        if self._memory_bytes is not None and least > self._memory_bytes:
            raise CapacityError(
                f"document {doc_id!r} and what is pinned take {least:,} bytes; memory_bytes is {self._memory_bytes:,}, so unpin "
                "or delete documents, or raise it"
            )

    def _make_room_for(self, new: NewDocument, nbytes: Mapping[str, int]) -> None:
        """Raises CapacityError where a document with texts of these sizes would not fit beside what is pinned."""
        if self._memory_bytes is not None:
            documents = self._all()
            self._check_room(new.id, nbytes, documents)
            beside = _sizes(documents[doc_id] for doc_id in new.beside if doc_id in documents and doc_id != new.id)
            self._make_room({new.id, *new.beside}, {**beside, **nbytes}, documents)

    def _make_room(self, staying: Collection[str], nbytes: Mapping[str, int], documents: Mapping[str, Document]) -> None:
        """Let other documents go until texts of these sizes fit, or nothing else can go; the documents of an answer have to be in
        memory together."""
        others = [document for document in documents.values() if document.resident and document.id not in staying]
        going = deque(sorted((document for document in others if not document.pinned), key=lambda document: document.used_at))
        while going and sum({**nbytes, **_sizes(others)}.values()) > (self._memory_bytes or math.inf):
            oldest = going.popleft()
            others.remove(oldest)
            if not self._offload:
                self.discard([context.name for context in oldest.chunks])
                continue
            for context in oldest.chunks:
                with suppress(NotFound):  # somebody else has dropped it
                    self._db.offload(context.name)


def check_id(doc_id: Any) -> None:
    """Raises InvalidArgument unless the value can be a document's id."""
    if not isinstance(doc_id, str) or not doc_id:
        raise InvalidArgument(f"a document's id is {doc_id!r}; expected a string that is not empty")


def check_ttl(ttl: float | None) -> None:
    """Raises InvalidArgument unless the value can be a time to live."""
    if ttl is not None and (isinstance(ttl, bool) or not math.isfinite(ttl) or ttl <= 0):
        raise InvalidArgument(f"ttl is {ttl!r}; expected seconds above 0, or None for a document that stays")


def _whole(contexts: Iterable[kvdb.Context]) -> dict[str, Document]:
    """The documents all of whose chunks are among these contexts, by their ids; of several revisions the last."""
    revisions: defaultdict[tuple[str, int], list[kvdb.Context]] = defaultdict(list)
    for context in contexts:
        revisions[context.info.metadata["document"], revision_of(context)].append(context)
    documents = {}
    for (doc_id, _), chunks in sorted(revisions.items()):
        if len(chunks) == chunks[0].info.metadata["chunks"]:
            documents[doc_id] = Document(doc_id, tuple(sorted(chunks, key=lambda chunk: int(chunk.info.metadata["chunk"]))))
    return documents


def _sizes(documents: Iterable[Document]) -> dict[str, int]:
    """About the bytes of each text in these documents."""
    return {text: nbytes for document in documents for text, nbytes in document.sizes.items()}
