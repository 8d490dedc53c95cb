"""Sessions against dense attention, on an embedded and a remote database."""

import numpy as np
import pytest

import kvdb
from kvdb.types import DTYPES
from tests.reference import TOLERANCE, attention, relative_error

EDGES = [1, 63, 64, 65, 127, 129, 200]


def check_layer(spec, kv, layer, out, total, n):
    """`out` is the attention of tokens [total - n, total) over [0, total)."""
    expected, _ = attention(
        kv.q[layer][:, total - n : total], kv.k[layer][:, :total], kv.v[layer][:, :total], spec.softmax_scale, new=n
    )
    assert out.dtype == spec.numpy_dtype
    assert relative_error(out, expected) <= TOLERANCE[spec.dtype]


@pytest.mark.parametrize("stored", [0, *EDGES])
@pytest.mark.parametrize("new", [1, 2, 66])
def test_attend_over_stored_and_new_tokens_is_dense_attention(db, spec, make_kv, stored, new):
    kv = make_kv(spec, stored + new)
    if stored:
        db.import_context(spec, kv.tokens[:stored], kv.pairs(0, stored), name="doc")
    with db.create_session(spec, kv.tokens) as session:
        assert session.reused == stored
        for layer in range(spec.layers):
            now = slice(stored, None)
            out = session.attend(layer, kv.q[layer][:, now], kv.k[layer][:, now], kv.v[layer][:, now], start=stored)
            check_layer(spec, kv, layer, out, stored + new, new)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(1, 1, 8), (6, 2, 40), (8, 1, 128), (3, 3, 256)])
def test_every_dtype_ratio_and_head_size(db, make_kv, dtype, q_heads, kv_heads, head_dim):
    spec = kvdb.ModelSpec("m", 1, q_heads, kv_heads, head_dim, dtype)
    kv = make_kv(spec, 150)
    db.import_context(spec, kv.tokens[:100], kv.pairs(0, 100), name="doc")
    with db.create_session(spec, kv.tokens[:100]) as session:
        for i in range(100, 150):
            one = slice(i, i + 1)
            out = session.attend(0, kv.q[0][:, one], kv.k[0][:, one], kv.v[0][:, one])
        check_layer(spec, kv, 0, out, 150, 1)


def test_update_then_attention_is_attend(db, spec, make_kv):
    kv = make_kv(spec, 70)
    with db.create_session(spec, kv.tokens) as apart, db.create_session(spec, kv.tokens) as together:
        apart.update(1, *kv.pairs()[1])
        out = apart.attention(1, kv.q[1])
        assert (out == together.attend(1, kv.q[1], *kv.pairs()[1])).all()
        check_layer(spec, kv, 1, apart.attention(1, kv.q[1][:, -3:]), 70, 3)


def test_a_prompt_that_ends_inside_a_segment_reads_only_its_beginning(db, spec, make_kv):
    kv = make_kv(spec, 130)
    db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    prompt = np.append(kv.tokens[:70], 5000)
    with db.create_session(spec, prompt) as session:
        assert session.reused == 70
        new = make_kv(spec, 1, seed=3)
        out = session.attend(0, new.q[0], new.k[0], new.v[0])
        k, v = (np.concatenate([old[:, :70], one], axis=1) for old, one in ((kv.k[0], new.k[0]), (kv.v[0], new.v[0])))
        assert relative_error(out, attention(new.q[0], k, v, spec.softmax_scale, new=1)[0]) <= 1e-5
        assert "the first 70 of 130 tokens are visible" in str(session.explain(0))


def test_forks_go_their_own_ways(db, spec, make_kv):
    """Copy-on-write: twins share a partly filled block until one of them writes into it."""
    kv, other = make_kv(spec, 100), make_kv(spec, 100, seed=1)
    with db.create_session(spec, kv.tokens) as session:
        for layer, (k, v) in enumerate(kv.pairs(0, 90)):
            session.update(layer, k, v)
        with session.fork() as twin:
            mine = session.attend(0, kv.q[0][:, 90:], *(x[:, 90:] for x in kv.pairs()[0]))
            theirs = twin.attend(0, other.q[0][:, 90:], *(x[:, 90:] for x in other.pairs()[0]))
            check_layer(spec, kv, 0, mine, 100, 10)
            k, v = (np.concatenate([a[:, :90], b[:, 90:]], axis=1) for a, b in zip(kv.pairs()[0], other.pairs()[0], strict=True))
            assert relative_error(theirs, attention(other.q[0][:, 90:], k, v, spec.softmax_scale, new=10)[0]) <= 1e-5
        check_layer(spec, kv, 0, session.attention(0, kv.q[0]), 100, 100)


def test_a_fork_survives_a_refused_update_and_the_end_of_its_twin(db, spec, make_kv):
    """A refused update may have copied the shared block already; queries must read the copy, for the twin's block is reused."""
    kv = make_kv(spec, 70)
    with db.create_session(spec, kv.tokens) as session:
        session.update(0, *kv.pairs()[0])
        twin = session.fork()
        with pytest.raises(kvdb.errors.NonFiniteError):
            session.update(0, *(x[:, :1] * np.nan for x in kv.pairs()[0]))
        twin.close()
        with db.create_session(spec, kv.tokens) as other:
            other.update(0, *(x[:, ::-1] for x in make_kv(spec, 700, seed=5).pairs()[0]))
            check_layer(spec, kv, 0, session.attention(0, kv.q[0]), 70, 70)


