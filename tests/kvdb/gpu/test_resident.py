"""Steps whose arrays lie on the GPU and stay there, beside the same steps by main memory."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdb
import kvdb.session.step as steps
from indexes.retrieval import Dipr, Exact, TopK
from kvdb.attention.triton.batch import Batch
from kvdb.errors import CapacityError, DtypeError, GpuLost, NonFiniteError, PositionError, ShapeError
from kvdb.gpu.layer_attention import LayerAttention
from kvdb.gpu.notes import ROWS
from kvdb.gpu.resident import ResidentLayer, ResidentStep
from kvdb.gpu.step_launches import StepLaunches
from kvdb.session.device_steps import DeviceSteps
from query_optimizer.query_options import QueryOptions
from tests.conftest import Kv
from tests.kvdb.gpu.conftest import imported, opened, spec_of, step
from tests.kvdb.gpu.test_answers import close

STORED = 160
EXACT = QueryOptions(Exact())


@pytest.fixture
def both(make_engine):
    """Sessions over the same document: a caller's on an engine with a GPU, and one of an engine without."""

    def make(kv, n=STORED, **storage):
        sessions = []
        for engine in (make_engine(block_size=32, **storage), make_engine(0)):
            imported(engine, kv, "document", n)
            sessions.append(opened(engine, kv, n))
        gpu, cpu = sessions
        return kvdb.Session(gpu), cpu

    return make


def there(array, device):
    """The array as a tensor on the device."""
    return torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(device)


def arrays_of(session, kv, at, layer=0):
    """q, k and v of a token, as tensors on the GPU."""
    device = session._transport.services.gpu.device.torch
    return [there(array[layer][:, at : at + 1], device).to(getattr(torch, kv.spec.dtype)) for array in (kv.q, kv.k, kv.v)]


def stepped(session, kv, at, options=EXACT, layer=0):
    """`step` as a caller takes it whose arrays are tensors on the GPU."""
    return session.attend(layer, *arrays_of(session, kv, at, layer), options=options)


def taken(session, layer=0):
    """How many steps it has taken that main memory does not know yet."""
    steps = session._transport._layers[layer].runner
    assert isinstance(steps, DeviceSteps)
    return steps._taken


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_answers_are_those_of_main_memory_and_tokens_arrive_there(both, dtype):
    kv = Kv(spec_of(dtype, layers=2), STORED + 20)
    gpu, cpu = both(kv)
    for i in range(5):
        for layer in range(2):
            out = stepped(gpu, kv, STORED + i, layer=layer)
            assert isinstance(out, torch.Tensor)
            close(out.float().cpu().numpy(), step(cpu, kv, STORED + i, EXACT, layer), dtype)
    assert taken(gpu)
    assert taken(gpu, 1)
    for (k, v), (right_k, right_v) in zip(gpu.read([0, 1], 0), cpu.read([0, 1], 0), strict=True):
        np.testing.assert_array_equal(k, right_k)
        np.testing.assert_array_equal(v, right_v)
    one, other = gpu.stats(), cpu.stats()
    assert (one.tokens, one.queries, one.tokens_retrieved) == (other.tokens, other.queries, other.tokens_retrieved)
    gpu.close()
    cpu.close()


@pytest.mark.parametrize("options", [QueryOptions(Dipr(0.3)), QueryOptions(TopK(33))], ids=str)
def test_searches_find_there_what_they_find_by_main_memory(make_engine, options):
    kv = Kv(spec_of(head_dim=32), STORED + 20)
    kv.q *= 3
    sessions = []
    for _ in range(2):
        engine = make_engine(block_size=32)
        imported(engine, kv, "document", STORED)
        sessions.append(opened(engine, kv, STORED))
    resident, by_host = kvdb.Session(sessions[0]), sessions[1]
    for i in range(7):
        close(stepped(resident, kv, STORED + i, options).cpu().numpy(), step(by_host, kv, STORED + i, options))
    assert taken(resident)
    one, other = resident.stats(), by_host.stats()
    assert one.tokens_retrieved < 7 * STORED
    assert (one.queries, one.tokens_scanned, one.tokens_retrieved) == (
        other.queries,
        other.tokens_scanned,
        other.tokens_retrieved,
    )
    assert abs(one.bytes_read - other.bytes_read) < 8
    np.testing.assert_allclose(
        (one.missed_mass, one.missed_mass_bound, one.missed_mass_bound_max),
        (other.missed_mass, other.missed_mass_bound, other.missed_mass_bound_max),
        rtol=1e-4,
    )
    resident.close()
    by_host.close()


