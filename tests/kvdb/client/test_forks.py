"""A child has nothing of what its parent has open, and the parent has all of it whatever the child does."""

import asyncio
import multiprocessing
import os
from threading import Event, Thread

import numpy as np
import pytest

import kvdb
import kvdb.aio
from kvdb.client.remote import fork_gate
from kvdb.errors import ForkedProcess, Unavailable
from tests.forking import Child, in_child, play, server, status_of
from tests.stores import SPEC, connect, holds, kv_of, names, put

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # Python 3.12's, of any with threads

TOKENS = list(range(40))
ONE = np.ones((SPEC.kv_heads, 1, SPEC.head_dim), np.float32)
Q = np.ones((SPEC.q_heads, 1, SPEC.head_dim), np.float32)


@pytest.fixture(scope="module")
def target():
    with server() as address, kvdb.connect(address) as db:
        put(db, TOKENS, "doc")
        yield address


@pytest.fixture(params=["shared memory", "gRPC"])
def remote(request, target):
    with kvdb.connect(target) as db:
        if request.param == "gRPC":
            db._transport._connected().lanes.close()
        yield db


@pytest.fixture(params=["memory", "store"])
def embedded(request, tmp_path):
    with connect(tmp_path / "store" if request.param == "store" else None) as db:
        put(db, TOKENS, "doc")
        yield db


def ask(session, value, times=1):
    """Append tokens whose values are all this number, so that it is the answer. Raises AssertionError for another."""
    for _ in range(times):
        out = session.attend(0, Q, ONE, ONE * np.float32(value))
        assert np.abs(out - value).max() < 1e-3, f"{out.flat[0]}, and {value} is right"


def refusal(call):
    """What a call is refused with because of the process that it is made in."""
    with pytest.raises(ForkedProcess) as refused:
        call()
    return str(refused.value)


def test_a_parents_session_refuses_its_child_and_says_what_to_do(remote):
    with remote.create_session(SPEC, []) as session:
        ask(session, 1)
        child = Child(lambda: refusal(lambda: ask(session, 1)))
        assert child.said() == (
            f"the session is open in process {os.getpid()}, of which this one, {child.pid}, is a fork; "
            "open one here, with create_session of a database that is connected here"
        )
        ask(session, 1)


def test_parent_and_child_that_ask_at_once_have_their_own_answers(remote):
    def child():
        own = remote.create_session(SPEC, [])
        ask(own, 2, times=300)
        return holds(remote, TOKENS) and remote.get("doc").tokens

    with remote.create_session(SPEC, []) as session:
        ask(session, 1)
        forked = Child(child)
        ask(session, 1, times=300)
        assert forked.said() == "40"


def test_a_step_of_several_sessions_with_one_of_the_parents_is_refused(remote):
    with remote.create_session(SPEC, []) as session:

        def child():
            own = remote.create_session(SPEC, [])
            both = [np.stack([array] * 2) for array in (Q, ONE, ONE)]
            return refusal(lambda: remote.attend([own, session], 0, *both))

        assert in_child(child).startswith("the session is open in process")


def test_what_a_child_closes_and_forgets_the_parent_has_still(remote):
    session = remote.create_session(SPEC, [])
    ask(session, 1)

    def child():
        remote.create_session(SPEC, [])
        session.close()
        remote.close()
        return refusal_of_closed(remote)

    assert "closed" in in_child(child)
    ask(session, 1)
    assert remote.get("doc").tokens == 40


def refusal_of_closed(db):
    with pytest.raises(Unavailable) as closed:
        db.contexts()
    return str(closed.value)


def test_a_database_that_the_parent_closed_is_closed_in_its_child(target):
    db = kvdb.connect(target)
    db.close()
    assert "closed" in in_child(lambda: refusal_of_closed(db))


def test_a_server_sees_that_a_parent_is_gone_whose_child_lives_on(target):
    """Its end of a lane is closed in the child, or the region would stay."""
    with kvdb.connect(target) as db:
        with db.create_session(SPEC, []) as session:
            ask(session, 1)
        lane = db._transport._connected().lanes._free[0]
        descriptor = lane._socket.fileno()
        inode = os.fstat(descriptor).st_ino

        def held():
            links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
            return f"socket:[{inode}]" in {os.readlink(link) for link in links if os.path.islink(link)}

        assert held()
        assert in_child(held) == "False"


def test_a_grandchild_connects_anew_too(remote):
    def child():
        own = remote.create_session(SPEC, [])
        ask(own, 2)
        return in_child(lambda: [refusal(lambda: ask(own, 2)), remote.get("doc").tokens][1])

    assert in_child(child) == "40"


