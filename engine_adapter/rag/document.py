"""One document of a RAG engine, as the contexts of its chunks say what it is."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import kvdb
from engine_adapter.rag.prompts import digest
from kvdb.client.retention_keywords import RetentionKeywords

KEYS = frozenset({"document", "chunk", "chunks", "revision", "text"})
"""What the metadata of a chunk says: its document, its number from 1 on and how many there are, how many documents had that id
before, and a digest of its text, which is stored once."""
OWN = "own"
"""Where a chunk keeps the metadata that an application gives its document."""
TTL_SECONDS_MIN = 1e-3


@dataclass(frozen=True)
class DocumentInfo:
    """A description of a document. nbytes: the bytes of its chunks' blocks; blocks shared with other documents count in full.
    age_seconds: the time since it was added. expires_seconds: the time until it is dropped, None for never. used: how often its
    text was reused, by answers above all. resident: whether it is in memory. metadata:
    as it was given."""

    id: str
    tokens: int
    chunks: int
    nbytes: int
    age_seconds: float
    expires_seconds: float | None
    pinned: bool
    used: int
    resident: bool
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Document:
    """A document that is whole. chunks: its contexts as the database described them, in order."""

    id: str
    chunks: tuple[kvdb.Context, ...]

    @property
    def pinned(self) -> bool:
        return all(chunk.info.pinned for chunk in self.chunks)

    @property
    def resident(self) -> bool:
        """Whether it is in memory."""
        return all(chunk.info.resident for chunk in self.chunks)

    @property
    def own(self) -> Mapping[str, Any]:
        """The metadata that its application gave it."""
        return dict(self.chunks[0].info.metadata.get(OWN, {}))

    @property
    def used_at(self) -> float:
        """When it was last used or stored, seconds since the epoch."""
        return max(chunk.info.used for chunk in self.chunks)

    @property
    def sizes(self) -> Mapping[str, int]:
        """About the bytes of each of its texts, by their digests."""
        return {str(chunk.info.metadata["text"]): _own_nbytes(chunk) for chunk in self.chunks}

    def holds(self, ids: Sequence[int]) -> bool:
        """Whether its text is these token ids, by the digests of its chunks."""
        lengths = [chunk.info.tokens for chunk in self.chunks]
        if sum(lengths) != len(ids):
            return False
        ends = list(accumulate(lengths))
        texts = [digest(ids[end - length : end]) for length, end in zip(lengths, ends, strict=True)]
        return texts == [chunk.info.metadata["text"] for chunk in self.chunks]

    def info(self, now: float) -> DocumentInfo:
        """Its description. now: in seconds since the epoch."""
        infos = [chunk.info for chunk in self.chunks]
        expires = min(math.inf if info.expires is None else info.expires for info in infos)
        return DocumentInfo(
            id=self.id,
            tokens=sum(info.tokens for info in infos),
            chunks=len(infos),
            nbytes=sum(info.nbytes for info in infos),
            age_seconds=max(0.0, now - max(info.created for info in infos)),
            expires_seconds=None if expires == math.inf else expires - now,
            pinned=self.pinned,
            used=min(info.uses for info in infos),
            resident=self.resident,
            metadata=self.own,
        )


@dataclass(frozen=True)
class NewDocument:
    """A document that is being stored, chunk by chunk. texts: the digests of its chunks' texts. expires: in seconds since the
    epoch, None for never. replace: whether it may take the place of another. beside: ids of documents that have to be in memory
    together with it. own: metadata that its application gives it."""

    namespace: str
    id: str
    revision: int
    texts: tuple[str, ...]
    expires: float | None
    pinned: bool
    replace: bool
    beside: frozenset[str] = frozenset()
    own: Mapping[str, Any] = field(default_factory=dict)

    def name(self, number: int) -> str:
        """The name of the context of one of its chunks, from 1 on."""
        revision = f".r{self.revision}" if self.revision else ""
        return f"{self.namespace}/{self.id}/{number}of{len(self.texts)}{revision}"

    def retention(self, number: int) -> RetentionKeywords:
        """How one of its chunks is kept."""
        noted = {
            "document": self.id,
            "chunk": number,
            "chunks": len(self.texts),
            "revision": self.revision,
            "text": self.texts[number - 1],
            **({OWN: dict(self.own)} if self.own else {}),
        }
        left = None if self.expires is None else max(TTL_SECONDS_MIN, self.expires - time.time())
        return {"ttl": left, "metadata": noted, "pinned": self.pinned}


def is_chunk(context: kvdb.Context) -> bool:
    """Whether a context is a chunk of a document."""
    return context.info.chunk and context.info.metadata.keys() >= KEYS


def revision_of(context: kvdb.Context) -> int:
    """How many documents had the id of a chunk's document before."""
    return int(context.info.metadata["revision"])


def _own_nbytes(context: kvdb.Context) -> int:
    """About the bytes of a chunk's text by itself: those of its blocks or, where it shares some with texts that begin alike,
    those of its tokens."""
    info = context.info
    return info.nbytes if info.segments == 1 else info.tokens * info.spec.layers * info.spec.token_nbytes