@pytest.mark.parametrize("share", [0.02, 0.9])
def test_a_bound_on_what_is_missed_holds_there(make_engine, share):
    kv = Kv(spec_of(), STORED + 20)
    sessions = []
    for _ in range(2):
        engine = make_engine(block_size=32)
        imported(engine, kv, "document", STORED)
        sessions.append(opened(engine, kv, STORED))
    resident, by_host = kvdb.Session(sessions[0]), sessions[1]
    options = QueryOptions(Dipr(0.5), max_missed_mass=share)
    for i in range(7):
        out, exact = stepped(resident, kv, STORED + i, options), step(by_host, kv, STORED + i, EXACT)
        if share < 0.1:
            close(out.cpu().numpy(), exact, times=5000)
    assert taken(resident)
    stats = resident.stats()
    assert stats.missed_mass_bound_max <= share
    assert (stats.tokens_retrieved < 6 * STORED) == (share > 0.1)
    resident.close()
    by_host.close()


def guarded(session, allowed):
    """Let no KV head's search miss more than this share of the mass it reads, as plans do that keep an error budget."""
    planner = session._layers[0].planner
    prepare = planner.prepare

    def limited(*arguments):
        prepared = prepare(*arguments)
        if prepared.partition.guards is None:
            prepared.partition.guards = np.full(2, np.log(allowed), np.float32)
        return prepared

    planner.prepare = limited
    return session


@pytest.mark.parametrize("allowed", [1e-9, 1e9])
def test_heads_that_miss_too_much_are_read_whole_there(make_engine, allowed):
    kv = Kv(spec_of(head_dim=32), STORED + 20)
    sessions = []
    for _ in range(2):
        engine = make_engine(block_size=32)
        imported(engine, kv, "document", STORED)
        sessions.append(guarded(opened(engine, kv, STORED), allowed))
    resident, by_host = kvdb.Session(sessions[0]), sessions[1]
    options = QueryOptions(Dipr(0.5))
    for i in range(7):
        close(stepped(resident, kv, STORED + i, options).cpu().numpy(), step(by_host, kv, STORED + i, options))
    assert taken(resident)
    one, other = resident.stats(), by_host.stats()
    assert one.tokens_retrieved == other.tokens_retrieved
    assert (one.missed_mass_bound_max > 0) == (allowed > 1)
    np.testing.assert_allclose(one.missed_mass, other.missed_mass, rtol=1e-4)
    resident.close()
    by_host.close()


def test_sessions_step_together_and_alone_in_turns(make_engine):
    kv = Kv(spec_of(), STORED + 20)
    engine, reference = make_engine(block_size=32), make_engine(0)
    for one in (engine, reference):
        imported(one, kv, "document", STORED)
    db = kvdb.Client(engine)
    own = [kvdb.Session(opened(engine, kv, STORED)) for _ in range(3)]
    right = [opened(reference, kv, STORED) for _ in own]
    for i in range(7):
        at = STORED + i
        if i == 3:
            for session in own[:2]:
                stepped(session, kv, at)
            out = db.attend(own[2:], 0, *(x[None] for x in arrays_of(own[2], kv, at)), options=EXACT)
            close(out[0].cpu().numpy(), step(right[0], kv, at, EXACT))
        else:
            stacked = [torch.stack(same) for same in zip(*(arrays_of(session, kv, at) for session in own), strict=True)]
            out = db.attend(own, 0, *stacked, starts=[at] * 3, options=EXACT)
            assert isinstance(out, torch.Tensor)
            expected = step(right[0], kv, at, EXACT)
            for answer in out:
                close(answer.cpu().numpy(), expected)
    assert all(taken(session) for session in own)
    (k, v), (right_k, right_v) = own[1].read([0])[0], right[0].read([0], 0)[0]
    np.testing.assert_array_equal(k, right_k)
    np.testing.assert_array_equal(v, right_v)
    for session in (*own, *right):
        session.close()