def test_an_import_under_way_stays_its_parents(remote):
    tokens = TOKENS[::-1]
    writer, said = remote._transport.begin_import(SPEC, np.array(tokens, np.int32), "turned"), []
    for layer, pair in enumerate(kv_of(tokens)):

        def child(layer=layer, pair=pair):
            return refusal(lambda: writer.write(layer, *pair)) == refusal(lambda: writer.commit().name)

        said.append(in_child(child))
        writer.write(layer, *pair)
    writer.commit()
    assert said == ["True"] * SPEC.layers
    assert holds(remote, tokens)
    remote.drop("turned")


def test_an_embedded_database_refuses_a_child_at_the_first_call(embedded):
    session, context = embedded.create_session(SPEC, []), embedded.get("doc")
    calls = [
        embedded.contexts,
        embedded.status,
        lambda: embedded.create_session(SPEC, []),
        lambda: put(embedded, TOKENS, "other"),
        lambda: embedded.drop("doc"),
        lambda: context.read(0),
        lambda: context.create_session(TOKENS),
        lambda: ask(session, 1),
        session.stats,
        session.fork,
        lambda: session.store("kept"),
        lambda: embedded.attend([session], 0, Q[None], ONE[None], ONE[None]),
    ]

    def child():
        told = {refusal(call).partition(",")[0] for call in calls}
        session.close()
        context.close()
        embedded.close()
        return sorted(told)

    parent = f"is open in process {os.getpid()}"
    assert in_child(child) == str([f"the embedded database {parent}", f"the session {parent}"])
    ask(session, 1)
    assert names(embedded) == ["doc"]
    session.close()
    assert holds(embedded, TOKENS)


def test_a_child_opens_a_database_of_its_own(embedded):
    def child():
        with kvdb.connect(threads=2) as own:
            spec = kvdb.ModelSpec("wide", layers=1, q_heads=8, kv_heads=8, head_dim=64, dtype="float32")
            many = np.ones((8, 2000, 64), np.float32)
            session = own.create_session(spec, [])
            session.update(0, many, many)  # enough for the threads of a pool, which are not there any more
            return float(session.attention(0, many[:, :1]).max())

    assert child() == 1.0
    assert in_child(child) == "1.0"


def test_no_lock_that_another_thread_held_is_waited_for(embedded):
    with embedded.create_session(SPEC, []) as session:
        asking, ended = Event(), Event()

        def hold():
            with session._transport.turns, embedded._transport.handles._changed:
                asking.set()
                ended.wait(20)

        thread = Thread(target=hold)
        thread.start()
        asking.wait(20)
        said = in_child(lambda: (refusal(lambda: ask(session, 1)), refusal(embedded.contexts), "refused")[2])
        ended.set()
        thread.join()
    assert said == "refused"


def test_the_lock_of_a_store_ends_with_the_parent_and_not_with_its_child(tmp_path):
    reading, writing = os.pipe()
    db = connect(tmp_path)
    put(db, TOKENS, "doc")
    child = Child(lambda: os.read(reading, 1))
    try:
        in_child(db.close)
        with pytest.raises(Unavailable, match="open already"):
            connect(tmp_path)
        db.close()
        with connect(tmp_path) as again:
            assert holds(again, TOKENS)
    finally:
        os.write(writing, b".")
        child.said()


def test_a_child_does_not_open_the_store_that_its_parent_had_open(tmp_path):
    with connect(tmp_path / "store") as db:
        put(db, TOKENS, "doc")

        def child():
            with connect(tmp_path / "other") as other:
                put(other, TOKENS, "doc")
            return refusal(lambda: connect(tmp_path / "store"))

        assert f"was open in process {os.getpid()} when that was forked" in in_child(child)
        assert holds(db, TOKENS)


ENDS = """
    import os, sys
    import kvdb
    from tests.forking import status_of
    from tests.stores import SPEC, connect, holds, put

    TOKENS = list(range(40))
    target, store, disk = sys.argv[1:]
    with (
        kvdb.connect(target) as remote,
        connect(store) as kept,
        connect(None, disk_path=disk) as passing,
        remote.create_session(SPEC, TOKENS) as session,
        kept.create_session(SPEC, TOKENS) as own,
    ):
        put(kept, TOKENS, "doc")
        put(passing, TOKENS, "doc")
        passing.offload("doc")
        child = os.fork()
        if not child:
            remote.get("doc").create_session(TOKENS)
            sys.exit()
        assert status_of(child) == 0
        assert session.stats().tokens == 40
        assert own.stats().tokens == 0
        assert kept.verify_store() == []
        assert holds(remote, TOKENS) and holds(kept, TOKENS) and holds(passing, TOKENS)
    print("whole")
"""


