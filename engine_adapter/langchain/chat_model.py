"""`KvdbChatModel`: a RAG engine as a chat model of LangChain, which takes a retriever's documents beside the messages.

model = KvdbChatModel(engine=RagEngine(...))
model.invoke("Who signed it?", docs=retriever.invoke("Who signed it?"))
answer_from(retriever, model).invoke("Who signed it?")
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableLambda

from engine_adapter.rag.answers import Usage
from engine_adapter.rag.engine import RagEngine
from engine_adapter.rag.retrieved import Doc

DOCUMENTS = "documents"


class KvdbChatModel(BaseChatModel):  # type: ignore[misc]  # without langchain-core its base is not known
    """engine: whose prompts are chats; it stays the caller's to close. options: of every answer, as `RagEngine.chat` takes them.

    Documents are given to a call as docs=, by ids or as LangChain's documents, or as "documents" in the additional_kwargs of
    messages. One with a text is stored under its id, and only what is new of it is computed.
    """

    engine: Any
    options: dict[str, Any] = {}  # noqa: RUF012  # pydantic copies it

    @property
    def _llm_type(self) -> str:
        return "kvdb"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        *,
        docs: Iterable[Any] = (),
        **kwargs: Any,
    ) -> ChatResult:
        engine: RagEngine = self.engine
        if stop:
            kwargs |= {"stop_strings": stop, "tokenizer": engine.tokenizer}
        options = {**self.options, **kwargs}
        answer = engine.chat(convert_to_openai_messages(messages), [*map(doc_of, docs), *_documents(messages)], **options)
        text = _until(answer.text, stop or ())
        message = AIMessage(text, usage_metadata=_usage(answer.usage), response_metadata={"usage": str(answer.usage)})
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        *,
        docs: Iterable[Any] = (),
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        """One piece alone where there are stop sequences, of which no part may come out."""
        if stop:
            (whole,) = self._generate(messages, stop, run_manager, docs=docs, **kwargs).generations
            yield ChatGenerationChunk(message=AIMessageChunk(**whole.message.model_dump(exclude={"type", "tool_calls"})))
            return
        engine: RagEngine = self.engine
        listed = [*map(doc_of, docs), *_documents(messages)]
        stream = engine.stream_chat(convert_to_openai_messages(messages), listed, **{**self.options, **kwargs})
        for piece in stream:
            chunk = ChatGenerationChunk(message=AIMessageChunk(piece))
            if run_manager is not None:
                run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        yield ChatGenerationChunk(message=AIMessageChunk("", usage_metadata=_usage(stream.usage), chunk_position="last"))


def answer_from(retriever: Runnable[str, list[Document]], model: KvdbChatModel) -> Runnable[LanguageModelInput, BaseMessage]:
    """A runnable that answers the last of some messages, or a question, from what the retriever finds for it."""

    def answer(given: LanguageModelInput, **options: Any) -> Iterator[BaseMessage]:
        messages = given.to_messages() if isinstance(given, PromptValue) else given
        last = messages if isinstance(messages, str) else convert_to_openai_messages(messages)[-1]["content"]
        yield from model.stream(messages, docs=retriever.invoke(str(last)), **options)

    return RunnableLambda(answer)


def doc_of(given: Any) -> Doc:
    """LangChain's document as the engine takes it; anything else as it is."""
    return {"id": given.id, "text": given.page_content} if isinstance(given, Document) else given


def _documents(messages: Iterable[BaseMessage]) -> list[Doc]:
    return [doc_of(doc) for message in messages for doc in message.additional_kwargs.get(DOCUMENTS, ())]


def _until(text: str, stop: Iterable[str]) -> str:
    """The text up to the first stop sequence in it."""
    return text[: min((text.index(end) for end in stop if end in text), default=len(text))]


def _usage(usage: Usage) -> UsageMetadata:
    details: Mapping[str, int] = {"cache_read": usage.reused}
    total = usage.prompt + usage.generated
    return UsageMetadata(
        input_tokens=usage.prompt, output_tokens=usage.generated, total_tokens=total, input_token_details=dict(details)
    )