def warm(session, kv, steps=3):
    """Take steps, of which main memory does not know the last."""
    for i in range(steps):
        stepped(session, kv, STORED + i)
    assert taken(session)
    return STORED + steps


def test_whatever_else_is_asked_knows_the_steps(both):
    kv = Kv(spec_of(), STORED + 40)
    gpu, cpu = both(kv)
    at = warm(gpu, kv)
    twin = gpu.fork()
    gpu.truncate(at - 2)
    for i in range(5):
        right = _exactly(cpu, kv, at - 2 + i)
        close(stepped(gpu, kv, at - 2 + i).cpu().numpy(), right)
        if i >= 2:
            close(stepped(twin, kv, at - 2 + i).cpu().numpy(), right)
    assert taken(gpu)
    assert taken(twin)
    info = gpu.store("longer", kv.tokens[: at + 3])
    assert info.tokens == at + 3
    assert gpu.explain(0, analyze=True).accesses
    q, k, v = (array[0][:, at + 3 : at + 4] for array in (kv.q, kv.k, kv.v))
    close(gpu.attend(0, q, k, v, options=EXACT), _exactly(cpu, kv, at + 3))  # numpy's arrays in between
    close(stepped(gpu, kv, at + 4).cpu().numpy(), _exactly(cpu, kv, at + 4))
    twin.close()
    gpu.close()
    cpu.close()


def test_a_long_answer_goes_on_over_many_blocks(both):
    kv = Kv(spec_of(), STORED + 150)
    gpu, cpu = both(kv)
    by_host = 0
    for i in range(40):
        before = taken(gpu)
        close(stepped(gpu, kv, STORED + i).cpu().numpy(), step(cpu, kv, STORED + i, EXACT))
        by_host += taken(gpu) <= before
    assert by_host < 7
    for got, right in zip(gpu.read([0])[0], cpu.read([0], 0)[0], strict=True):
        np.testing.assert_array_equal(got, right)
    gpu.close()
    cpu.close()


def test_queries_are_sampled_as_they_are_by_main_memory(both):
    kv = Kv(spec_of(), STORED + 80)
    gpu, cpu = both(kv)
    samples = gpu._transport._layers[0].query_samples
    samples._max = 8
    for i in range(16):
        stepped(gpu, kv, STORED + i)
    assert taken(gpu)
    gpu.stats()
    assert samples.every == 2
    np.testing.assert_array_equal(samples.all(), kv.q[0][:, STORED : STORED + 16 : 2])
    np.testing.assert_array_equal(samples.last, kv.q[0][:, STORED + 15 : STORED + 16])
    gpu.close()
    cpu.close()


def test_other_arrays_than_a_step_takes_go_by_main_memory(both):
    kv = Kv(spec_of(), STORED + 20)
    gpu, cpu = both(kv)
    at = warm(gpu, kv)
    q, k, v = arrays_of(gpu, kv, at)
    with pytest.raises(ShapeError):
        gpu.attend(0, q[:, :, :3], k, v, options=EXACT)
    with pytest.raises(DtypeError):
        gpu.attend(0, q.double(), k, v, options=EXACT)
    with pytest.raises(PositionError):
        gpu.attend(0, q, k, v, start=at + 1, options=EXACT)
    assert gpu.stats().tokens == at
    right = _exactly(cpu, kv, at)
    close(gpu.attend(0, q.clone().requires_grad_(), k, v, start=at, options=EXACT).cpu().numpy(), right)
    gpu.close()
    cpu.close()


def test_an_answer_belongs_to_the_caller(both):
    kv = Kv(spec_of(), STORED + 20)
    gpu, cpu = both(kv)
    at = warm(gpu, kv)
    first = stepped(gpu, kv, at)
    kept = first.clone()
    stepped(gpu, kv, at + 1).fill_(7)
    assert torch.equal(first, kept)
    close(stepped(gpu, kv, at + 2).cpu().numpy(), _exactly(cpu, kv, at + 2))
    gpu.close()
    cpu.close()


