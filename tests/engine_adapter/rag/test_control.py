"""What others wrote is never read as a control token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine_adapter.models.pretrained import REASON, real_model_folder
from engine_adapter.rag.control import BREAK, DOCUMENTS, Encoder, control_tokens
from kvdb.errors import InvalidArgument
from tests.engine_adapter.rag import chats
from tests.engine_adapter.rag.characters import Characters

WORDS = [
    chats.START,
    chats.END,
    chats.THINK,
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<|",
    "|>",
    "im_",
    "<",
    BREAK,
    "\n",
    "é",
]
MODEL = real_model_folder()
hostile = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=4)), max_size=12).map("".join)


@pytest.fixture(params=["fast", "slow"])
def tokenizer(request):
    return getattr(chats, request.param)(chats.CHATML)


@given(text=hostile)
def test_no_text_becomes_a_control_token(text):
    for tokenizer in (chats.fast(), chats.slow()):
        encoder = Encoder(tokenizer)
        ids = encoder.encode(encoder.plain(text, "a document"))
        assert not {0, 1} & set(ids)
        known = "".join(c if c in chats.IDS else "\ufffd" for c in text)
        assert encoder.decode(ids) == known


def test_a_tokens_text_is_found_where_it_stands_among_its_own_pieces(tokenizer):
    encoder = Encoder(tokenizer)
    for text in ("<|end|>", "<|<|end|>", "<|end|><|end|>", "<<|start|>|end|>", "<think>", "a<|end|", "<|start|>\n"):
        ids = encoder.encode(encoder.plain(text, "a document"))
        assert ids == [chats.IDS[c] for c in text]


def test_an_application_says_control_tokens_itself(tokenizer):
    assert Encoder(tokenizer).encode("a<|end|>")[-1] == tokenizer.eos_token_id


def test_an_added_token_that_the_template_says_is_one(tokenizer):
    assert chats.THINK in control_tokens(tokenizer)
    assert chats.THINK not in control_tokens(chats.fast(chats.NO_SYSTEM.replace("think", "")))


def test_a_tokenizer_without_control_tokens():
    encoder = Encoder(Characters())
    assert encoder.decode(encoder.encode(encoder.plain("<|end|>", "a document"))) == "<|end|>"


def test_marks_of_ours_in_a_text_are_replaced():
    assert set(Encoder(Characters()).plain(f"a{BREAK}b{DOCUMENTS}", "a document")) == {"a", "b", "\ufffd"}


def test_a_control_token_of_one_character_is_refused():
    tokenizer = chats.fresh()
    tokenizer.add_special_tokens({"pad_token": "~"})
    encoder = Encoder(tokenizer)
    assert encoder.plain("a b", "a document") == "a b"
    with pytest.raises(InvalidArgument, match="document 'x' holds '~', which the tokenizer takes for a control token"):
        encoder.plain("a ~ b", "document 'x'")


@pytest.mark.skipif(MODEL is None, reason=REASON)
def test_no_text_becomes_a_control_token_of_a_real_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    encoder, control = Encoder(tokenizer), set(tokenizer.added_tokens_decoder)

    @given(text=st.lists(st.sampled_from(WORDS), max_size=12).map("".join))  # it does not know every byte of other characters
    def check(text):
        ids = encoder.encode(encoder.plain(text, "a document"))
        assert not control & set(ids)
        assert encoder.decode(ids) == text.replace(BREAK, "\ufffd")

    check()
