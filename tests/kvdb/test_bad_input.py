"""What is wrong is refused with the error that names it, and nothing is changed."""

import ml_dtypes
import numpy as np
import pytest

import kvdb
from kvdb import errors
from kvdb.config import Config, OptimizerConfig, StorageConfig
from tests.reference import attention, relative_error


@pytest.fixture
def session(db, spec, make_kv):
    """70 tokens, of which 64 are stored."""
    kv = make_kv(spec, 70)
    db.import_context(spec, kv.tokens[:64], kv.pairs(0, 64), name="doc")
    with db.create_session(spec, kv.tokens) as opened:
        for layer, (k, v) in enumerate(kv.pairs(64)):
            opened.update(layer, k, v)
        opened.kv = kv
        yield opened
        out = opened.attention(1, kv.q[1])
        assert relative_error(out, attention(kv.q[1], kv.k[1], kv.v[1], spec.softmax_scale, new=70)[0]) <= 1e-5
        assert opened.stats().tokens == 70


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


BAD_ATTENDS = {
    "layer too large": (errors.LayerError, "layer is 2; expected 0 to 1", (2, ones(4, 1, 16), ones(2, 1, 16), ones(2, 1, 16))),
    "negative layer": (errors.LayerError, "layer is -1", (-1, ones(4, 1, 16), ones(2, 1, 16), ones(2, 1, 16))),
    "query heads": (errors.ShapeError, r"q has the shape \(3, 1, 16\)", (0, ones(3, 1, 16), ones(2, 1, 16), ones(2, 1, 16))),
    "head_dim": (errors.ShapeError, r"k has the shape \(2, 1, 8\)", (0, ones(4, 1, 16), ones(2, 1, 8), ones(2, 1, 16))),
    "dimensions": (errors.ShapeError, r"v has the shape \(2, 16\)", (0, ones(4, 1, 16), ones(2, 1, 16), ones(2, 16))),
    "k and v differ": (errors.ShapeError, "k holds 2 tokens and v 1", (0, ones(4, 1, 16), ones(2, 2, 16), ones(2, 1, 16))),
    "q and k differ": (errors.ShapeError, "q holds 2 tokens", (0, ones(4, 2, 16), ones(2, 1, 16), ones(2, 1, 16))),
    "float64": (errors.DtypeError, "expected float32", (0, ones(4, 1, 16, dtype=np.float64), ones(2, 1, 16), ones(2, 1, 16))),
    "bfloat16": (errors.DtypeError, "bfloat16", (0, ones(4, 1, 16), ones(2, 1, 16, dtype=ml_dtypes.bfloat16), ones(2, 1, 16))),
    "NaN keys": (errors.NonFiniteError, "k of KV head", (0, ones(4, 1, 16), ones(2, 1, 16) * np.nan, ones(2, 1, 16))),
    "infinite values": (errors.NonFiniteError, "v of KV head", (0, ones(4, 1, 16), ones(2, 1, 16), ones(2, 1, 16) * np.inf)),
    "NaN queries": (errors.NonFiniteError, "q holds NaN", (0, ones(4, 1, 16) * np.nan, ones(2, 1, 16), ones(2, 1, 16))),
    "a list": (errors.DtypeError, "list", (0, [1.0], ones(2, 1, 16), ones(2, 1, 16))),
}


@pytest.mark.parametrize("case", BAD_ATTENDS)
def test_a_bad_attend_changes_nothing(session, case):
    error, message, arguments = BAD_ATTENDS[case]
    with pytest.raises(error, match=message):
        session.attend(*arguments)


Q, KV = ones(4, 1, 16), ones(2, 1, 16)
BAD_BUDGETS = {
    "negative": ("error_max is -0.01; expected", {"error_max": -0.01}),
    "NaN": ("error_max is nan; expected", {"error_max": float("nan")}),
    "above 1": ("error_max is 1.01; expected", {"error_max": 1.01}),
    "a text": ("error_max is '1 %'; expected", {"error_max": "1 %"}),
    "beside exact": ("beside retrieval=exact, which would win", {"error_max": 0.01, "retrieval": kvdb.Exact()}),
    "beside a retrieval": (r"beside retrieval=dipr\(0.012\), which would win", {"error_max": 0.01, "retrieval": kvdb.Dipr()}),
    "beside a bound": ("beside max_missed_mass=0.1, which would win", {"error_max": 0.01, "max_missed_mass": 0.1}),
    "beside an estimate": ("beside estimate_tail=True, which would win", {"error_max": 0.01, "estimate_tail": True}),
}


