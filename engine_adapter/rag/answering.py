"""Answers questions: lays prompts out of documents, and has the model decode behind them."""

from collections.abc import Callable, Iterable, Sequence
from threading import Event
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from engine_adapter.rag.adding import Adding
from engine_adapter.rag.answers import Answer, Pieces, answer_of
from engine_adapter.rag.attached import AttachedModel
from engine_adapter.rag.check import FullAnswer
from engine_adapter.rag.document import Document
from engine_adapter.rag.documents import Documents
from engine_adapter.rag.forcing import Forced
from engine_adapter.rag.plain import full_answer
from engine_adapter.rag.prompts import Around, Prompts
from engine_adapter.rag.retrieved import Retrieved
from engine_adapter.rag.stream import Stop
from kvdb.blend.strategies import Recompute
from kvdb.types import Float32

Asked = Callable[[bool], Around]
"""What stands around the documents of a question; it is called with whether there are any."""


class Answering:
    """Answers from the documents of an engine. Thread-safe."""

    def __init__(self, attached: AttachedModel, prompts: Prompts, documents: Documents, adding: Adding) -> None:
        self._attached = attached
        self._prompts = prompts
        self._documents = documents
        self._adding = adding

    def answer(
        self,
        asked: Asked,
        docs: Sequence[Retrieved],
        recompute: float | Recompute | None,
        stream: Callable[[str], object] | None,
        stop: Event | None,
        **options: Any,
    ) -> Answer:
        """See `RagEngine.answer`. stop: ends the answer at the next token once it is set."""
        self._attached.check_open()
        options = {**self.ends(), **options, "recompute": Recompute.of(recompute)}
        if stream is not None:
            options["streamer"] = Pieces(self._prompts.tokenizer, stream)
        if stop is not None:
            options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), Stop(stop)])
        around = asked(bool(docs))
        self._upsert(docs)
        with self._attached.turn() as engine:
            parts = _parts(around, self._documents.read([doc.id for doc in docs]))
            out = engine.generate(parts=parts, **options)
            report = engine.last
        assert report is not None
        sequence = (out if isinstance(out, torch.Tensor) else out.sequences)[0]
        prompt = len(sequence) - report.generated
        return answer_of(self._prompts.tokenizer, sequence[prompt:].tolist(), prompt, report, self._attached.spec.layers)

    def ends(self) -> dict[str, Any]:
        """The options that end an answer: in a chat where a turn of the tokenizer ends, and where the model ends a text."""
        return {"eos_token_id": sorted(self.end_tokens)} if self._turn_end is not None else {}

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end an answer."""
        configured = self._attached.model.generation_config.eos_token_id
        known = configured if isinstance(configured, list) else [configured]
        return frozenset(token for token in (self._turn_end, *known) if token is not None)

    @property
    def _turn_end(self) -> int | None:
        """The token with which a turn of a chat ends, None where prompts are no chats or nothing is known of it."""
        return getattr(self._prompts.tokenizer, "eos_token_id", None) if self._prompts.is_chat else None

    def fed(self, asked: Asked, docs: Sequence[Retrieved], ratio: float | None, tokens: Sequence[int], **options: Any) -> Float32:
        """Log probabilities at each token of an answer that is fed, float32 `[tokens, vocabulary]`."""
        forced = Forced(tokens)
        processors = LogitsProcessorList([*options.get("logits_processor", ()), forced])
        self.answer(asked, docs, ratio, None, None, **{**options, "logits_processor": processors, "max_new_tokens": len(tokens)})
        return forced.log_probabilities

    def full(self, asked: Asked, docs: Sequence[Retrieved], **options: Any) -> FullAnswer:
        """The answer of the same model without kvdb, which reads the whole prompt."""
        self._attached.check_open()
        around = asked(bool(docs))
        self._upsert(docs)
        parts = _parts(around, self._documents.read([doc.id for doc in docs]))
        with self._attached.db.create_session(self._attached.spec, parts=parts) as session:
            ids = torch.from_numpy(session.tokens.astype(np.int64))
        with self._attached.turn():
            return full_answer(self._attached.model, self._prompts.tokenizer, ids, **options)

    def _upsert(self, docs: Sequence[Retrieved]) -> None:
        """Add the documents that come with a text, without letting any of the others go."""
        texts = {doc.id: doc.text for doc in docs if doc.text is not None}
        beside = {doc.id for doc in docs}
        for doc_id, text in texts.items():
            self._adding.upsert(doc_id, text, beside=beside)


def _parts(around: Around, documents: Iterable[Document]) -> list[Any]:
    """The parts of a prompt. What stands before documents is given as token ids, because the stored beginning of a prompt is
    found by its ids."""
    chunks = [chunk for document in documents for chunk in document.chunks]
    return [*([around.before] if around.before else []), *chunks, around.behind]
