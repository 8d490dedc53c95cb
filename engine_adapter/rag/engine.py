"""The RAG front: documents are added once, and questions are answered from any of them in any order."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from transformers import PreTrainedModel

import kvdb
from engine_adapter.base import Progress, check_client
from engine_adapter.rag.adding import Adding
from engine_adapter.rag.answering import Answering, Asked
from engine_adapter.rag.answers import Answer, Tokenizer
from engine_adapter.rag.attached import AttachedModel, vocabulary_of
from engine_adapter.rag.chat import ChatFormat
from engine_adapter.rag.check import Check, CheckPrompt, check
from engine_adapter.rag.chunks import CHUNK_TOKENS
from engine_adapter.rag.document import DocumentInfo
from engine_adapter.rag.documents import Documents, check_id
from engine_adapter.rag.messages import Messages
from engine_adapter.rag.prompts import QUESTION, Prompts, Text, chat_format
from engine_adapter.rag.retrieved import Doc, Retrieved, retrieved
from engine_adapter.rag.stream import AnswerStream
from kvdb.blend.strategies import Recompute
from kvdb.errors import InvalidArgument

RATIOS = (0.0, 0.05, 0.15, 0.3, 1.0, None)
PLAIN = frozenset({"max_new_tokens", "min_new_tokens", "eos_token_id", "pad_token_id", "repetition_penalty"})
"""The options of an answer that a full prefill takes too."""


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
        with ExitStack() as undo:
            client = undo.enter_context(kvdb.connect(db)) if isinstance(db, str | Path) else db
            check_client(client)
            self._attached = AttachedModel(model, client, namespace)
            undo.callback(self._attached.close)
            self._documents = Documents(client, self._attached.spec, namespace, memory_bytes, offload=offload)
            self._adding = Adding(self._attached, self._prompts, self._documents, chunk_tokens)
            self._answering = Answering(self._attached, self._prompts, self._documents, self._adding)
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
        return self._answering.end_tokens

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
        return self._adding.add(doc_id, text, ttl=ttl, pin=pin, replace=replace, progress=progress)

    def upsert(
        self,
        doc_id: str,
        text: Text,
        *,
        ttl: float | None = None,
        pin: bool | None = None,
        metadata: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> DocumentInfo:
        """Let a document have this text, whether there is one of this id or not. Only those chunks are computed whose text is
        new: an old chunk stays wherever it is in the new text.

        ttl, pin: as in `add`; None leaves what a document of the same text has, and pin=None the pin of any.
        metadata: JSON of the application's own, None for what there is. Others may do the
        same at the same time. Raises as `add`.
        """
        return self._adding.upsert(doc_id, text, ttl=ttl, pin=pin, metadata=metadata, progress=progress)

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
        return self._answering.answer(
            self._question(question), retrieved(docs), recompute, stream, None, max_new_tokens=max_new_tokens, **options
        )

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
        return self._answering.answer(asked, retrieved(docs), recompute, stream, None, max_new_tokens=max_new_tokens, **options)

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
        settings = {**self._answering.ends(), "max_new_tokens": max_new_tokens, "do_sample": False, **options}
        plain = {name: value for name, value in settings.items() if name in PLAIN}
        return check(
            [CheckPrompt.of(prompt) for prompt in sample],
            [Recompute.of(ratio).ratio for ratio in ratios],
            blended=lambda prompt, ratio: self.answer(prompt.question, prompt.docs, recompute=ratio, **settings),
            fed=lambda prompt, ratio, tokens: self._answering.fed(*self._asked(prompt), ratio, tokens, **settings),
            full=lambda prompt: self._answering.full(*self._asked(prompt), **plain),
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _stream(self, asked: Asked, docs: Iterable[Doc], recompute: float | Recompute | None, **options: Any) -> AnswerStream:
        listed = retrieved(docs)
        return AnswerStream(lambda stream, stop: self._answering.answer(asked, listed, recompute, stream, stop, **options))

    def _question(self, question: Text) -> Asked:
        return lambda documents: self._prompts.question(question, documents=documents)

    def _chat(self, messages: Messages) -> Asked:
        return lambda documents: self._prompts.chat(messages, documents=documents)

    def _asked(self, prompt: CheckPrompt) -> tuple[Asked, list[Retrieved]]:
        return self._question(prompt.question), retrieved(prompt.docs)
