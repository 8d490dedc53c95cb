"""The requests of a scheduler: what is loaded, what is saved, and when."""

import numpy as np
import pytest

from engine_adapter.vllm.requests import Requests, Step


class Store:
    """How many tokens are stored, and how often somebody asked."""

    def __init__(self, stored=0):
        self.stored = stored
        self.asked = []

    def find(self, tokens, salt):
        self.asked.append((len(tokens), salt))
        return min(self.stored, len(tokens))


PROMPT = list(range(40))


def begin(stored, *, computed=0):
    """A request of 40 tokens in blocks of 16, of which some are stored."""
    store = Store(stored)
    requests = Requests(store.find, 16)
    external = requests.match("r", PROMPT, 40, "", computed)
    requests.allocate("r", [7, 3, 9], external)
    return requests, store, external


def test_a_hit_may_end_inside_a_block():
    requests, _, external = begin(20)
    assert external == 20
    requests.schedule("r", 20, 20, [7, 3, 9], all_blocks=True)
    (load,), (save,) = (step := requests.take_step()).loads, step.saves
    assert (load.start, load.stop, load.blocks, load.span(16)) == (0, 20, (7, 3), (7, 3))
    assert np.array_equal(load.tokens, PROMPT[:20])
    assert (save.start, save.stop, save.blocks, save.span(16)) == (20, 40, (7, 3, 9), (3, 9))
    assert requests.take_step() == Step()


def test_the_last_token_is_left_to_vllm():
    requests, _, external = begin(40)
    assert external == 39
    requests.schedule("r", 39, 1, [7, 3, 9], all_blocks=True)
    assert requests.take_step().saves == (), "all of it is stored"


def test_what_vllm_has_itself_is_not_loaded():
    requests, _, external = begin(20, computed=16)
    assert external == 4
    (load,) = requests.take_step().loads
    assert (load.start, load.stop, load.span(16)) == (16, 20, (3,))
    assert begin(20, computed=32)[2] == 0


def test_the_database_is_asked_once_while_a_request_waits():
    store = Store(20)
    requests = Requests(store.find, 16)
    for _ in range(30):
        assert requests.match("r", PROMPT, 40, "tenant", 0) == 20
    assert store.asked == [(40, "tenant")]


def test_a_prompt_in_chunks_is_saved_once_it_is_whole():
    requests, _, _ = begin(0)
    requests.schedule("r", 0, 16, [7], all_blocks=True)
    assert requests.take_step() == Step()
    requests.schedule("r", 16, 16, [3], all_blocks=False)
    assert requests.take_step() == Step()
    requests.schedule("r", 32, 8, [9], all_blocks=False)
    (save,) = requests.take_step().saves
    assert (save.start, save.stop, save.blocks) == (0, 40, (7, 3, 9))
    requests.schedule("r", 40, 1, [], all_blocks=False)
    assert requests.take_step() == Step()


def test_a_preempted_request_is_looked_up_with_what_it_generated():
    requests, store, _ = begin(0)
    requests.schedule("r", 0, 40, [7, 3, 9], all_blocks=True)
    requests.take_step()
    store.stored = 40
    assert requests.match("r", [*PROMPT, 5, 6], 40, "", 0) == 40
    requests.allocate("r", [1, 2, 4], 40)
    requests.schedule("r", 40, 2, [1, 2, 4], all_blocks=True)
    step = requests.take_step()
    assert [(load.stop, load.blocks) for load in step.loads] == [(40, (1, 2, 4))]
    assert step.saves == ()


def test_what_failed_to_load_is_saved_whole():
    requests, _, _ = begin(20)
    requests.schedule("r", 20, 20, [7, 3, 9], all_blocks=True)
    requests.take_step()
    requests.distrust({3})
    requests.schedule("r", 0, 40, [], all_blocks=False)
    (save,) = requests.take_step().saves
    assert (save.start, save.stop) == (0, 40)


@pytest.mark.parametrize("end", ["forget", "never"])
def test_requests_that_are_not_known_are_left_alone(end):
    requests, _, _ = begin(0)
    if end == "forget":
        requests.forget({"r", "another"})
        requests.schedule("r", 0, 40, [7, 3, 9], all_blocks=True)
    requests.allocate("x", [1], 0)
    requests.schedule("x", 0, 40, [1], all_blocks=True)
    assert requests.take_step() == Step()


def decoding(tokens, *, decodes_from=16):
    """The steps of a request of 40 tokens whose decode steps a worker is told of."""
    requests = Requests(Store().find, 16, decodes_from)
    requests.match("r", PROMPT[:tokens], tokens, "salt", 0, expected=100)
    requests.allocate("r", [7, 3, 9], 0)
    requests.schedule("r", 0, tokens, [7, 3, 9], all_blocks=True)
    assert requests.take_step().decodes == (), "it is the prompt"
    return requests


def test_decode_steps_of_long_requests_are_told():
    requests = decoding(40)
    requests.schedule("r", 40, 1, (), all_blocks=False)
    (decode,) = requests.take_step().decodes
    assert (decode.request, decode.salt, decode.computed, decode.blocks) == ("r", "salt", 40, (7, 3, 9))
    assert decode.expected == 100
    assert np.array_equal(decode.tokens, PROMPT)
    requests.schedule("r", 48, 1, [4], all_blocks=False)
    assert requests.take_step().decodes[0].blocks == (7, 3, 9, 4)


@pytest.mark.parametrize("decodes_from", [41, None])
def test_other_decode_steps_are_not_told(decodes_from):
    requests = decoding(40, decodes_from=decodes_from)
    requests.schedule("r", 40, 1, (), all_blocks=False)
    assert requests.take_step() == Step()


def test_the_last_piece_of_a_prompt_is_no_decode_step():
    requests = Requests(Store().find, 16, 16)
    requests.match("r", PROMPT, 40, "", 0)
    requests.schedule("r", 39, 1, [7, 3, 9], all_blocks=True)
    assert requests.take_step().decodes == ()


@pytest.mark.parametrize("end", ["forget", "preempt"])
def test_requests_that_end_or_lose_their_blocks_are_told_once(end):
    requests = decoding(40)
    getattr(requests, end)({"r"})
    assert requests.take_step().ended == {"r"}
    assert requests.take_step().ended == frozenset()


def test_a_request_that_waits_is_loaded_behind_the_step():
    requests = Requests(Store(20).find, 16, background=True)
    requests.allocate("r", [7, 3, 9], requests.match("r", PROMPT, 40, "", 0))
    step = requests.take_step()
    assert step.loads == ()
    assert [(load.request, load.start, load.stop) for load in step.background] == [("r", 0, 20)]


def test_an_answer_is_saved_but_for_its_last_token():
    requests, _, _ = begin(0)
    requests.schedule("r", 0, 40, [7, 3, 9], all_blocks=True)
    requests.take_step()
    assert requests.end("r", [*PROMPT, 5, 6, 8], [7, 3, 9])
    requests.forget({"r"})
    (tail,) = requests.take_step().tails
    assert (tail.start, tail.stop, tail.blocks) == (40, 42, (7, 3, 9))
    assert np.array_equal(tail.tokens, [*PROMPT, 5, 6])
    assert not requests.end("r", [*PROMPT, 5, 6, 8], [7, 3, 9]), "it is not known any more"


def test_an_answer_of_one_token_has_nothing_to_save():
    requests, _, _ = begin(0)
    assert not requests.end("r", [*PROMPT, 5], [7, 3, 9])
