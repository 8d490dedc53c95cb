"""The model that others trained: found where it was fetched, and asked the way it was trained to be asked."""

import pytest

import kvdb
from engine_adapter.models import pretrained
from engine_adapter.models.vault import load_from
from engine_adapter.transformers import attach

FOLDER = pretrained.real_model_folder()  # before the tests have a cache folder of their own


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvdb"


def test_a_model_that_was_not_fetched_whole_is_not_there(cache):
    folder = cache / "models" / pretrained.NAME
    folder.mkdir(parents=True)
    for name in pretrained.FILES:
        assert pretrained.real_model_folder() is None
        (folder / name).touch()
    assert pretrained.real_model_folder() == folder


def test_novels_are_there_when_they_were_fetched(cache):
    assert pretrained.novels() == ()
    folder = cache / "texts" / "austen"
    folder.mkdir(parents=True)
    (folder / "persuasion.txt").write_text("Sir Walter Elliot", encoding="utf-8")
    (folder / "emma.txt").write_text("Emma Woodhouse", encoding="utf-8")
    assert pretrained.novels() == ("Emma Woodhouse", "Sir Walter Elliot")


@pytest.mark.skipif(FOLDER is None, reason=pretrained.REASON)
def test_it_answers_in_its_chat_format_out_of_the_database():
    model, tokenizer = load_from(FOLDER)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    with kvdb.connect() as db, attach(model, db) as engine:
        told = engine.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(told, skip_special_tokens=True) == "The capital of France is Paris."
