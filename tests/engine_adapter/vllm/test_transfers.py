"""Between blocks and kvdb: what is saved is loaded, and what fails is said."""

import os
import sys
from threading import get_native_id

import numpy as np
import pytest
import torch

from engine_adapter.vllm.journal import Journal
from engine_adapter.vllm.loads import BackgroundLoads, Filling, Loads
from engine_adapter.vllm.requests import Transfer
from engine_adapter.vllm.saves import Saves
from tests.engine_adapter.vllm.conftest import BLOCK

FIRST, SECOND = (9, 2, 5), (1, 8, 3)


@pytest.fixture
def kv(make_kv, spec):
    return make_kv(spec, 40)


@pytest.fixture
def journal():
    return Journal()


@pytest.fixture
def saves(contexts, layout, spec, packing, kv, journal):
    """Its caches hold all 40 tokens, for those that are copied at once."""
    caches = {layer: packing.filled(kv.k[layer], kv.v[layer], FIRST) for layer in range(spec.layers)}
    opened = Saves(contexts, layout, caches, journal)
    yield opened
    opened.close()


@pytest.fixture
def save(saves, packing, kv, spec):
    """`save(start, stop)` saves a range of the 40 tokens as a step does."""

    def act(start, stop, *, failed=(), layers=spec.layers, salt=""):
        saves.begin([Transfer("r", kv.tokens[:stop], salt, start, stop, FIRST)])
        for layer in range(layers):
            saves.take(layer, packing.filled(kv.k[layer], kv.v[layer], FIRST))
        saves.finish(frozenset(failed))
        saves.wait()

    return act


@pytest.fixture
def load(contexts, layout, packing, spec, journal):
    """`load(transfer)` loads into fresh caches. Returns these and the blocks that failed."""

    def act(*transfers):
        caches = {layer: packing.cache() for layer in range(spec.layers)}
        loads = Loads(Filling(contexts, layout, caches, journal))
        loads.begin(transfers)
        for layer in caches:
            loads.wait(layer)
        failed = loads.finish()
        loads.close()
        return caches, failed

    return act


def test_what_is_saved_is_loaded_into_other_blocks(save, load, layout, kv, spec, contexts):
    save(0, 40)
    assert contexts.find(kv.tokens) == 40
    caches, failed = load(Transfer("s", kv.tokens[:39], "", 16, 39, SECOND))
    assert not failed
    for layer in range(spec.layers):
        k, v = layout.read(caches[layer], SECOND, 16, 39)
        assert np.array_equal(k, kv.k[layer][:, 16:39])
        assert np.array_equal(v, kv.v[layer][:, 16:39])
        assert torch.all(caches[layer][SECOND[0]] == -1)


def test_a_save_goes_on_where_the_stored_prefix_ends(save, kv, contexts):
    save(0, 20)
    save(20, 40)
    assert contexts.find(kv.tokens) == 40
    with contexts.open(kv.tokens) as session:
        k, _ = session.read(1, 0, 40)
        assert np.array_equal(k, kv.k[1])


def test_nothing_is_saved_behind_a_gap(save, kv, contexts):
    save(20, 40)
    assert contexts.find(kv.tokens) == 0


def test_blocks_whose_load_failed_are_not_saved(save, kv, contexts):
    save(0, 40, failed=[2])
    assert contexts.find(kv.tokens) == 0


def test_a_step_that_ended_early_saves_nothing(save, kv, contexts):
    save(0, 40, layers=1)
    assert contexts.find(kv.tokens) == 0


def test_salts_share_nothing(save, kv, contexts):
    save(0, 40, salt="tenant")
    assert (contexts.find(kv.tokens), contexts.find(kv.tokens, "tenant")) == (0, 40)


def test_a_load_of_what_is_not_there_fails_with_all_its_blocks(save, load, layout, kv, caplog):
    save(0, 20)
    good, bad = Transfer("good", kv.tokens[:20], "", 0, 20, (1, 8)), Transfer("bad", kv.tokens[:30], "", 16, 30, (6, 7))
    caches, failed = load(good, bad)
    assert failed == {7}
    assert np.array_equal(layout.read(caches[0], (1, 8), 0, 20)[0], kv.k[0][:, :20])
    (line,) = [record.message for record in caplog.records if "kvdb steps aside" in record.message]
    assert "bad" in line


