"""The RAG front: documents are added once, and questions are answered from any of them in any order."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any, Self

import numpy as np
import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

import kvdb
from engine_adapter.base import Progress, check_client
from engine_adapter.rag.answers import Answer, Pieces, Tokenizer, answer_of
from engine_adapter.rag.attached import AttachedModel, vocabulary_of
from engine_adapter.rag.chat import ChatFormat
from engine_adapter.rag.check import Check, CheckPrompt, FullAnswer, check
from engine_adapter.rag.chunks import CHUNK_TOKENS, cut, recut
from engine_adapter.rag.document import Document, DocumentInfo, NewDocument
from engine_adapter.rag.documents import Documents, check_id, check_ttl
from engine_adapter.rag.forcing import Forced
from engine_adapter.rag.messages import Messages
from engine_adapter.rag.plain import full_answer
from engine_adapter.rag.prompts import QUESTION, Around, Prompts, Text, chat_format, digest
from engine_adapter.rag.retrieved import Doc, Retrieved, retrieved
from engine_adapter.rag.stream import AnswerStream
from engine_adapter.transformers.timing import StopWhen
from kvdb.blend.strategies import Recompute
from kvdb.errors import AlreadyExists, InvalidArgument
from kvdb.types import Float32

Asked = Callable[[bool], Around]
"""What stands around the documents of a question; it is called with whether there are any."""
ATTEMPTS = 8
"""How often a document is tried that others, who change it at the same time, come between."""

RATIOS = (0.0, 0.05, 0.15, 0.3, 1.0, None)
PLAIN = frozenset({"max_new_tokens", "min_new_tokens", "eos_token_id", "pad_token_id", "repetition_penalty"})
"""The options of an answer that a full prefill takes too."""

# size: one noun, an engine that answers from documents


class RagEngine:
    """A model that answers from documents whose KV lies in a kvdb database.

    Each document is cut into chunks, and each chunk is computed once, behind the instruction alone. A prompt is the instruction,
    the documents that a question names, in the order it names them, and the question. The documents' KV is taken from the
    database, at any position, and the share of it that would be most wrong there is computed again (CacheBlend, arXiv
    2405.16444).

    The model is attached until `close`, or the end of a `with`. Documents stay in the database, and another engine of the same
    model and namespace finds them there. Thread-safe: calls that need the model take turns, in their order, and an answer waits
    for at most one chunk of a document that is being added.
    """

    def __init__(  # noqa: PLR0913  # three things that work together, and the settings of the whole
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        db: kvdb.Client | str | Path,
        *,
        instruction: Text = "",
        template: str = QUESTION,
        chat: bool | ChatFormat | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        memory_bytes: int | None = None,
        offload: bool = False,
        namespace: str = "rag",
    ) -> None:
        """db: a database, which stays the caller's to close, or what `kvdb.connect` takes, such as the folder of a store, and
        which is closed with the engine. instruction: the text with which every prompt begins, behind the tokens that the
        tokenizer puts before a text; in a chat the beginning of the system message. template: the text behind the documents, with
        {question} in it. chat: whether prompts are chats in the tokenizer's own template, in which a question is the message of a
        user; a `ChatFormat` says how documents stand in them. None for chats where the tokenizer has a template and the prompt no
        form of the caller's own, by template=, token ids, or control tokens in the instruction. chunk_tokens: the most tokens of
        a chunk. memory_bytes: the most bytes of all documents, None for no limit of its own; see `Documents`. offload: whether
        documents without room go to disk instead of being dropped; see `kvdb.Client.offload`. namespace: the beginning of the
        names of its contexts in the database.

        Raises InvalidArgument, Unsupported for a model that kvdb cannot serve, and what `kvdb.connect` raises.
        """
        if not namespace or "/" in namespace:
            raise InvalidArgument(f"namespace is {namespace!r}; expected a name without '/'")
        form = chat_format(chat, tokenizer, instruction, template)
        self._prompts = Prompts(tokenizer, vocabulary_of(model), instruction, template, form)
        self._chunk_tokens = chunk_tokens
        cut([], chunk_tokens, self._prompts.text)  # which checks the number
        with ExitStack() as undo:
            client = undo.enter_context(kvdb.connect(db)) if isinstance(db, str | Path) else db
            check_client(client)
            self._attached = AttachedModel(model, client, namespace)
            undo.callback(self._attached.close)
            self._documents = Documents(client, self._attached.spec, namespace, memory_bytes, offload=offload)
            with self._attached.turn():
                self._attached.store_beginning(self._prompts.instruction)
            self._resources = undo.pop_all()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._prompts.tokenizer

    @property
    def positions(self) -> int:
        """The most tokens of a prompt with its answer."""
        return self._attached.positions

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer."""
        configured = self._attached.model.generation_config.eos_token_id
        known = configured if isinstance(configured, list) else [configured]
        return frozenset(token for token in (self._turn_end, *known) if token is not None)

    def add(
        self,
        doc_id: str,
        text: Text,
        *,
        ttl: float | None = None,
        pin: bool = False,
        replace: bool = False,
        progress: Progress | None = None,
    ) -> DocumentInfo:
        """Cut a document into chunks and compute each that is not stored. A text that is stored already costs nothing.

        text: a string, or its token ids. ttl: seconds from now until the document is dropped, None for never. pin: never drop it
        for room. replace: if there is a document of this id, the new one takes its place when it is whole. progress: called as
        (done, total) tokens after each chunk. Raises InvalidArgument for a text without tokens, AlreadyExists, CapacityError, and
        what the database raises; nothing is added then.
        """
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
        """Let a document have this text, whether there is one of this id or not. Only those chunks are computed whose text is
        new: an old chunk stays wherever it is in the new text.

        ttl, pin: as in `add`; None leaves what a document of the same text has, and pin=None the pin of any.
        metadata: JSON of the application's own, None for what there is. beside: ids of documents that do not go to make room for
        it. Others may do the same at the same time. Raises as `add`.
        """
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

    def answer(
        self,
        question: Text,
        docs: Iterable[Doc],
        *,
        recompute: float | Recompute | None = None,
        max_new_tokens: int = 64,
        stream: Callable[[str], object] | None = None,
        **options: Any,
    ) -> Answer:
        """Answer a question from documents; in a chat it is the message of a user.

        docs: their ids, in the order in which the model reads them; one may come several times. An object with `id` and `text`,
        or {"id": ..., "text": ...}, as retrievers have them, is added first, as by `upsert`; without an id it has one by its
        text. recompute: the share of their tokens that is computed again, 0 to 1, None to let the controller choose, or a
        `kvdb.Recompute` that says more. stream: called with each piece of text as it comes. options: all else that
        `engine.generate` takes, such as retrieval= or temperature=. Raises NotFound for a document that is not there,
        InvalidArgument for a ratio outside [0, 1] or an empty question, and what `generate` raises.
        """
        asked = self._question(question)
        return self._answer(asked, retrieved(docs), recompute, stream, max_new_tokens=max_new_tokens, **options)

    def stream(
        self,
        question: Text,
        docs: Iterable[Doc],
        *,
        recompute: float | Recompute | None = None,
        max_new_tokens: int = 64,
        **options: Any,
    ) -> AnswerStream:
        """The same as `answer`, for a `for` loop over the pieces of text. A loop that is left ends the answer at its next token.

        What is wrong with the arguments is raised when the loop begins.
        """
        return self._stream(self._question(question), docs, recompute, max_new_tokens=max_new_tokens, **options)

    def chat(
        self,
        messages: Messages,
        docs: Iterable[Doc] = (),
        *,
        recompute: float | Recompute | None = None,
        max_new_tokens: int = 64,
        stream: Callable[[str], object] | None = None,
        **options: Any,
    ) -> Answer:
        """Answer the last message of a chat from documents, which stand before all messages.

        messages: {"role": ..., "content": ...} each, as the tokenizer's template takes them. A system message that comes first
        is added to the instruction, behind the documents. Other arguments and errors as in `answer`; raises InvalidArgument for
        messages that the template does not take, and for an engine whose prompts are plain.
        """
        asked = self._chat(messages)
        return self._answer(asked, retrieved(docs), recompute, stream, max_new_tokens=max_new_tokens, **options)

    def stream_chat(
        self,
        messages: Messages,
        docs: Iterable[Doc] = (),
        *,
        recompute: float | Recompute | None = None,
        max_new_tokens: int = 64,
        **options: Any,
    ) -> AnswerStream:
        """The same as `chat`, for a `for` loop over the pieces of text; see `stream`."""
        return self._stream(self._chat(messages), docs, recompute, max_new_tokens=max_new_tokens, **options)

    def check(
        self,
        sample: Iterable[CheckPrompt | Sequence[Any]],
        ratios: Iterable[float | None] = RATIOS,
        *,
        max_new_tokens: int = 64,
        progress: Progress | None = None,
        **options: Any,
    ) -> Check:
        """Compare answers with those of this model's full prefill, without kvdb, for prompts of one's own.

        sample: (question, docs), or (question, docs, expected) with what a right answer holds: a string, or a function of the
        answer's text. ratios: of recompute, that are compared; None for what the controller chooses. Decoding is greedy.
        progress: called with the number of answers so far and of all answers. options: as in `answer`. Raises what `answer`
        raises, and InvalidArgument for an empty sample.
        """
        settings = {**self._ends(), "max_new_tokens": max_new_tokens, "do_sample": False, **options}
        plain = {name: value for name, value in settings.items() if name in PLAIN}
        return check(
            [CheckPrompt.of(prompt) for prompt in sample],
            [Recompute.of(ratio).ratio for ratio in ratios],
            blended=lambda prompt, ratio: self.answer(prompt.question, prompt.docs, recompute=ratio, **settings),
            fed=lambda prompt, ratio, tokens: self._fed(*self._asked(prompt), ratio, tokens, **settings),
            full=lambda prompt: self._full(*self._asked(prompt), **plain),
            progress=progress,
        )

    def delete(self, doc_id: str) -> None:
        """Forget a document. An answer under way that holds it goes on. Raises NotFound."""
        self._attached.check_open()
        check_id(doc_id)
        self._documents.delete(doc_id)

    def pin(self, doc_id: str, pinned: bool = True) -> None:
        """Never drop a document for room or, with pinned=False, allow it again. A pinned document still expires. Raises
        NotFound."""
        self._attached.check_open()
        check_id(doc_id)
        self._documents.pin(doc_id, pinned=bool(pinned))

    def document(self, doc_id: str) -> DocumentInfo:
        """A description of one document. Raises NotFound."""
        self._attached.check_open()
        check_id(doc_id)
        return self._documents.info(doc_id)

    def documents(self) -> list[DocumentInfo]:
        """Every document, in the order of their ids."""
        self._attached.check_open()
        return self._documents.infos()

    def close(self) -> None:
        """Wait for calls under way, restore the model, and close the database if the engine opened it. Documents stay in it.
        Closing twice does nothing."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, asked: Asked, docs: Iterable[Doc], recompute: float | Recompute | None, **options: Any) -> AnswerStream:
        listed = retrieved(docs)
        return AnswerStream(lambda stream, stop: self._answer(asked, listed, recompute, stream, stop, **options))

    def _question(self, question: Text) -> Asked:
        return lambda documents: self._prompts.question(question, documents=documents)

    def _chat(self, messages: Messages) -> Asked:
        return lambda documents: self._prompts.chat(messages, documents=documents)

    def _asked(self, prompt: CheckPrompt) -> tuple[Asked, list[Retrieved]]:
        return self._question(prompt.question), retrieved(prompt.docs)

    @property
    def _turn_end(self) -> int | None:
        """The token with which a turn of a chat ends, None where prompts are no chats or nothing is known of it."""
        return getattr(self._prompts.tokenizer, "eos_token_id", None) if self._prompts.is_chat else None

    def _ends(self) -> dict[str, Any]:
        """The options that end an answer: in a chat where a turn of the tokenizer ends, and where the model ends a text."""
        return {"eos_token_id": sorted(self.ends)} if self._turn_end is not None else {}

    def _answer(
        self,
        asked: Asked,
        docs: Sequence[Retrieved],
        recompute: float | Recompute | None,
        stream: Callable[[str], object] | None,
        stop: Event | None = None,
        **options: Any,
    ) -> Answer:
        """See `answer`. stop: ends the answer at the next token once it is set."""
        self._attached.check_open()
        options = {**self._ends(), **options, "recompute": Recompute.of(recompute)}
        if stream is not None:
            options["streamer"] = Pieces(self._prompts.tokenizer, stream)
        if stop is not None:
            told = StopWhen(lambda _: stop.is_set())
            options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), told])
        around = asked(bool(docs))
        self._add_given(docs)
        with self._attached.turn() as engine:
            out = engine.generate(parts=_parts(around, self._documents.read([doc.id for doc in docs])), **options)
            report = engine.last
        assert report is not None
        sequence = (out if isinstance(out, torch.Tensor) else out.sequences)[0]
        prompt = len(sequence) - report.generated
        return answer_of(self._prompts.tokenizer, sequence[prompt:].tolist(), prompt, report, self._attached.spec.layers)

    def _fed(
        self, asked: Asked, docs: Sequence[Retrieved], ratio: float | None, tokens: Sequence[int], **options: Any
    ) -> Float32:
        """Log probabilities at each token of an answer that is fed, float32 `[tokens, vocabulary]`."""
        forced = Forced(tokens)
        processors = LogitsProcessorList([*options.get("logits_processor", ()), forced])
        self._answer(asked, docs, ratio, None, **{**options, "logits_processor": processors, "max_new_tokens": len(tokens)})
        return forced.log_probabilities

    def _full(self, asked: Asked, docs: Sequence[Retrieved], **options: Any) -> FullAnswer:
        """The answer of the same model without kvdb, which reads the whole prompt."""
        self._attached.check_open()
        around = asked(bool(docs))
        self._add_given(docs)
        parts = _parts(around, self._documents.read([doc.id for doc in docs]))
        with self._attached.db.create_session(self._attached.spec, parts=parts) as session:
            ids = torch.from_numpy(session.tokens.astype(np.int64))
        with self._attached.turn():
            return full_answer(self._attached.model, self._prompts.tokenizer, ids, **options)

    def _add_given(self, docs: Sequence[Retrieved]) -> None:
        """Add the documents that come with a text, without letting any of the others go."""
        texts = {doc.id: doc.text for doc in docs if doc.text is not None}
        beside = {doc.id for doc in docs}
        for doc_id, text in texts.items():
            self.upsert(doc_id, text, beside=beside)

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


def _parts(around: Around, documents: Iterable[Document]) -> list[Any]:
    """The parts of a prompt. What stands before documents is given as token ids, because the stored beginning of a prompt is
    found by its ids."""
    chunks = [chunk for document in documents for chunk in document.chunks]
    return [*([around.before] if around.before else []), *chunks, around.behind]