def test_a_child_that_ends_in_order_leaves_everything_to_its_parent(target, tmp_path):
    assert play(ENDS, target, tmp_path / "store", tmp_path / "disk") == "whole\n"
    assert not list((tmp_path / "disk").glob("*.segments"))


def give_count(db, results):
    results.put(holds(db, TOKENS) and db.get("doc").tokens)


def test_processes_of_multiprocessing_ask_through_what_they_inherited(remote):
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    with remote.create_session(SPEC, []) as session:
        workers = [fork.Process(target=give_count, args=(remote, results)) for _ in range(3)]
        for worker in workers:
            worker.start()
        ask(session, 1)
        assert [results.get() for _ in workers] == [40] * 3
        for worker in workers:
            worker.join(20)
        assert [worker.exitcode for worker in workers] == [0] * 3
        ask(session, 1)


class Loaded:
    """What a data loader takes: `read(layer)` for each layer."""

    def __init__(self, read):
        self._read = read

    def __len__(self):
        return SPEC.layers

    def __getitem__(self, layer):
        return self._read(layer)


def loaded(read):
    torch = pytest.importorskip("torch")
    return list(torch.utils.data.DataLoader(Loaded(read), batch_size=None, num_workers=2, multiprocessing_context="fork"))


def test_the_workers_of_a_data_loader_read_from_a_server(remote):
    for got, (k, _) in zip(loaded(lambda layer: remote.get("doc").read(layer)[0]), kv_of(TOKENS), strict=True):
        np.testing.assert_array_equal(got, k)


def test_the_workers_of_a_data_loader_are_refused_by_an_embedded_database(embedded):
    context = embedded.get("doc")
    told = loaded(lambda layer: refusal(lambda: context.read(layer)))
    assert all(text.startswith(f"the embedded database is open in process {os.getpid()}") for text in told)
    assert holds(embedded, TOKENS)


def test_the_workers_of_a_server_that_forks_serve_beside_each_other(remote):
    context = remote.get("doc")

    def worker(number):
        session = context.create_session([])
        ask(session, number, times=100)
        return number

    workers = [Child(lambda: worker(number)) for number in range(1, 5)]  # noqa: B023  # called at once
    assert [one.said() for one in workers] == ["1", "2", "3", "4"]


def test_a_connection_for_asyncio_refuses_a_child(target):
    async def parent():
        async with await kvdb.aio.connect(target) as db:
            session = await db.create_session(SPEC, [])

            def child():
                for call in (db.contexts, session.stats, lambda: kvdb.aio.connect(target)):
                    with pytest.raises(ForkedProcess, match=f"process {os.getppid()}"):
                        asyncio.new_event_loop().run_until_complete(call())
                with kvdb.connect(target) as own:
                    return own.get("doc").tokens

            forked = os.fork()
            if not forked:
                asyncio._set_running_loop(None)
                os._exit(0 if child() == 40 else 1)
            assert status_of(forked) == 0
            return (await session.stats()).tokens

    assert asyncio.run(parent()) == 0


@pytest.mark.parametrize("lanes", [True, False])
def test_a_fork_waits_for_calls_of_other_threads(target, lanes):
    """In a process of its own: whatever else this one has of gRPC would keep that from making itself ready for a fork."""
    script = """
        import sys
        from threading import Event, Thread

        import kvdb
        from tests.forking import in_child

        with kvdb.connect(sys.argv[1]) as db:
            if sys.argv[2] == "False":
                db._transport._connected().lanes.close()
            ended = Event()

            def call():
                while not ended.is_set():
                    assert db.get("doc").tokens == 40

            threads = [Thread(target=call) for _ in range(2)]
            for thread in threads:
                thread.start()
            print(*[in_child(lambda: db.get("doc").tokens) for _ in range(5)])
            ended.set()
            for thread in threads:
                thread.join()
    """
    assert play(script, target, lanes) == "40 40 40 40 40\n"


def test_a_child_of_a_call_that_went_on_for_too_long_is_refused(remote, monkeypatch):
    """Where gRPC could not make itself ready, a channel of the child's would end it by a signal."""
    monkeypatch.setattr(fork_gate, "FORK_SECONDS_MAX", 0.01)
    inside, ended = Event(), Event()

    def call():
        with fork_gate.GATE:
            inside.set()
            ended.wait(20)

    thread = Thread(target=call)
    thread.start()
    inside.wait(20)
    said = in_child(lambda: [refusal(remote.contexts), in_child(lambda: refusal(remote.contexts))])
    ended.set()
    thread.join()
    assert said.count(f"process {os.getpid()} was forked into this one") == 2, "a grandchild is refused too"
    assert remote.get("doc").tokens == 40