@pytest.mark.parametrize("case", BAD_BUDGETS)
def test_a_bad_error_budget_changes_nothing(session, db, case):
    message, asked = BAD_BUDGETS[case]
    for call in (
        lambda: session.attend(0, Q, KV, KV, **asked),
        lambda: session.attention(0, Q, **asked),
        lambda: session.explain(0, **asked),
        lambda: db.attend([session], 0, Q[None], KV[None], KV[None], **asked),
        lambda: db.attention([session], 0, Q[None], **asked),
        lambda: db.explain("doc", **asked),
    ):
        with pytest.raises(errors.InvalidArgument, match=message):
            call()


def test_a_bad_token_deep_in_many_changes_nothing(session):
    k = ones(2, 500, 16)
    k[1, 400, 3] = np.inf
    with pytest.raises(errors.NonFiniteError, match="KV head 1, token 400"):
        session.update(0, k, ones(2, 500, 16))


def test_a_wrong_position_changes_nothing(session):
    with pytest.raises(errors.PositionError, match="holds 70 tokens; expected start=70"):
        session.update(0, ones(2, 1, 16), ones(2, 1, 16), start=69)
    with pytest.raises(errors.PositionError, match="last 71 tokens"):
        session.attention(0, ones(4, 71, 16))


def test_a_closed_session_says_so(db, spec):
    session = db.create_session(spec, [1, 2])
    session.close()
    session.close()
    for call in (
        lambda: session.update(0, ones(2, 1, 16), ones(2, 1, 16)),
        lambda: session.attention(0, ones(4, 1, 16)),
        session.fork,
        session.stats,
        lambda: session.explain(0),
        lambda: db.store(session, name="x"),
    ):
        with pytest.raises(errors.SessionClosed, match="create_session"):
            call()


def test_names(db, spec, make_kv):
    kv = make_kv(spec, 3)
    db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    with pytest.raises(errors.AlreadyExists, match="'doc' is stored already"):
        db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    for call in (db.get, db.drop):
        with pytest.raises(errors.NotFound, match=r"no context is named 'dog'.*'doc'"):
            call("dog")
    for name in ("", "a\nb", "x" * 2000):
        with pytest.raises(errors.InvalidArgument, match="printable"):
            db.import_context(spec, kv.tokens, kv.pairs(), name=name)
    assert [context.name for context in db.contexts()] == ["doc"]


def test_a_context_of_another_model_is_not_opened(db, spec, make_kv):
    kv = make_kv(spec, 3)
    context = db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    retrained = kvdb.ModelSpec("tiny", layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype="float32", fingerprint="step 2")
    with pytest.raises(errors.SpecMismatch, match="'doc' holds the KV of tiny"):
        context.create_session(kv.tokens, spec=retrained)
    with context, context.create_session(kv.tokens, spec=spec) as session:
        assert session.reused == 3


@pytest.mark.parametrize(
    ("error", "tokens"),
    [
        (errors.ShapeError, [[1, 2]]),
        (errors.DtypeError, [1.5]),
        (errors.InvalidArgument, [-1]),
        (errors.InvalidArgument, [1 << 40]),
    ],
)
def test_tokens_that_are_no_ids(db, spec, error, tokens):
    with pytest.raises(error, match="tokens"):
        db.create_session(spec, tokens)
    with pytest.raises(error):
        db.import_context(spec, tokens, [], name="doc")
    assert db.contexts() == []


def test_an_import_that_fails_is_invisible(db, spec, make_kv):
    kv = make_kv(spec, 100)
    poisoned = kv.pairs()
    poisoned[1][0][0, 50, 0] = np.nan
    cases = [
        (errors.NonFiniteError, poisoned),
        (errors.LayerError, kv.pairs()[:1]),
        (errors.ShapeError, kv.pairs(0, 99)),
        (errors.LayerError, [kv.pairs()[0]] * 3),
        (errors.DtypeError, [(k.astype(np.float16), v) for k, v in kv.pairs()]),
        (errors.InvalidArgument, None),
    ]
    for error, pairs in cases:
        with pytest.raises(error):
            db.import_context(spec, kv.tokens if pairs else [], pairs or [], name="doc")
        assert db.contexts() == []
        with db.create_session(spec, kv.tokens) as session:
            assert session.reused == 0


def test_a_wrong_number_of_layers_is_refused_also_when_all_is_stored(db, spec, make_kv):
    kv = make_kv(spec, 10)
    db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    with pytest.raises(errors.LayerError):
        db.import_context(spec, kv.tokens, kv.pairs()[:1], name="again")
    with pytest.raises(errors.LayerError):
        db.import_context(spec, kv.tokens, [*kv.pairs(), kv.pairs()[0]], name="again")
    assert [context.name for context in db.contexts()] == ["doc"]


