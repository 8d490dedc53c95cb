"""`KvdbLLM`: a RAG engine as an LLM of LlamaIndex."""

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM

from engine_adapter.rag.answers import Usage
from engine_adapter.rag.engine import RagEngine


class KvdbLLM(CustomLLM):  # type: ignore[misc]  # without llama-index-core its base is not known
    """engine: whose prompts are chats; it stays the caller's to close. options: of every answer, as `RagEngine.chat` takes them.

    docs=, of a call, are the documents to answer from. See `KvdbSynthesizer` for a retriever's nodes.
    """

    engine: Any
    options: dict[str, Any] = {}  # noqa: RUF012  # pydantic copies it

    @property
    def metadata(self) -> LLMMetadata:
        engine: RagEngine = self.engine
        return LLMMetadata(
            model_name="kvdb",
            is_chat_model=True,
            context_window=engine.positions,
            num_output=self.options.get("max_new_tokens", 64),
        )

    @llm_chat_callback()  # type: ignore[untyped-decorator]
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        engine: RagEngine = self.engine
        answer = engine.chat(_said(messages), **{**self.options, **kwargs})
        return ChatResponse(message=_message(answer.text), raw=answer, additional_kwargs=_counts(answer.usage))

    @llm_chat_callback()  # type: ignore[untyped-decorator]
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        engine: RagEngine = self.engine
        stream = engine.stream_chat(_said(messages), **{**self.options, **kwargs})

        def responses() -> ChatResponseGen:
            text = ""
            for piece in stream:
                text += piece
                yield ChatResponse(message=_message(text), delta=piece)
            yield ChatResponse(message=_message(text), delta="", raw=stream.answer, additional_kwargs=_counts(stream.usage))

        return responses()

    @llm_completion_callback()  # type: ignore[untyped-decorator]
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        engine: RagEngine = self.engine
        answer = engine.answer(prompt, kwargs.pop("docs", ()), **{**self.options, **kwargs})
        return CompletionResponse(text=answer.text, raw=answer, additional_kwargs=_counts(answer.usage))

    @llm_completion_callback()  # type: ignore[untyped-decorator]
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        engine: RagEngine = self.engine
        stream = engine.stream(prompt, kwargs.pop("docs", ()), **{**self.options, **kwargs})

        def responses() -> CompletionResponseGen:
            text = ""
            for piece in stream:
                text += piece
                yield CompletionResponse(text=text, delta=piece)

        return responses()


def _said(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    return [{"role": message.role.value, "content": message.content or ""} for message in messages]


def _message(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=text)


def _counts(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt, "cached_tokens": usage.reused, "completion_tokens": usage.generated}
