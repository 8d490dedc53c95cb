"""A database that goes and comes back under vLLM: each is said once, in vLLM's log, with what requests went without."""

import logging
import re
import subprocess
import sys

import pytest

import kvdb
from engine_adapter.contexts import ModelContexts
from engine_adapter.vllm.journal import Journal
from engine_adapter.vllm.loads import Filling, Loads
from engine_adapter.vllm.presence import PAUSE_SECONDS, Lookups, Presence
from engine_adapter.vllm.requests import Transfer
from engine_adapter.vllm.saves import Saves
from kvdb.errors import CapacityError, Unavailable
from tests.waiting import until

BLOCKS = (9, 2, 5)
REQUESTS = 20


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def presence(clock):
    return Presence(clock=clock)


@pytest.fixture
def serve(tmp_path):
    """`serve()` starts a server of a process of its own, always at the same address."""
    running = []
    address = tmp_path / "kvdb.sock"

    def start():
        command = [sys.executable, "-m", "kvdb", "serve", "--host", f"unix:{address}", "--store", str(tmp_path / "store")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        running.append(process)
        return process, process.stdout.readline().split()[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


class Worker:
    """The connector's parts, as vLLM's scheduler and worker use them for one request after the other."""

    def __init__(self, contexts, packing, layout, kv, presence):
        self.kv, self.packing, self.journal = kv, packing, Journal(presence)
        self.caches = {layer: packing.filled(kv.k[layer], kv.v[layer], BLOCKS) for layer in range(kv.spec.layers)}
        self.lookups = Lookups(contexts, presence)
        self.saves = Saves(contexts, layout, self.caches, self.journal)
        self.loads = Loads(Filling(contexts, layout, self.caches, self.journal))

    def request(self, salt):
        """Whether its prompt was found. It is loaded then, and saved otherwise, as is its answer."""
        found = self.lookups.find(self.kv.tokens[:32], salt)
        prompt = Transfer(f"request {salt}", self.kv.tokens[:32], salt, 0, 32, BLOCKS)
        self.loads.begin([prompt] if found else [])
        self.saves.begin([] if found else [prompt])
        for layer, cache in self.caches.items():
            self.loads.wait(layer)
            self.saves.take(layer, cache)
        self.saves.finish(self.loads.finish())
        self.saves.begin([], [Transfer(f"request {salt}", self.kv.tokens, salt, 32, 40, BLOCKS)])
        self.saves.wait()
        return found

    def close(self):
        self.saves.close()
        self.loads.close()


def test_a_server_that_is_killed_and_comes_back_is_said_once_each(serve, spec, make_kv, packing, layout, presence, clock, caplog):
    caplog.set_level(logging.INFO, "vllm")
    process, target = serve()
    with kvdb.connect(target) as db:
        worker = Worker(ModelContexts(db, spec, "vllm"), packing, layout, make_kv(spec, 40), presence)
        try:
            assert [worker.request("0"), worker.request("0")] == [0, 32]
            assert not caplog.records
            process.kill()
            process.wait()
            for number in range(REQUESTS):
                clock.now += 3
                assert worker.request(str(number)) == 0
            assert len(caplog.records) == 1
            serve()
            asked = REQUESTS + ask_until_found(worker, clock)
        finally:
            worker.close()
    away, back = caplog.records
    assert (away.name, away.levelname, back.levelname) == ("vllm.kvdb", "WARNING", "INFO")
    assert re.search(r"steps aside until it is back, .*10 s: ", away.message)
    seconds = 3 * (REQUESTS - 1) + PAUSE_SECONDS * (asked + 1 - REQUESTS)
    assert f"is back: away for {seconds:.0f} s; " in back.message
    assert f"{asked} not looked up" in back.message
    saved = int(re.search(r"(\d+) not saved", back.message)[1])
    assert asked <= saved <= 2 * asked, "its prompt, and perhaps its answer"
    assert worker.journal.take_numbers()["missed"] == asked + saved
    assert worker.journal.take_numbers()["missed"] == 0


def ask_until_found(worker, clock):
    """How many requests, a pause apart, do not find the server, to which gRPC does not connect at once."""

    def found():
        clock.now += PAUSE_SECONDS
        if worker.request("0"):
            return True
        missed.append(clock.now)
        return False

    missed = []
    until(found, "the server was not found again")
    return len(missed)


def test_it_is_asked_again_after_each_pause_alone(presence, clock):
    assert not presence.skips("looked up")
    assert presence.lost(Unavailable("gone"), "looked up")
    for _ in range(3):
        assert presence.skips("saved", 2)
        clock.now += PAUSE_SECONDS
        assert not presence.skips("saved", 2)
        assert presence.lost(Unavailable("gone"), "saved")
    assert presence.take_missed() == 1 + 3 * 3


def test_what_one_request_meets_alone_is_not_the_databases_absence(presence):
    assert not presence.lost(CapacityError("full"), "saved")
    assert not presence.skips("saved")
    assert presence.take_missed() == 0


def test_lines_have_vllms_level_and_time_also_those_of_kvdb_itself():
    script = """
import logging, sys
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s"))
logging.getLogger("vllm").addHandler(handler)
logging.getLogger("vllm").propagate = False
from engine_adapter.vllm.log import LOG, join_vllm
join_vllm()
LOG.warning("one")
logging.getLogger("kvdb.catalog.catalog").warning("two")
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert [re.sub(r"\d+", "0", line) for line in said.stdout.splitlines()] == [
        "WARNING 0-0-0 0:0:0,0 one",
        "WARNING 0-0-0 0:0:0,0 two",
    ]
    assert not said.stderr
