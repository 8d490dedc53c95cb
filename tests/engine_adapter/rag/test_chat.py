"""Chats: documents stand in the tokenizer's own template, and the tokens are its own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvdb
from engine_adapter.models.pretrained import REASON, real_model_folder
from engine_adapter.rag import ChatFormat, RagEngine
from engine_adapter.rag.prompts import Prompts
from kvdb.client.client import Client
from kvdb.errors import InvalidArgument
from tests.engine_adapter.rag import chats
from tests.engine_adapter.rag.characters import Characters

MODEL = real_model_folder()
NEW = {"max_new_tokens": 8, "do_sample": False}
FORM = ChatFormat(header="[{id}] ", separator=";")
USER = {"role": "user", "content": "so?"}
TURNS = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "for"}, USER]


def prompts(template=chats.CHATML, form=FORM, instruction="Read."):
    return Prompts(chats.fast(template), 101, instruction, chat=form)


def laid_out(prompts, messages, **documents):
    """The text of a prompt of these messages and documents."""
    around = prompts.chat(messages, documents=bool(documents))
    return prompts.text(
        [*around.before, *(i for name, text in documents.items() for i in prompts.document(name, text)), *around.behind]
    )


@pytest.fixture
def chat(model, engine):
    with RagEngine(model, chats.fast(), Client(engine), chat=FORM, instruction="Read.", chunk_tokens=24) as rag:
        yield rag


def test_documents_stand_behind_the_instruction():
    assert laid_out(prompts(), TURNS, a="x", b="y") == (
        "<|start|>system\nRead.;[a] x;[b] y;<|end|>\n<|start|>user\nwhy?<|end|>\n<|start|>assistant\nfor<|end|>\n"
        "<|start|>user\nso?<|end|>\n<|start|>assistant\n"
    )


def test_documents_may_stand_in_the_users_turn():
    assert laid_out(prompts(form=ChatFormat("[{id}] ", ";", "user")), TURNS, a="x").startswith(
        "<|start|>system\nRead.<|end|>\n<|start|>user\n[a] x;why?<|end|>\n"
    )


def test_a_template_without_a_systems_turn_has_all_of_it_in_the_first_users():
    system = {"role": "system", "content": "Be kind."}
    assert laid_out(prompts(chats.NO_SYSTEM), [system, *TURNS], a="x").startswith(
        "<|start|>user\nRead.;[a] x;Be kind.;why?<|end|>\n<|start|>assistant\nfor<|end|>\n"
    )


def test_a_template_that_says_the_system_late_has_documents_in_the_users_turn():
    assert laid_out(prompts(chats.SYSTEM_LAST, instruction=""), TURNS, a="x").startswith("<|start|>[a] x;why?")


def test_what_is_before_documents_is_the_same_for_every_chat():
    system = {"role": "system", "content": "Be kind."}
    asked = [[USER], TURNS, [system, USER], [system, *TURNS], [{"role": "system", "content": "Read."}, USER]]
    for form in (FORM, ChatFormat(turn="user")):
        made = prompts(form=form)
        assert [made.chat(messages, documents=True).before for messages in asked] == [made.instruction] * len(asked)


def test_a_system_message_stands_behind_the_documents_unless_it_is_the_instruction():
    made = prompts()
    assert laid_out(made, [{"role": "system", "content": "Be kind."}, USER], a="x").startswith(
        "<|start|>system\nRead.;[a] x;Be kind.<|end|>"
    )
    assert laid_out(made, [{"role": "system", "content": "Read."}, USER], a="x") == laid_out(made, [USER], a="x")


@given(said=st.lists(st.text("ab<|>\n .", max_size=20), min_size=1, max_size=5))
def test_without_documents_the_tokens_are_the_templates_own(said):
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(said)]
    messages = messages if len(messages) % 2 else [*messages[1:], USER]
    around = prompts(instruction="").chat(messages, documents=False)
    own = chats.fast().apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert [*around.before, *around.behind] == own


@given(content=st.lists(st.sampled_from([chats.START, chats.END, "<|", "end|>", "a", "\n"]), max_size=8).map("".join))
def test_nobody_but_the_template_begins_or_ends_a_turn(content):
    made = prompts()
    harmless = [{"role": "user", "content": "x"}]
    turns = [i for i in made.chat(harmless, documents=True).behind if i < 2]
    around = made.chat([{"role": "user", "content": content}], documents=True)
    assert [i for i in around.behind if i < 2] == turns
    assert not [i for i in made.document(f"a{content}", f"x{content}") if i < 2]
    assert made.text(made.document(f"a{content}", f"x{content}")) == f"[a{content}] x{content};"


def test_a_header_may_hold_control_tokens_of_the_application():
    made = prompts(form=ChatFormat(header="<|start|>{id}\n", separator="<|end|>"))
    ids = made.document("<|end|>", "<|end|>")
    assert [i for i in ids if i < 2] == [0, 1]
    assert made.text(ids) == "<|start|><|end|>\n<|end|><|end|>"
    assert made.document("a", chats.fast().encode("x")) == made.document("a", "x")


def test_variables_of_the_template():
    assert laid_out(prompts(form=ChatFormat(variables={"think": True})), [USER]).endswith("assistant\n<think>")


def test_a_content_in_parts():
    parts = [{"type": "text", "text": "s"}, {"type": "text", "text": "o?"}]
    assert laid_out(prompts(), [{"role": "user", "content": parts}]) == laid_out(prompts(), [USER])


def test_with_everything_recomputed_a_chat_is_a_full_prefill(chat, model, write):
    documents = {f"doc {i}": write(20 + 20 * i, seed=i) for i in range(3)}
    for doc_id, text in documents.items():
        chat.add(doc_id, text)
    for messages in ([USER], TURNS):
        answer = chat.chat(messages, list(documents), recompute=1, **NEW)
        ids = torch.tensor([chats.fast().encode(laid_out(prompts(), messages, **documents), add_special_tokens=False)])
        whole = model.generate(ids, **NEW, eos_token_id=1)
        assert answer.tokens == tuple(whole[0, ids.shape[1] :].tolist())
        assert answer.usage.prompt == ids.shape[1]


def test_a_chat_reuses_the_instruction_and_its_documents(chat, write):
    chat.add("one", write(60))
    usage = chat.chat(TURNS, ["one"], recompute=0, **NEW).usage
    assert usage.fresh == len(prompts().chat(TURNS, documents=True).behind)
    assert chat.chat(TURNS, recompute=0, **NEW).usage.reused >= len("Read.")


def test_a_question_is_a_message_of_a_user(chat, write):
    chat.add("one", write(60))
    assert chat.answer("so?", ["one"], **NEW).tokens == chat.chat([USER], ["one"], **NEW).tokens
    stream = chat.stream_chat([USER], ["one"], **NEW)
    assert "".join(stream) == stream.text == chat.answer("so?", ["one"], **NEW).text
    (row, *_) = chat.check([("so?", ["one"])], [1.0], max_new_tokens=4).rows
    assert row.same == 1


def test_an_answer_ends_with_the_turn(chat, model, write):
    chat.add("one", write(60))
    said = chat.chat([USER], ["one"], **NEW).tokens
    chats.fast().eos_token_id, known = said[2], 1
    try:
        assert chat.chat([USER], ["one"], **NEW).tokens == said[: said.index(said[2]) + 1]
    finally:
        chats.fast().eos_token_id = known


@pytest.mark.parametrize(
    "messages",
    [
        *(None, [], "so?", USER, [{}], [["user", "so?"]], [USER, {"role": "assistant", "content": "x"}]),
        *([{"role": "user"}], [{"content": "so?"}], [{"role": "", "content": ""}], [{"role": "user", "content": 7}]),
        [{"role": "user", "content": [{"type": "image"}]}],
    ],
)
def test_messages_that_cannot_be(chat, messages):
    with pytest.raises(InvalidArgument, match=r"messages|message"):
        chat.chat(messages, **NEW)


def test_a_question_is_a_chat_where_the_tokenizer_has_a_template(model, engine):
    asked = {"docs": [{"id": "a", "text": "some text of words"}], "do_sample": False, "recompute": 1.0, **NEW}
    answers = []
    for chat in (None, True, False):
        with RagEngine(model, chats.fast(), Client(engine), chat=chat, instruction="Read.", namespace=f"rag-{chat}") as rag:
            answers.append(rag.answer("why?", **asked))
    told, chatted, plain = answers
    assert (told.tokens, told.usage.prompt) == (chatted.tokens, chatted.usage.prompt)
    assert told.usage.prompt > plain.usage.prompt == len("Read.some text of wordswhy?")


@pytest.mark.parametrize(
    "own", [{"template": "Q: {question}"}, {"instruction": [5, 6]}, {"instruction": "<|start|>system"}, {"chat": False}]
)
def test_a_prompt_of_the_callers_own_form_is_no_chat(model, engine, own):
    with (
        RagEngine(model, chats.fast(), Client(engine), **own) as rag,
        pytest.raises(InvalidArgument, match="leave chat= out, or make it with chat=True"),
    ):
        rag.chat([USER], **NEW)


def test_messages_that_the_template_does_not_take():
    with pytest.raises(InvalidArgument, match="does not take these messages: no system role"):
        prompts(chats.NO_SYSTEM).chat([USER, {"role": "system", "content": "x"}, USER], documents=True)
    with pytest.raises(InvalidArgument, match="no message is a user's"):
        prompts(chats.NO_SYSTEM).chat([{"role": "tool", "content": "x"}], documents=True)


def test_templates_without_a_place_for_documents(model, engine, make_rag):
    for template in (chats.NOWHERE, "{{ raise_exception('never') }}"):
        with pytest.raises(InvalidArgument, match="no place for documents"):
            prompts(template)
    with pytest.raises(InvalidArgument, match="system that is the same for every chat"):
        prompts(chats.SYSTEM_LAST, ChatFormat(turn="system"))
    with pytest.raises(InvalidArgument, match="no chat template"):
        RagEngine(model, Characters(), Client(engine), chat=True)
    for wrong in ({"chat": 7}, {"chat": ChatFormat(turn="tool")}, {"chat": True, "template": "Q: {question}"}):
        with pytest.raises(InvalidArgument, match="chat|turn"):
            RagEngine(model, chats.fast(), Client(engine), **wrong)
    with pytest.raises(InvalidArgument, match="expected a string"):
        RagEngine(model, chats.fast(), Client(engine), chat=True, instruction=[1, 2])
    with pytest.raises(InvalidArgument, match="or make it with chat=True"):
        make_rag().chat([USER], **NEW)


def test_a_chat_goes_on_over_a_store_that_is_opened_again(model, tmp_path, write):
    docs = [{"id": "a", "text": write(60)}, {"id": "b", "text": write(50, seed=1)}]
    read, answers = [], []
    for _ in range(2):
        tokens = []
        with kvdb.connect(str(tmp_path)) as db, RagEngine(model, chats.fast(), db, chat=FORM, instruction="Read.") as rag:
            hook = model.get_input_embeddings().register_forward_hook(
                lambda _, ids, __, tokens=tokens: tokens.append(ids[0].numel())
            )
            answers.append(rag.chat(TURNS, docs, recompute=0, **NEW))
            hook.remove()
        read.append(sum(tokens))
    made = prompts()
    assert answers[0].tokens == answers[1].tokens
    assert read[1] == len(made.chat(TURNS, documents=True).behind) + answers[1].usage.generated - 1
    assert read[0] - read[1] == sum(len(made.document(doc["id"], doc["text"])) for doc in docs)


@pytest.mark.skipif(MODEL is None, reason=REASON)
def test_a_real_model_answers_from_documents_and_history():
    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    bridge = {"id": "a", "text": "The bridge at Harlow was built in 1931 by Ann Keller. <|im_end|> It is blue."}
    asked = [{"role": "user", "content": "Who built the bridge?"}]
    with kvdb.connect() as db, RagEngine(model.eval(), tokenizer, db, chat=True, instruction="Answer from the documents.") as rag:
        answer = rag.chat(
            asked, [bridge, {"id": "b", "text": "The mill of Orton burnt in 1899."}], max_new_tokens=24, do_sample=False
        )
        assert "Ann Keller" in answer.text
        assert answer.tokens[-1] == tokenizer.eos_token_id
        said = [*asked, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "When did the mill burn?"}]
        assert "1899" in rag.chat(said, ["b", "a"], max_new_tokens=24, do_sample=False).text


@pytest.mark.skipif(MODEL is None, reason=REASON)
def test_the_tokens_are_those_of_a_real_template():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    made = Prompts(tokenizer, len(tokenizer), "Answer from the documents.", chat=ChatFormat())
    whole = [{"role": "system", "content": "Answer from the documents.\n\nDocument a:\nThe mill burnt.\n\n"}, *TURNS]
    around = made.chat(TURNS, documents=True)
    ids = [*around.before, *made.document("a", "The mill burnt."), *around.behind]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    plain = made.chat([{"role": "system", "content": "Answer from the documents."}, *TURNS], documents=False)
    own = [{"role": "system", "content": "Answer from the documents."}, *TURNS]
    assert plain.behind == tokenizer.apply_chat_template(own, add_generation_prompt=True)["input_ids"]
