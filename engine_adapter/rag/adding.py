"""Adds documents: cuts them into chunks, and has the model compute those that are not stored."""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from engine_adapter.base import Progress
from engine_adapter.rag.attached import AttachedModel
from engine_adapter.rag.chunks import cut
from engine_adapter.rag.document import DocumentInfo, NewDocument
from engine_adapter.rag.documents import Documents, check_id, check_ttl
from engine_adapter.rag.prompts import Prompts, Text, digest
from engine_adapter.rag.recut import recut
from kvdb.errors import AlreadyExists

ATTEMPTS = 8
"""How often a document is tried that others, who change it at the same time, come between."""


class Adding:
    """Adds documents to those of an engine. Thread-safe: the model is taken for one chunk at a time."""

    def __init__(self, attached: AttachedModel, prompts: Prompts, documents: Documents, chunk_tokens: int) -> None:
        """chunk_tokens: the most tokens of a chunk. Raises InvalidArgument."""
        cut([], chunk_tokens, prompts.text)
        self._attached = attached
        self._prompts = prompts
        self._documents = documents
        self._chunk_tokens = chunk_tokens

    def add(
        self, doc_id: str, text: Text, *, ttl: float | None, pin: bool, replace: bool, progress: Progress | None
    ) -> DocumentInfo:
        """See `RagEngine.add`."""
        ids = self._ids(doc_id, text, ttl)
        chunks = self._recut(doc_id, ids) if replace else cut(ids, self._chunk_tokens, self._prompts.text)
        return self._store(self._new(doc_id, chunks, ttl, pinned=bool(pin), replace=replace), chunks, progress)

    def upsert(
        self,
        doc_id: str,
        text: Text,
        *,
        ttl: float | None = None,
        pin: bool | None = None,
        metadata: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        beside: Iterable[str] = (),
    ) -> DocumentInfo:
        """See `RagEngine.upsert`. beside: ids of documents that do not go to make room for it."""
        ids = self._ids(doc_id, text, ttl)
        for attempt in range(1, ATTEMPTS + 1):
            there = self._documents.find(doc_id)
            if there is not None and there.holds(ids):
                if progress is not None:
                    progress(len(ids), len(ids))
                return self._documents.update(there, ttl=ttl, pinned=pin, own=metadata)
            pinned = there is not None and there.pinned if pin is None else pin
            kept = {} if there is None else there.own
            chunks = self._recut(doc_id, ids)
            new = self._new(doc_id, chunks, ttl, pinned=pinned, beside=beside)
            try:
                return self._store(dataclasses.replace(new, own=kept if metadata is None else metadata), chunks, progress)
            except AlreadyExists:  # by somebody else meanwhile, who may have had the same text
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("every attempt returns or raises")

    def _ids(self, doc_id: str, text: Text, ttl: float | None) -> list[int]:
        """The tokens of a document. Raises InvalidArgument for arguments that cannot be."""
        self._attached.check_open()
        check_ttl(ttl)
        check_id(doc_id)
        return self._prompts.document(doc_id, text)

    def _recut(self, doc_id: str, ids: list[int]) -> list[list[int]]:
        """The chunks of a document that takes the place of another; those that its text still has stay as they are."""
        there = self._documents.find(doc_id)
        known = [] if there is None else self._documents.token_ids(there)
        return recut(ids, known, self._chunk_tokens, self._prompts.text)

    def _new(
        self,
        doc_id: str,
        chunks: Sequence[list[int]],
        ttl: float | None,
        *,
        pinned: bool,
        replace: bool = True,
        beside: Iterable[str] = (),
    ) -> NewDocument:
        expires = None if ttl is None else time.time() + ttl
        texts = tuple(map(digest, chunks))
        return NewDocument(self._documents.namespace, doc_id, 0, texts, expires, pinned, replace, frozenset(beside))

    def _store(self, document: NewDocument, chunks: Sequence[list[int]], progress: Progress | None) -> DocumentInfo:
        spec = self._attached.spec
        sizes = {text: len(chunk) * spec.layers * spec.token_nbytes for text, chunk in zip(document.texts, chunks, strict=True)}
        new = self._documents.begin(document, sizes)
        stored: list[str] = []
        done, total = 0, sum(map(len, chunks))
        with ExitStack() as undo:
            undo.callback(self._documents.discard, stored)
            for number, chunk in enumerate(chunks, 1):
                stored.append(self._store_chunk(new, number, chunk))
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
            info = self._documents.finish(new)
            undo.pop_all()
        return info

    def _store_chunk(self, new: NewDocument, number: int, ids: list[int]) -> str:
        """Store a chunk of a document, from 1 on, in a turn of its own. Returns its name."""
        behind = self._prompts.instruction
        with self._attached.turn() as engine:
            self._attached.store_beginning(behind)
            chunk = engine.store_chunk(name=new.name(number), input_ids=ids, behind=behind or None, **new.retention(number))
        return str(chunk.name)
