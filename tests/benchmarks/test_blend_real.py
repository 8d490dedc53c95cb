"""The prompts of the benchmark on a pretrained model."""

import json

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.blend_real import MIXES, PROFILES, QUESTIONS, mixes, shortened

KNOWN = json.loads(PROFILES.read_text(encoding="utf-8"))


@given(st.integers(0, 1000))
def test_every_question_is_asked_once_of_a_document_that_is_there(seed):
    made = mixes(KNOWN, MIXES, seed)
    asked = [question for mix in made for question in mix.questions]
    assert len(asked) == len(set(asked)) == MIXES * QUESTIONS
    for mix in made:
        assert len(mix.names) == len(set(mix.names)) in (QUESTIONS, QUESTIONS + 1)
        assert all(any(question in KNOWN[name]["questions"] for name in mix.names) for question in mix.questions)


@given(st.sampled_from(sorted(KNOWN)), st.integers(300, 3000))
def test_a_shortened_text_ends_with_a_sentence(name, characters):
    text = KNOWN[name]["text"]
    short = shortened(text, characters)
    assert text.startswith(short)
    assert short.endswith(".")
    assert len(short) <= characters
    assert shortened(text, None) == text