def test_a_session_that_cannot_be_stored_goes_on(session, db):
    kv = session.kv
    with pytest.raises(errors.AlreadyExists):
        db.store(session, name="doc", tokens=kv.tokens)
    with pytest.raises(errors.InvalidArgument, match="holds 70 tokens and 69 ids"):
        db.store(session, name="x", tokens=kv.tokens[:69])
    other = kv.tokens.copy()
    other[3] += 1
    with pytest.raises(errors.InvalidArgument, match=r"tokens\[3\]"):
        db.store(session, name="x", tokens=other)
    with session.fork() as twin:
        twin.update(0, *(x[:, :1] for x in kv.pairs()[0]))
        with pytest.raises(errors.PositionError, match="70 to 71"):
            db.store(twin, name="x", tokens=kv.tokens)
    with db.create_session(session.spec, []) as empty, pytest.raises(errors.InvalidArgument, match="no tokens"):
        db.store(empty, name="x")


def test_a_budget_that_is_spent_changes_nothing(spec, make_kv):
    kv = make_kv(spec, 600)
    budget = Config(storage=StorageConfig(cpu_bytes_max=600 * spec.token_nbytes, arena_bytes=1 << 20))
    with kvdb.connect(config=budget) as db:
        with pytest.raises(errors.CapacityError, match="cpu_bytes_max"):
            db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        assert db.import_context(spec, kv.tokens[:200], kv.pairs(0, 200), name="doc").tokens == 200


BAD_SPECS = {
    "no layers": ("layers", {"layers": 0}),
    "layers without end": ("layers.*up to 1024", {"layers": 1 << 40}),
    "heads without end": ("q_heads.*up to 4096", {"q_heads": 1 << 20, "kv_heads": 1 << 20}),
    "heads in all": ("262144 in all", {"layers": 1024, "q_heads": 4096}),
    "groups": ("multiple of kv_heads", {"q_heads": 3}),
    "odd head_dim": ("multiple of 8", {"head_dim": 12}),
    "large head_dim": ("up to 640|to 640", {"head_dim": 648}),
    "dtype": ("dtype", {"dtype": "int8"}),
    "dtype of another type": ("dtype", {"dtype": ["float32"]}),
    "scale": ("positive number", {"scale": -1.0}),
    "scale of another type": ("positive number", {"scale": "1"}),
    "rotary_dims": ("rotary_dims", {"rope": kvdb.Rope(rotary_dims=64)}),
    "rope of another type": ("kvdb.Rope", {"rope": {"theta": 1e4}}),
    "name": ("name", {"name": None}),
    "long fingerprint": ("fingerprint.*at most 1024", {"fingerprint": "x" * 2000}),
}


@pytest.mark.parametrize("case", BAD_SPECS)
def test_a_spec_that_cannot_be(case):
    message, fields = BAD_SPECS[case]
    good = {"name": "m", "layers": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 16}
    with pytest.raises(errors.SpecError, match=message):
        kvdb.ModelSpec(**{**good, **fields})
    with pytest.raises(errors.SpecError):
        kvdb.ModelSpec.from_dict({**good, **fields, "rope": {"theta": -1}})


def test_a_rope_that_cannot_be():
    thetas, layouts = [{"theta": 0.0}, {"theta": "1"}, {"theta": float("inf")}], [{"layout": "spiral"}, {"layout": ["half"]}]
    dims = [{"rotary_dims": 3}, {"rotary_dims": "4"}]
    scalings = [{"scaling": 5}, {"scaling": {"factor": {"of": 2.0}}}, {"scaling": {"factor": object()}}]
    for wrong in [*thetas, *layouts, *dims, *scalings]:
        with pytest.raises(errors.SpecError, match=next(iter(wrong))):
            kvdb.Rope(**wrong)


def test_a_target_that_names_no_database(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for target in ("", "http://localhost", "kvdb:/localhost:1://"):
        with pytest.raises(errors.InvalidArgument, match="names no database; expected kvdb://host:port"):
            kvdb.connect(target)
    assert not list(tmp_path.iterdir())


def test_a_rule_that_does_not_exist():
    with pytest.raises(errors.ConfigError, match="'shrot_context'.*asked, short_context"):
        kvdb.connect(config=Config(optimizer=OptimizerConfig(rules_off=("shrot_context",))))


def test_a_closed_database(spec):
    db = kvdb.connect()
    session = db.create_session(spec, [1])
    db.close()
    db.close()
    with pytest.raises(errors.SessionClosed):
        session.stats()
    with pytest.raises(errors.Unavailable, match="connect again"):
        db.contexts()