def test_a_database_that_is_gone_costs_nothing_but_time(save, load, kv, db, caplog):
    save(0, 20)
    db.close()
    save(20, 40)
    _, failed = load(Transfer("r", kv.tokens[:20], "", 0, 20, (1, 8)))
    assert failed == {1, 8}
    assert caplog.text.count("kvdb steps aside") == 1


def test_saves_that_wait_too_long_are_left_out(contexts, layout, packing, kv, spec, caplog):
    caches = {layer: packing.cache() for layer in range(spec.layers)}
    saves = Saves(contexts, layout, caches, Journal(), waiting_max=-1)
    saves.begin([Transfer("r", kv.tokens, "", 0, 40, FIRST)])
    saves.finish(frozenset())
    saves.close()
    assert "not saved" in caplog.text
    assert BLOCK * len(FIRST) >= 40


def test_the_tail_of_an_answer_is_stored_behind_its_prompt(save, saves, kv, spec, contexts):
    save(0, 20)
    saves.begin([], [Transfer("r", kv.tokens[:39], "", 20, 39, FIRST)])
    saves.finish(frozenset())
    saves.wait()
    assert contexts.find(kv.tokens) == 39
    with contexts.open(kv.tokens[:39]) as session:
        for layer in range(spec.layers):
            assert np.array_equal(session.read(layer, 0, 39)[1], kv.v[layer][:, :39])


def test_background_loads_end_by_name_and_say_what_failed(save, contexts, layout, packing, kv, spec, journal):
    save(0, 20)
    caches = {layer: packing.cache() for layer in range(spec.layers)}
    loads = BackgroundLoads(Filling(contexts, layout, caches, journal))
    good = Transfer("good", kv.tokens[:20], "", 0, 20, (1, 8))
    bad = Transfer("bad", kv.tokens[:30], "", 16, 30, (6, 7), hashes=(3,))
    loads.begin([good, bad])
    loads.close()
    assert loads.finished() == ({"good", "bad"}, {7})
    assert loads.finished() == (frozenset(), frozenset())
    for layer in range(spec.layers):
        k, v = layout.read(caches[layer], (1, 8), 0, 20)
        assert np.array_equal(k, kv.k[layer][:, :20])
        assert np.array_equal(v, kv.v[layer][:, :20])
    assert journal.take_changes().missing == (bad,)


def test_seconds_and_bytes_are_written_down_once(save, load, kv, journal):
    save(0, 20)
    load(Transfer("r", kv.tokens[:20], "", 0, 20, (1, 8)))
    numbers = journal.take_numbers()
    assert (len(numbers["save_seconds"]), len(numbers["load_seconds"])) == (1, 1)
    assert (
        numbers["load_bytes"]
        == numbers["save_bytes"]
        == sum(k[:, :20].nbytes + v[:, :20].nbytes for k, v in zip(kv.k, kv.v, strict=True))
    )
    assert journal.take_numbers()["load_bytes"] == 0


def test_blocks_that_are_written_again_behind_their_step_were_copied(saves, packing, kv, spec, contexts):
    caches = [packing.filled(kv.k[layer], kv.v[layer], FIRST) for layer in range(spec.layers)]
    saves.begin([Transfer("r", kv.tokens, "", 0, 40, FIRST)])
    for layer, cache in enumerate(caches):
        saves.take(layer, cache)
        cache.fill_(7)
    saves.finish(frozenset())
    saves.wait()
    with contexts.open(kv.tokens) as session:
        assert np.array_equal(session.read(1, 0, 40)[0], kv.k[1])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, a priority belongs to the whole process")
@pytest.mark.parametrize("awaited", [False, True])
def test_saves_that_nobody_waits_for_leave_the_processor_to_others(contexts, layout, journal, awaited):
    saves = Saves(contexts, layout, {}, journal, awaited=awaited)
    nice = saves.behind(lambda: os.getpriority(os.PRIO_PROCESS, get_native_id())).result()
    saves.close()
    assert (nice > os.getpriority(os.PRIO_PROCESS, 0)) is not awaited
