"""Models whose layers differ: what is stored of each, found, shared, and handed back, embedded and on a server."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdb
from kvdb.config import Config, ServerConfig, StorageConfig
from kvdb.database import Database
from kvdb.errors import DtypeError, InvalidArgument, LayerError, NonFiniteError, PositionError, ShapeError, SpecError, Unsupported
from kvdb.server.serve import Server

STATE = kvdb.State({"conv": ((4, 3), "float32"), "recurrent": ((2, 8, 8), "bfloat16")})
FULL = kvdb.Attention(4, 2, 16, rope=kvdb.Rope())
WINDOW = kvdb.Attention(2, 1, 8, window=24)
INDEXED = kvdb.Attention(4, 2, 16, indexer=kvdb.Indexer(heads=3, dim=8, top=4))
MIXED = (FULL, WINDOW, STATE, INDEXED, kvdb.Shares(0))
SPEC = kvdb.ModelSpec("mixed", layers=MIXED, dtype="float32")


@pytest.fixture(params=["embedded", "served"])
def db(request):
    """A database with blocks of 16 tokens, in this process or on a server."""
    config = Config(storage=StorageConfig(block_size=16, arena_bytes=1 << 20))
    if request.param == "embedded":
        with kvdb.connect(config=config) as db:
            yield db
        return
    with Database(config) as engine:
        server = Server(engine, ServerConfig(port=0))
        server.start()
        with kvdb.connect(server.target) as db:
            yield db
        server.stop(grace=0)


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def state(seed):
    return {"conv": numbers(seed, 4, 3), "recurrent": numbers(seed + 1, 2, 8, 8).astype(STATE.by_name["recurrent"][1])}


def kept(seed, tokens):
    """What each layer keeps of so many tokens, as an import takes it."""
    full = [numbers(seed + i, 2, tokens, 16) for i in range(4)]
    window = numbers(seed + 5, 1, tokens, 8), numbers(seed + 6, 1, tokens, 8)
    return [(full[0], full[1]), window, None, (full[2], full[3], numbers(seed + 7, 1, tokens, 8)), None]


def same(found, expected):
    return all((a == b).all() for a, b in zip(found, expected, strict=True))


def test_a_prefix_is_reused_up_to_a_position_of_which_every_layer_has_what_it_needs(db):
    ids, kv = np.arange(100, dtype=np.int32), kept(0, 100)
    states = {40: {2: state(10)}, 100: {2: state(20)}}
    db.import_context(SPEC, ids, kv, name="all", states=states)
    assert [db.match(SPEC, ids[:n]).tokens for n in (30, 40, 99, 100)] == [0, 40, 40, 100]
    with db.create_session(SPEC, ids[:70]) as session:
        assert session.reused == 40
        assert all((session.state(2)[name] == array).all() for name, array in states[40][2].items())
        for layer in (0, 1, 3):
            assert same(session.read(layer), [array[:, :40] for array in kv[layer][:2]])
        assert same(session.read(4), session.read(0))
        assert (session.read_indexer(3) == kv[3][2][:, :40]).all()


def test_what_a_session_adds_is_stored_with_the_states_that_it_has_whole(db):
    ids, kv = np.arange(90, dtype=np.int32), kept(3, 90)
    db.import_context(
        SPEC, ids[:50], [layer and tuple(array[:, :50] for array in layer) for layer in kv], name="a", states={2: state(1)}
    )
    with db.create_session(SPEC, ids[:50]) as session:
        for layer in (0, 1, 3):
            session.update(layer, *(array[:, 50:] for array in kv[layer][:2]))
        session.update_indexer(3, kv[3][2][:, 50:], start=50)
        session.put_state(2, state(5))
        session.store("b", ids)
        assert db.match(SPEC, ids).tokens == 90
        session.truncate(50)
        assert all((session.state(2)[name] == array).all() for name, array in state(1).items())
        with pytest.raises(PositionError, match="no state at position 60"):
            session.state(2, 60)
    with db.create_session(SPEC, ids) as session:
        assert session.reused == 90
        assert same(session.read(3), kv[3][:2])
        assert all((session.state(2)[name] == array).all() for name, array in state(5).items())


def test_a_window_is_not_asked_for_what_no_query_sees(db):
    spec = kvdb.ModelSpec("windows", layers=[FULL, WINDOW], dtype="float32")
    ids, full, last = np.arange(200, dtype=np.int32), (numbers(1, 2, 200, 16), numbers(2, 2, 200, 16)), numbers(3, 1, 23, 8)
    db.import_context(spec, ids, [full, (last, last)], name="a")
    assert [db.match(spec, ids[:n]).tokens for n in (200, 199, 100)] == [200, 0, 0]
    with db.create_session(spec, ids) as session:
        assert same(session.read(1, 177, 200), (last, last))
        with pytest.raises(PositionError, match="from 177 on"):
            session.read(1, 176, 200)
        new = numbers(4, 1, 30, 8)
        session.update(1, new, new)
        session.update(0, numbers(5, 2, 30, 16), numbers(6, 2, 30, 16))
        with pytest.raises(PositionError, match="cut to 200"):
            session.truncate(199)
        session.store("b", np.arange(230, dtype=np.int32))
    assert [db.match(spec, np.arange(n, dtype=np.int32)).tokens for n in (230, 215)] == [230, 215]
    with db.create_session(spec, ids[:100]) as session:
        with pytest.raises(PositionError, match="at least the 23 tokens"):
            session.update(1, last[:, :22], last[:, :22], start=78)
        bad = last.copy()
        bad[0, 3, 2] = np.nan
        with pytest.raises(NonFiniteError):
            session.update(1, last, bad, start=77)
        assert session.stats().tokens == 0
        session.update(1, last, last, start=77)
        assert same(session.read(1, 77, 100), (last, last))


REFUSED = {
    "a state of a layer of tokens": (LayerError, lambda s: s.put_state(0, state(0))),
    "no state there": (LayerError, lambda s: s.state(1)),
    "tokens of a layer of states": (LayerError, lambda s: s.update(2, numbers(0, 2, 1, 16), numbers(0, 2, 1, 16))),
    "tokens of a layer that shares": (LayerError, lambda s: s.update(4, numbers(0, 2, 1, 16), numbers(0, 2, 1, 16))),
    "keys of no indexer": (LayerError, lambda s: s.update_indexer(0, numbers(0, 1, 1, 8))),
    "heads of another layer": (ShapeError, lambda s: s.update(1, numbers(0, 2, 1, 16), numbers(0, 2, 1, 16))),
    "keys of another size": (ShapeError, lambda s: s.update_indexer(3, numbers(0, 1, 1, 16))),
    "a state of another shape": (ShapeError, lambda s: s.put_state(2, {**state(0), "conv": numbers(0, 4, 4)})),
    "a state of another dtype": (DtypeError, lambda s: s.put_state(2, {**state(0), "conv": np.zeros((4, 3))})),
    "half a state": (InvalidArgument, lambda s: s.put_state(2, {"conv": numbers(0, 4, 3)})),
    "a state without names": (InvalidArgument, lambda s: s.put_state(2, [1])),
    "a state behind the tokens": (PositionError, lambda s: s.put_state(2, state(0), position=5)),
    "a state that was not handed in": (PositionError, lambda s: s.state(2)),
}


@pytest.mark.parametrize(("error", "call"), REFUSED.values(), ids=REFUSED)
def test_what_a_layer_cannot_keep_is_refused_by_its_number_and_nothing_is_written(db, error, call):
    with db.create_session(SPEC, [1, 2, 3]) as session:
        with pytest.raises(error, match=r"[Ll]ayer \d|expected \([12], tokens|tokens"):
            call(session)
        assert session.stats().tokens == 0


def test_layers_in_another_order_a_chunk_and_parts_are_refused(db):
    kv = kept(0, 20)
    with pytest.raises(InvalidArgument, match="layer 0"):
        db.import_context(SPEC, range(20), [kv[2], *kv[:2], *kv[3:]], name="a")
    with pytest.raises(PositionError, match="indexer of layer 3"):
        db.import_context(SPEC, range(20), [*kv[:3], kv[3][:2], None], name="a")
    with pytest.raises(Unsupported, match="layers of mixed differ"):
        db.import_chunk(SPEC, range(20), kv, name="a")
    with pytest.raises(Unsupported, match="layers of mixed differ"):
        db.create_session(SPEC, parts=[[1, 2]])
    assert not db.contexts()


def test_states_and_windows_come_back_from_a_store(tmp_path):
    config = Config(storage=StorageConfig(block_size=16, path=str(tmp_path / "store"), durability="durable"))
    ids, kv = np.arange(300, dtype=np.int32), kept(7, 300)
    kv[1] = tuple(array[:, -40:] for array in kv[1])
    with kvdb.connect(config=config) as db:
        db.import_context(SPEC, ids, kv, name="a", states={2: state(9)})
        db.offload("a")
    with kvdb.connect(config=config) as db:
        assert db.match(SPEC, ids).tokens == 300
        assert db.verify("a").blocks
        with db.create_session(SPEC, ids) as session:
            assert all((session.state(2)[name] == array).all() for name, array in state(9).items())
            assert same(session.read(1, 260), kv[1])
            assert same(session.read(3), kv[3][:2])
    (file,) = (tmp_path / "store").glob("*/*.states")
    file.write_bytes(file.read_bytes()[:-9] + bytes(9))
    with kvdb.connect(config=config) as db, db.create_session(SPEC, ids) as session:
        with pytest.raises(kvdb.errors.IntegrityError, match="states at 300"):
            session.state(2)
        assert db.match(SPEC, ids).tokens == 0


DESCRIPTIONS = st.one_of(
    st.builds(
        kvdb.Attention,
        st.sampled_from([2, 4]),
        st.sampled_from([1, 2]),
        st.sampled_from([8, 24]),
        window=st.none() | st.integers(1, 40),
        indexer=st.none() | st.just(kvdb.Indexer(2, 8, 4)),
    ),
    st.just(STATE),
    st.just(kvdb.Shares(0)),
)


@given(st.lists(DESCRIPTIONS, max_size=4), st.data())
@settings(max_examples=30)
def test_any_layers_are_stored_found_and_handed_back(layers, data):
    spec = kvdb.ModelSpec("any", layers=[FULL, *layers], dtype="float32")
    assert kvdb.ModelSpec.from_dict(spec.to_dict()) == spec
    n, more = data.draw(st.integers(1, 60)), data.draw(st.integers(0, 40))
    arrays = {}
    for place, one in enumerate(spec.kept):
        k, v = one.shape.empty(n + more)
        k[:], v[:] = numbers(place, *k.shape), numbers(99 + place, *v.shape)
        arrays[one.layer, one.what] = k, v
    stateful = [number for number, layer in enumerate(spec.all_layers) if isinstance(layer, kvdb.State)]
    cut = data.draw(st.integers(1, n + more))
    config = Config(storage=StorageConfig(block_size=16, arena_bytes=1 << 20))
    with kvdb.connect(config=config) as db:
        with db.create_session(spec, range(n + more)) as session:
            for begin, end in ((0, n), (n, n + more)):
                for (layer, what), (k, v) in arrays.items():
                    if what == "kv":
                        session.update(layer, k[:, begin:end], v[:, begin:end])
                    else:
                        session.update_indexer(layer, k[:, begin:end])
                for layer in stateful:
                    session.put_state(layer, state(end))
            session.store("whole", range(n + more))
        expected = max((at for at in (n, n + more) if at <= cut), default=0) if stateful else cut
        assert db.match(spec, range(cut)).tokens == expected
        with db.create_session(spec, range(cut)) as session:
            assert session.reused == expected
            for (layer, what), (k, v) in arrays.items() if expected else ():
                if what == "indexer":
                    assert (session.read_indexer(layer) == k[:, :expected]).all()
                else:
                    assert same(session.read(layer), (k[:, :expected], v[:, :expected]))
            for layer in stateful if expected else ():
                assert (session.state(layer)["conv"] == state(expected)["conv"]).all()


@pytest.mark.parametrize(
    ("what", "layers"),
    {
        "0 layers": [],
        "no layer is a kvdb.Attention": [STATE],
        "layer 1 is 3": [FULL, 3],
        "layer 1 shares layer 1": [FULL, kvdb.Shares(1)],
        "layer 2 shares layer 1": [FULL, STATE, kvdb.Shares(1)],
    }.items(),
)
def test_a_model_that_cannot_be_is_refused(what, layers):
    with pytest.raises(SpecError, match=what):
        kvdb.ModelSpec("m", layers=layers)


def test_a_description_of_a_newer_version_is_refused():
    values = SPEC.to_dict()
    values["layers"][1] = {"kind": "telepathy", "range": 3}
    with pytest.raises(SpecError, match=r"layer 1.*telepathy"):
        kvdb.ModelSpec.from_dict(values)


def test_the_long_form_of_equal_layers_is_the_short_one():
    short = kvdb.ModelSpec("m", layers=3, q_heads=4, kv_heads=2, head_dim=16, rope=kvdb.Rope())
    assert kvdb.ModelSpec("m", layers=[FULL, FULL, FULL]) == short
    assert kvdb.ModelSpec("m", layers=[FULL, FULL, FULL]).digest == short.digest
    assert (
        short.digest == "177bdc8dd7f037dabad23fda897620a8e80cbb24693aacb51e904294f1e71fd9"
    )  # of a store before there was a long form
