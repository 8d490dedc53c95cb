"""The RAG front: documents are added once, and questions are answered from any of them in any order."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from threading import Event
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

import kvdb
from engine_adapter.base import Progress, check_client
from engine_adapter.rag.answers import Answer, Pieces, Tokenizer, answer_of
from engine_adapter.rag.check import Check, CheckPrompt, FullAnswer, check
from engine_adapter.rag.chunks import CHUNK_TOKENS, cut
from engine_adapter.rag.document import Document, DocumentInfo, NewDocument
from engine_adapter.rag.documents import Documents, check_id, check_ttl
from engine_adapter.rag.forcing import Forced
from engine_adapter.rag.plain import full_answer
from engine_adapter.rag.prompts import QUESTION, Prompts, Text, digest
from engine_adapter.rag.stream import AnswerStream, Stop
from engine_adapter.rag.turns import Turns
from engine_adapter.transformers import attach
from kvdb.blend.strategies import Recompute
from kvdb.errors import AlreadyExists, InvalidArgument, SessionClosed
from kvdb.types import Float32

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
        db: kvdb.Client,
        *,
        instruction: Text = "",
        template: str = QUESTION,
        chunk_tokens: int = CHUNK_TOKENS,
        memory_bytes: int | None = None,
        offload: bool = False,
        namespace: str = "rag",
    ) -> None:
        """instruction: the text with which every prompt begins, behind the tokens that the tokenizer puts before a text.
        template: the text behind the documents, with {question} in it, such as the turns of a chat. chunk_tokens: the most tokens
        of a chunk. memory_bytes: the most bytes of all documents, None for no limit of its own; see `Documents`. offload: whether
        documents without room go to disk instead of being dropped; see `kvdb.Client.offload`. namespace: the beginning of the
        names of its contexts in the database.

        Raises InvalidArgument, and Unsupported for a model that kvdb cannot serve.
        """
        if not namespace or "/" in namespace:
            raise InvalidArgument(f"namespace is {namespace!r}; expected a name without '/'")
        check_client(db)
        cut([], chunk_tokens, str)
        self._model = model
        self._db = db
        self._prompts = Prompts(tokenizer, int(model.config.get_text_config(decoder=True).vocab_size), instruction, template)
        self._chunk_tokens = chunk_tokens
        self._namespace = namespace
        self._turns = Turns()
        self._closed = False
        with ExitStack() as stack:
            self._engine = stack.enter_context(attach(model, db))
            self._documents = Documents(db, self._engine.spec, namespace, memory_bytes, offload=offload)
            self._store_instruction()
            self._resources = stack.pop_all()

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
        self._check_open()
        check_ttl(ttl)
        check_id(doc_id)
        ids = self._prompts.document(text, f"document {doc_id!r}")
        chunks = cut(ids, self._chunk_tokens, self._prompts.text)
        spec = self._engine.spec
        sizes = {digest(chunk): len(chunk) * spec.layers * spec.token_nbytes for chunk in chunks}
        texts = list(map(digest, chunks))
        new = self._documents.begin(doc_id, sizes, texts, ttl=ttl, pinned=bool(pin), replace=replace)
        stored: list[str] = []
        with ExitStack() as undo:
            undo.callback(self._documents.discard, stored)
            done = 0
            for number, chunk in enumerate(chunks, 1):
                with self._turn():
                    self._store_instruction()
                    stored.append(self._store_chunk(new, number, chunk))
                done += len(chunk)
                if progress is not None:
                    progress(done, len(ids))
            info = self._documents.finish(new)
            undo.pop_all()
        return info

    def answer(
        self,
        question: Text,
        docs: Iterable[str],
        *,
        recompute: float | Recompute | None = None,
        max_new_tokens: int = 64,
        stream: Callable[[str], object] | None = None,
        **options: Any,
    ) -> Answer:
        """Answer a question from documents.

        docs: their ids, in the order in which the model reads them; one may come several times. recompute: the share of their
        tokens that is computed again, 0 to 1, None to let the controller choose, or a `kvdb.Recompute` that says more. stream:
        called with each piece of text as it comes. options: all else that `engine.generate` takes, such as retrieval= or
        temperature=. Raises NotFound for a document that is not there, InvalidArgument for a ratio outside [0, 1] or an empty
        question, and what `generate` raises.
        """
        return self._answer(question, _listed(docs), recompute, stream, None, max_new_tokens=max_new_tokens, **options)

    def stream(
        self,
        question: Text,
        docs: Iterable[str],
        *,
        recompute: float | Recompute | None = None,
        max_new_tokens: int = 64,
        **options: Any,
    ) -> AnswerStream:
        """The same as `answer`, for a `for` loop over the pieces of text. A loop that is left ends the answer at its next token.

        What is wrong with the arguments is raised when the loop begins.
        """
        ids = _listed(docs)
        options["max_new_tokens"] = max_new_tokens
        return AnswerStream(lambda stream, stop: self._answer(question, ids, recompute, stream, stop, **options))

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
        settings = {"max_new_tokens": max_new_tokens, "do_sample": False, **options}
        plain = {name: value for name, value in settings.items() if name in PLAIN}
        return check(
            [CheckPrompt.of(prompt) for prompt in sample],
            [Recompute.of(ratio).ratio for ratio in ratios],
            blended=lambda prompt, ratio: self.answer(prompt.question, prompt.docs, recompute=ratio, **settings),
            fed=lambda prompt, ratio, tokens: self._fed(prompt, ratio, tokens, settings),
            full=lambda prompt: self._full_answer(prompt, plain),
            progress=progress,
        )

    def delete(self, doc_id: str) -> None:
        """Forget a document. An answer under way that holds it goes on. Raises NotFound."""
        self._check_open()
        check_id(doc_id)
        self._documents.delete(doc_id)

    def pin(self, doc_id: str, pinned: bool = True) -> None:
        """Never drop a document for room or, with pinned=False, allow it again. A pinned document still expires. Raises
        NotFound."""
        self._check_open()
        check_id(doc_id)
        self._documents.pin(doc_id, pinned=bool(pinned))

    def documents(self) -> list[DocumentInfo]:
        """Every document, in the order of their ids."""
        self._check_open()
        return self._documents.infos()

    def close(self) -> None:
        """Wait for calls under way, and restore the model. Documents stay in the database. Closing twice does nothing."""
        with self._turns.mine():
            self._closed = True
            self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _answer(
        self,
        question: Text,
        docs: Sequence[str],
        recompute: float | Recompute | None,
        stream: Callable[[str], object] | None,
        stop: Event | None,
        **options: Any,
    ) -> Answer:
        self._check_open()
        options["recompute"] = Recompute.of(recompute)
        if stream is not None:
            options["streamer"] = Pieces(self._prompts.tokenizer, stream)
        if stop is not None:
            options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), Stop(stop)])
        with self._turn():
            parts = self._parts(self._documents.read(docs), question)
            out = self._engine.generate(parts=parts, **options)
            report = self._engine.last
        assert report is not None
        sequence = (out if isinstance(out, torch.Tensor) else out.sequences)[0]
        prompt = len(sequence) - report.generated
        return answer_of(self._prompts.tokenizer, sequence[prompt:].tolist(), prompt, report, self._engine.spec.layers)

    def _fed(self, prompt: CheckPrompt, ratio: float | None, tokens: Sequence[int], settings: dict[str, Any]) -> Float32:
        """Log probabilities at each token of an answer that is fed, float32 `[tokens, vocabulary]`."""
        forced = Forced(tokens)
        processors = LogitsProcessorList([*settings.get("logits_processor", ()), forced])
        fed = {**settings, "logits_processor": processors, "max_new_tokens": len(tokens)}
        self.answer(prompt.question, prompt.docs, recompute=ratio, **fed)
        return forced.log_probabilities

    def _full_answer(self, prompt: CheckPrompt, options: dict[str, Any]) -> FullAnswer:
        self._check_open()
        parts = self._parts(self._documents.read(_listed(prompt.docs)), prompt.question)
        with self._db.create_session(self._engine.spec, parts=parts) as session:
            ids = torch.from_numpy(session.tokens.astype(np.int64))
        with self._turn():
            return full_answer(self._model, self._prompts.tokenizer, ids, **options)

    def _parts(self, documents: Iterable[Document], question: Text) -> list[Any]:
        """The parts of a prompt. The instruction is given as token ids, because the stored beginning of a prompt is found by its
        ids."""
        chunks = [chunk for document in documents for chunk in document.chunks]
        return [*([self._prompts.instruction] if self._prompts.instruction else []), *chunks, self._prompts.question(question)]

    def _store_chunk(self, new: NewDocument, number: int, ids: list[int]) -> str:
        """Store a chunk of a document, from 1 on. Returns its name."""
        behind = self._prompts.instruction or None
        return self._engine.store_chunk(name=new.name(number), input_ids=ids, behind=behind, **new.retention(number)).name

    def _store_instruction(self) -> None:
        """Documents are computed behind it, and prompts begin with it."""
        ids = self._prompts.instruction
        if ids:
            with suppress(AlreadyExists):  # by an engine before this one, or earlier
                self._engine.store(name=f"{self._namespace}/instruction-{digest(ids)}", input_ids=ids)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Only the caller uses the model for the time of the `with`."""
        with self._turns.mine():
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed("the RAG engine was closed; make another, it finds the documents in the database")


def _listed(docs: Any) -> list[str]:
    """Raises InvalidArgument unless the values can be ids of documents."""
    ids = list(docs) if isinstance(docs, Iterable) and not isinstance(docs, str) else None
    if ids is None or not all(isinstance(doc_id, str) and doc_id for doc_id in ids):
        raise InvalidArgument(f"docs is {docs!r}; expected a list of documents' ids, each a string that is not empty")
    return ids