@pytest.mark.parametrize("cut", [0, 10, 64])
def test_a_stored_session_is_found_again(db, spec, make_kv, cut):
    kv = make_kv(spec, 150)
    if cut:
        db.import_context(spec, kv.tokens[:cut], kv.pairs(0, cut), name="beginning")
    with db.create_session(spec, kv.tokens[: max(cut, 1)]) as session:
        for layer, (k, v) in enumerate(kv.pairs(cut)):
            session.update(layer, k, v)
        context = db.store(session, name="whole", tokens=kv.tokens)
        assert context.tokens == 150
    with db.create_session(spec, kv.tokens) as again:
        assert again.reused == 150
        check_layer(spec, kv, 1, again.attention(1, kv.q[1]), 150, 150)


def test_two_sessions_that_store_the_same_keep_it_once(db, spec, make_kv):
    kv = make_kv(spec, 100)
    with db.create_session(spec, kv.tokens) as first, db.create_session(spec, kv.tokens) as second:
        for layer, (k, v) in enumerate(kv.pairs()):
            first.update(layer, k[:, :70], v[:, :70])
            second.update(layer, k, v)
        db.store(first, name="short", tokens=kv.tokens[:70])
        db.store(second, name="long")
    with db.create_session(spec, kv.tokens) as again:
        assert again.reused == 100
        check_layer(spec, kv, 0, again.attention(0, kv.q[0]), 100, 100)
    assert db.get("short").info.segments == db.get("long").info.segments == 1


def test_a_session_outlives_the_context_it_was_opened_on(db, spec, make_kv):
    kv = make_kv(spec, 80)
    context = db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    with db.create_session(spec, kv.tokens) as session:
        context.drop()
        assert db.contexts() == []
        with db.create_session(spec, kv.tokens) as late:
            assert late.reused == 0
        check_layer(spec, kv, 0, session.attention(0, kv.q[0][:, -1:]), 80, 1)
        db.store(session, name="again")
    with db.create_session(spec, kv.tokens) as late:
        assert late.reused == 80


def test_what_is_stored_already_is_not_stored_again(db, spec, make_kv):
    kv = make_kv(spec, 128)
    db.import_context(spec, kv.tokens[:64], kv.pairs(0, 64), name="half")
    context = db.import_context(spec, kv.tokens, kv.pairs(), name="whole")
    assert context.info.segments == 2
    assert context.info.nbytes == 128 * spec.token_nbytes * spec.layers
    assert db.import_context(spec, kv.tokens, kv.pairs(), name="again").info.nbytes == context.info.nbytes


def test_models_do_not_share_a_cache(db, spec, make_kv):
    kv = make_kv(spec, 64)
    db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    other = kvdb.ModelSpec(spec.name, 2, 4, 2, 16, "float32", fingerprint="other weights")
    with db.create_session(other, kv.tokens) as session:
        assert session.reused == 0


def test_torch_tensors_come_back_as_torch_tensors(db, make_kv):
    torch = pytest.importorskip("torch")
    spec = kvdb.ModelSpec("m", 1, 2, 1, 32, "bfloat16")
    q, k, v = (torch.randn(heads, 9, 32).to(torch.bfloat16) for heads in (2, 1, 1))
    with db.create_session(spec, torch.arange(9)) as session:
        out = session.attend(0, q.transpose(0, 1).contiguous().transpose(0, 1), k, v)
    assert out.dtype is torch.bfloat16
    expected, _ = attention(q.float(), k.float(), v.float(), spec.softmax_scale, new=9)
    assert relative_error(out.float(), expected) <= 5e-3


def test_a_context_closes_the_sessions_opened_through_it(db, spec, make_kv):
    kv = make_kv(spec, 64)
    with db.import_context(spec, kv.tokens, kv.pairs(), name="doc") as context:
        session = context.create_session(kv.tokens)
        assert session.reused == 64
    with pytest.raises(kvdb.errors.KvdbError):
        session.attention(0, kv.q[0])
    assert [c.name for c in db.contexts()] == ["doc"]
    assert db.get("doc").tokens == 64


def test_stats_count_what_was_read(db, spec, make_kv):
    kv = make_kv(spec, 100)
    db.import_context(spec, kv.tokens[:90], kv.pairs(0, 90), name="doc")
    with db.create_session(spec, kv.tokens) as session:
        session.attend(0, kv.q[0][:, 90:], *(x[:, 90:] for x in kv.pairs()[0]))
        session.update(1, *(x[:, 90:] for x in kv.pairs()[1]))
        stats = session.stats()
    assert (stats.tokens, stats.reused, stats.tail_tokens, stats.queries) == (100, 90, 10, 1)
    assert stats.tokens_scanned == 100
    assert stats.bytes_read == 100 * spec.token_nbytes
    assert stats.rules == {"short_context": 1}
