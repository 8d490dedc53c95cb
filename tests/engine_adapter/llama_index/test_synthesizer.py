"""LlamaIndex's query engines over a RAG engine, with LlamaIndex's own classes."""

import asyncio

import pytest

from tests.engine_adapter.rag.adapters import wanted

NEW = {"max_new_tokens": 8, "do_sample": False, "recompute": 1.0}


@pytest.fixture(scope="module", autouse=True)
def _llama_index():
    wanted("llama_index")


@pytest.fixture
def llm(rag):
    from engine_adapter.llama_index.llm import KvdbLLM

    return KvdbLLM(engine=rag, options=NEW)


@pytest.fixture
def retriever():
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, TextNode

    class Known(BaseRetriever):
        def __init__(self):
            super().__init__()
            self.texts = {"a": "some text of words", "b": "more of it"}

        def _retrieve(self, bundle):
            wanted = self.texts if bundle.query_str == "so?" else {}
            return [NodeWithScore(node=TextNode(id_=name, text=text), score=1.0) for name, text in wanted.items()]

    return Known()


def query_engine(retriever, llm, **settings):
    from llama_index.core.query_engine import RetrieverQueryEngine

    from engine_adapter.llama_index.synthesizer import KvdbSynthesizer

    return RetrieverQueryEngine(retriever, response_synthesizer=KvdbSynthesizer(llm, **settings))


def test_a_query_is_answered_from_nodes_by_their_ids(rag, llm, retriever):
    response = query_engine(retriever, llm).query("so?")
    assert [info.id for info in rag.documents()] == ["a", "b"]
    assert response.response == rag.answer("so?", ["a", "b"], **NEW).text
    assert [node.node.node_id for node in response.source_nodes] == ["a", "b"]
    assert query_engine(retriever, llm).query("why?").response == "Empty Response"


def test_a_node_whose_text_changed_is_stored_anew(rag, llm, retriever):
    engine = query_engine(retriever, llm)
    engine.query("so?")
    retriever.texts = {"b": "another text", "a": "some text of words"}
    said = engine.query("so?").response
    rag.add("c", "another text")
    assert {info.id: info.tokens for info in rag.documents()}["b"] == len("[b] another text;")
    assert said == rag.answer("so?", ["b", "a"], **NEW).text


def test_in_pieces_and_in_a_loop(rag, llm, retriever):
    whole = query_engine(retriever, llm).query("so?").response
    streamed = query_engine(retriever, llm, streaming=True).query("so?")
    assert "".join(streamed.response_gen) == whole
    assert asyncio.run(query_engine(retriever, llm).aquery("so?")).response == whole


def test_texts_without_ids(rag, llm):
    from engine_adapter.llama_index.synthesizer import KvdbSynthesizer

    said = KvdbSynthesizer(llm).get_response("so?", ["some text"])
    assert said == rag.answer("so?", [{"text": "some text"}], **NEW).text


def test_it_is_an_llm(rag, llm):
    from llama_index.core.llms import ChatMessage

    messages = [ChatMessage("why?"), ChatMessage("for", role="assistant"), ChatMessage("so?")]
    said = rag.chat([{"role": m.role.value, "content": m.content} for m in messages], **NEW)
    response = llm.chat(messages)
    assert response.message.content == said.text
    assert response.additional_kwargs["prompt_tokens"] == said.usage.prompt
    *_, last = llm.stream_chat(messages)
    assert last.message.content == said.text
    assert llm.complete("so?").text == "".join(piece.delta for piece in llm.stream_complete("so?"))
    assert llm.metadata.context_window == 1024
