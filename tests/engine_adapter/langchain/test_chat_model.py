"""LangChain's chains over a RAG engine, with LangChain's own classes."""

import asyncio

import pytest

from tests.engine_adapter.rag.adapters import wanted

NEW = {"max_new_tokens": 8, "do_sample": False, "recompute": 1.0}


@pytest.fixture(scope="module", autouse=True)
def _langchain():
    wanted("langchain_core")


@pytest.fixture
def chat(rag):
    from engine_adapter.langchain.chat_model import KvdbChatModel

    return KvdbChatModel(engine=rag, options=NEW)


@pytest.fixture
def found():
    from langchain_core.documents import Document

    return [Document(id="a", page_content="some text of words"), Document(page_content="more of it")]


def messages():
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

    return [SystemMessage("Be kind."), HumanMessage("why?"), AIMessage("for"), HumanMessage("so?")]


SAID = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "for"},
    {"role": "user", "content": "so?"},
]


def test_an_answer_is_the_engines(chat, rag, found):
    message = chat.invoke(messages(), docs=found)
    answer = rag.chat(SAID, ["a", {"text": "more of it"}], **NEW)
    assert message.content == answer.text
    assert message.usage_metadata["input_tokens"] == answer.usage.prompt
    assert message.usage_metadata["output_tokens"] == answer.usage.generated
    assert message.usage_metadata["input_token_details"]["cache_read"] == answer.usage.reused > 0
    assert rag.documents()[0].id == "a"


def test_an_answer_in_pieces(chat, found):
    pieces = list(chat.stream(messages(), docs=found))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    message = chat.invoke(messages(), docs=found)
    assert whole.content == message.content
    assert len(pieces) > 2
    assert whole.usage_metadata["total_tokens"] == message.usage_metadata["total_tokens"]


def test_documents_may_come_with_a_message(chat, rag, found):
    from langchain_core.messages import HumanMessage

    given = HumanMessage("so?", additional_kwargs={"documents": [*found, "known"]})
    rag.add("known", "a known text")
    said = chat.invoke([given]).content
    assert said == rag.chat([SAID[3]], ["a", {"text": "more of it"}, "known"], **NEW).text


def test_a_chain_with_a_retriever(chat, rag, found):
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.retrievers import BaseRetriever

    from engine_adapter.langchain.chat_model import answer_from

    class Known(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return found if query == "so?" else []

    chain = answer_from(Known(), chat)
    text = chain.invoke("so?").content
    expected = rag.chat([SAID[3]], ["a", {"text": "more of it"}], **NEW)
    assert text == expected.text
    assert "".join(piece.content for piece in chain.stream("so?")) == text
    template = ChatPromptTemplate.from_messages([("system", "Be kind."), ("user", "why?"), ("ai", "for"), ("user", "{question}")])
    piped = template | chain
    assert piped.invoke({"question": "so?"}).content == rag.chat(SAID, ["a", {"text": "more of it"}], **NEW).text


def test_an_answer_ends_at_a_stop_sequence(chat, found):
    whole = chat.invoke(messages(), docs=found).content
    stop = whole[3:5]
    cut = whole[: whole.index(stop)]
    assert chat.invoke(messages(), docs=found, stop=[stop]).content == cut
    assert "".join(piece.content for piece in chat.stream(messages(), docs=found, stop=[stop])) == cut


def test_many_at_once_and_in_a_loop(chat, found):
    whole = chat.invoke(messages(), docs=found).content
    assert [message.content for message in chat.batch([messages()] * 3, docs=found)] == [whole] * 3
    assert asyncio.run(chat.ainvoke(messages(), docs=found)).content == whole
