"""`KvdbSynthesizer`: answers of LlamaIndex's query engines from nodes whose KV is stored.

llm = KvdbLLM(engine=RagEngine(...))
RetrieverQueryEngine(retriever, response_synthesizer=KvdbSynthesizer(llm)).query("Who signed it?")
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from engine_adapter.llama_index.llm import KvdbLLM
from engine_adapter.rag.retrieved import Retrieved


class KvdbSynthesizer(BaseSynthesizer):  # type: ignore[misc]  # without llama-index-core its base is not known
    """Hands nodes to the engine by their ids, in the retriever's order: what is stored of them is not computed again, and one
    whose text has changed is stored anew. streaming: whether responses come piece by piece."""

    def __init__(self, llm: KvdbLLM, *, streaming: bool = False) -> None:
        super().__init__(llm=llm, streaming=streaming)

    def synthesize(
        self,
        query: str | QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """The answer from these nodes; the base's answer for none where there are none."""
        if not nodes:
            return super().synthesize(query, nodes, additional_source_nodes, **response_kwargs)
        question = query if isinstance(query, str) else query.query_str
        docs = [Retrieved(node.node.node_id, node.node.get_content(metadata_mode=MetadataMode.LLM)) for node in nodes]
        said = self._answer(question, docs, **response_kwargs)
        return self._prepare_response_output(said, [*nodes, *(additional_source_nodes or ())])

    async def asynthesize(
        self,
        query: str | QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """The same in a thread, for the model takes no part in the loop."""
        return await asyncio.to_thread(self.synthesize, query, nodes, additional_source_nodes, **response_kwargs)

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> str | Iterator[str]:
        """From texts without ids, which are stored by their digests."""
        return self._answer(query_str, [{"text": text} for text in text_chunks], **response_kwargs)

    async def aget_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> str | Iterator[str]:
        return await asyncio.to_thread(self.get_response, query_str, text_chunks, **response_kwargs)

    def _answer(self, question: str, docs: Sequence[Any], **options: Any) -> str | Iterator[str]:
        if self._streaming:
            return (piece.delta or "" for piece in self._llm.stream_complete(question, docs=docs, **options))
        return str(self._llm.complete(question, docs=docs, **options).text)

    def _get_prompts(self) -> dict[str, Any]:
        """None: the engine has the instruction, and the tokenizer the template."""
        return {}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        """Nothing is there to update."""