@pytest.mark.parametrize("where", ["attend", "take"])
def test_tokens_that_a_lost_card_had_alone_are_lost_and_that_is_said(both, monkeypatch, where):
    kv = Kv(spec_of(), STORED + 20)
    gpu, cpu = both(kv)
    at = warm(gpu, kv)
    known = at - taken(gpu)

    def fail(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as broken:
        broken.setattr(f"kvdb.gpu.resident{'_launches.finish' if where == 'attend' else '.load'}", fail)
        with pytest.raises(GpuLost, match=f"the last {at - known} tokens of the layer"):
            stepped(gpu, kv, at) if where == "attend" else gpu.read([0])
    assert gpu.stats().tokens == known
    for i in range(known, known + 3):
        close(stepped(gpu, kv, i).cpu().numpy(), _exactly(cpu, kv, i))
    gpu.close()
    cpu.close()


def test_a_card_without_memory_keeps_the_tokens_until_it_has_some(both, monkeypatch):
    kv = Kv(spec_of(), STORED + 20)
    gpu, cpu = both(kv)
    at = warm(gpu, kv)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with monkeypatch.context() as broken:
        broken.setattr("kvdb.gpu.resident.load", full)
        with pytest.raises(CapacityError, match="no memory left"):
            gpu.read([0])
        gpu._transport.try_count()
    for got, right in zip(gpu.read([0], 0, at)[0], (x[0][:, :at] for x in (kv.k, kv.v)), strict=True):
        np.testing.assert_array_equal(got, right)
    with monkeypatch.context() as broken:
        at = warm(gpu, kv) if taken(gpu) else at
        broken.setattr("kvdb.gpu.resident_launches.finish", full)
        close(stepped(gpu, kv, at).cpu().numpy(), _exactly(cpu, kv, at))
    close(stepped(gpu, kv, at + 1).cpu().numpy(), _exactly(cpu, kv, at + 1))
    gpu.close()
    cpu.close()


@pytest.mark.parametrize("first", ["inference", "training"])
def test_modes_of_torch_may_change_between_steps(make_engine, first):
    """What is made in inference mode could not be written outside of it."""
    kv = Kv(spec_of(), STORED + 20)
    modes = {"inference": torch.inference_mode, "training": torch.enable_grad}
    order = [first, *(mode for mode in modes if mode != first)]
    with modes[first]():
        engine, reference = make_engine(block_size=32), make_engine(0)
        for one in (engine, reference):
            imported(one, kv, "document", STORED)
        session, right = kvdb.Session(opened(engine, kv, STORED)), opened(reference, kv, STORED)
    for i in range(9):
        with modes[order[i % 2]]():
            options = QueryOptions(Dipr(0.3)) if i % 3 == 2 else EXACT
            out, expected = stepped(session, kv, STORED + i, options), step(right, kv, STORED + i, EXACT)
            out += 0  # is the caller's to write
        if options is EXACT:
            close(out.cpu().numpy(), expected)
    with modes[order[0]]():
        session.read([0])
    session.close()
    right.close()


def steps_alive():
    """Whatever holds memory of a card for steps."""
    kinds = ResidentLayer, ResidentStep, LayerAttention, StepLaunches, Batch
    return [x for x in gc.get_objects() if type(x) in kinds]


def test_a_session_that_is_closed_gives_the_cards_memory_back_at_once(make_engine):
    kv = Kv(spec_of(), STORED + 20)
    engine = make_engine(block_size=32)
    imported(engine, kv, "document", STORED)
    db, gpu = kvdb.Client(engine), kvdb.Session(opened(engine, kv, STORED))
    backend = engine.gpu
    searching = QueryOptions(Dipr(0.3), max_missed_mass=0.1)
    other = kvdb.Session(gpu._transport.fork())
    before = backend.device.tracked_nbytes
    gc.collect()
    earlier = {id(x): x for x in steps_alive()}  # of other tests
    gc.disable()
    try:
        at = warm(gpu, kv)
        warm(other, kv)
        for i in range(at, at + 3):
            stepped(gpu, kv, i, searching)
        for i in range(at + 3, at + 6):
            stacked = [torch.stack([x, x]) for x in arrays_of(gpu, kv, i)]
            db.attend([gpu, other], 0, *stacked, options=EXACT)
        notes = backend._notes
        assert len(notes._free) < ROWS
        other.close()
        gpu.close()
        assert len(notes._free) == ROWS
        assert not len(backend._resident_steps)
        assert not len(backend._batched_steps)
        assert not [x for x in steps_alive() if id(x) not in earlier]
    finally:
        gc.enable()
    gc.collect()  # what the interpreter kept of its arguments
    kept = sum(x.untyped_storage().nbytes() for x in (*notes.tensors(), backend._scratch.partial._floats))
    assert backend.device.tracked_nbytes <= before + kept


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says it too, under the interpreter
@pytest.mark.parametrize("what", ["q", "k", "v"])
@pytest.mark.parametrize("options", [EXACT, QueryOptions(Dipr(0.01)), QueryOptions(TopK(33))], ids=str)
def test_numbers_that_are_not_finite_are_found_out_by_the_next_call(both, what, options):
    kv = Kv(spec_of(head_dim=32), STORED + 20)
    gpu, cpu = both(kv)
    for i in range(3):
        stepped(gpu, kv, STORED + i, options)
    assert taken(gpu)
    arrays = dict(zip("qkv", arrays_of(gpu, kv, STORED + 3), strict=True))
    arrays[what][0, 0, 3] = -np.inf if what == "k" else np.nan
    gpu.attend(0, *arrays.values(), options=options)
    if taken(gpu):  # it was not the last that the plan was good for
        stepped(gpu, kv, STORED + 4, options)
    with pytest.raises(NonFiniteError, match=f"position {STORED + 3}"):
        gpu.store("broken")
    assert gpu.stats().tokens == STORED + 3
    close(stepped(gpu, kv, STORED + 3, EXACT).cpu().numpy(), _exactly(cpu, kv, STORED + 3))
    gpu.close()
    cpu.close()


def _exactly(session, kv, at):
    """The answer of a session that is brought up to that token first."""
    for i in range(session.stats().tokens, at):
        step(session, kv, i, EXACT)
    return step(session, kv, at, EXACT)


KINDS = "step", "step", "step", "searches", "numpy", "prefill", "truncate", "fork", "read", "stats"


@settings(max_examples=max(4, settings().max_examples // 5))
@given(calls=st.lists(st.sampled_from(KINDS), max_size=12), seed=st.integers(0, 1 << 16))
def test_any_course_of_calls_is_that_of_main_memory(both, calls, seed):
    kv = Kv(spec_of(), STORED + 200, seed)
    gpu, cpu = both(kv)
    at = STORED
    for call in ["step"] * 3 + calls:
        match call:
            case "step":
                close(stepped(gpu, kv, at).cpu().numpy(), step(cpu, kv, at, EXACT))
                at += 1
            case "searches":
                stepped(gpu, kv, at, QueryOptions(Dipr(0.3)))
                step(cpu, kv, at, EXACT)
                at += 1
            case "numpy":
                q, k, v = (array[0][:, at : at + 1] for array in (kv.q, kv.k, kv.v))
                close(gpu.attend(0, q, k, v, options=EXACT), step(cpu, kv, at, EXACT))
                at += 1
            case "prefill":
                close(step(gpu._transport, kv, at, n=5), step(cpu, kv, at, n=5))
                at += 5
            case "truncate":
                at = max(STORED - 3, at - 2)
                gpu.truncate(at)
                cpu.truncate(at)
            case "fork":
                before, gpu = gpu, gpu.fork()
                stepped(before, kv, at)
                before.close()
            case "read":
                for got, right in zip(gpu.read([0])[0], cpu.read([0], 0)[0], strict=True):
                    np.testing.assert_array_equal(got, right)
            case "stats":
                assert gpu.stats().tokens == at
    assert gpu.stats().tokens == cpu.stats().tokens == at
    gpu.close()
    cpu.close()


def test_sessions_of_a_card_and_of_main_memory_take_no_step_together(both):
    kv = Kv(spec_of("float32", layers=1), STORED + 4)
    gpu, cpu = both(kv)
    for i in range(2):
        stepped(gpu, kv, STORED + i)
        step(cpu, kv, STORED + i, EXACT)
    heads = kv.spec.q_heads, kv.spec.kv_heads, kv.spec.kv_heads
    arrays = [np.zeros((2, count, 1, kv.spec.head_dim), np.float32) for count in heads]
    for order in ([gpu._transport, cpu], [cpu, gpu._transport]):
        assert steps.run(order, 0, *arrays, EXACT) is None
