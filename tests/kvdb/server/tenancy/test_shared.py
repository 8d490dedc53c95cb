"""Contexts that a tenant shares with others: read by whom the owner says, and changed by the owner alone."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import kvdb
from kvdb import errors
from kvdb.config import Config, StorageConfig
from kvdb.database import Database
from kvdb.server.tenancy.database import TenantDatabase
from kvdb.types import ContextUpdate, PromptPart
from tests.kvdb.server.tenancy.test_tenants import TENANTS, error_of, world

__all__ = ["world"]
NAMES, READERS = ("doc", "note"), ("acme", "globex", "initech")


@pytest.fixture
def shared(world, spec, make_kv):
    """Two tenants, of whom the first shares a context with the second."""
    kv = make_kv(spec, 130, seed=1)
    with world.clients(*TENANTS) as (acme, globex):
        acme.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        assert acme.update("doc", shared_with=["globex"]).info.shared_with == ("globex",)
        yield acme, globex, kv


def attention(db, spec, kv, *parts):
    with db.create_session(spec, parts=parts) as session:
        k, v = (array[:, :1] for array in kv.pairs()[0])
        return session.attend(0, kv.q[0][:, :1], k, v, retrieval=kvdb.Exact())


def test_who_it_is_shared_with_reads_it(shared, spec):
    acme, globex, kv = shared
    context = globex.get("acme/doc")
    assert (context.name, context.tokens) == ("acme/doc", 130)
    np.testing.assert_array_equal(context.token_ids(), kv.tokens)
    np.testing.assert_array_equal(context.read(0)[0], kv.pairs()[0][0])
    own = attention(acme, spec, kv, "doc")
    np.testing.assert_array_equal(attention(globex, spec, kv, "acme/doc"), own)
    np.testing.assert_array_equal(attention(globex, spec, kv, context), own)


def test_of_its_owner_it_tells_nothing(shared):
    acme, globex, _ = shared
    acme.update("doc", metadata={"secret": 1}, pinned=True)
    info = globex.get("acme/doc").info
    assert (info.metadata, info.salt, info.pinned, info.shared_with, info.uses, info.created) == ({}, "", False, (), 0, 0.0)


def test_it_is_neither_changed_nor_found_nor_listed(shared, spec):
    acme, globex, kv = shared
    unknown = error_of(lambda: globex.update("acme/none", pinned=True))
    for call in (
        lambda: globex.update("acme/doc", pinned=True),
        lambda: globex.update("acme/doc", shared_with=["globex", "initech"]),
        lambda: globex.rename("acme/doc", "mine"),
        lambda: globex.drop("acme/doc"),
        lambda: globex.offload("acme/doc"),
        lambda: globex.build_index("acme/doc"),
    ):
        kind, text = error_of(call)
        assert (kind, text.replace("acme/doc", "acme/none")) == unknown
    assert globex.contexts() == []
    assert globex.match(spec, kv.tokens).tokens == 0
    assert acme.get("doc").info.shared_with == ("globex",)


def test_what_stands_on_it_is_not_stored(shared, spec):
    _, globex, _ = shared
    with globex.create_session(spec, parts=["acme/doc"]) as session, session.fork() as twin:
        for one in (session, twin):
            with pytest.raises(errors.Unsupported, match="another tenant"):
                one.store("copy")


def test_it_stands_beside_ones_own(world, make_kv):
    spec = kvdb.ModelSpec("roped", layers=1, q_heads=4, kv_heads=2, head_dim=16, dtype="float32", rope=kvdb.Rope())
    kv = make_kv(spec, 40)
    with world.clients(*TENANTS) as (acme, globex):
        for db in (acme, globex):
            db.import_chunk(spec, kv.tokens, kv.pairs(), name="chunk")
        acme.update("chunk", shared_with=["globex"])
        np.testing.assert_array_equal(
            attention(globex, spec, kv, "acme/chunk", "chunk"), attention(globex, spec, kv, "chunk", "chunk")
        )


def test_an_own_context_of_that_name_comes_first(shared, spec, make_kv):
    _, globex, kv = shared
    other = make_kv(spec, 10, seed=2)
    globex.import_context(spec, other.tokens, other.pairs(), name="acme/doc")
    assert globex.get("acme/doc").tokens == 10
    globex.drop("acme/doc")
    assert globex.get("acme/doc").tokens == len(kv.tokens)


def test_it_ends_for_new_readers_alone(shared, spec):
    acme, globex, kv = shared
    with globex.create_session(spec, parts=["acme/doc"]) as session:
        acme.update("doc", shared_with=[])
        assert error_of(lambda: globex.get("acme/doc"))[0] is errors.NotFound
        k, v = (array[:, :1] for array in kv.pairs()[0])
        session.attend(0, kv.q[0][:, :1], k, v)


def test_a_new_context_of_the_same_name_is_not_shared(shared, spec):
    acme, globex, kv = shared
    acme.rename("doc", "report")
    assert globex.get("acme/report").tokens == 130
    acme.drop("report")
    acme.import_context(spec, kv.tokens, kv.pairs(), name="report")
    with pytest.raises(errors.NotFound):
        globex.get("acme/report")


@pytest.mark.parametrize("given", ["globex", 3, [1], ["a/b"], [""], ["x" * 65], [f"t{i}" for i in range(65)]])
def test_what_is_no_list_of_tenants_is_refused(shared, given):
    acme, _, _ = shared
    with pytest.raises(errors.InvalidArgument, match="shared_with"):
        acme.update("doc", shared_with=given)
    assert acme.get("doc").info.shared_with == ("globex",)


def test_it_outlives_a_restart(tmp_path, spec, make_kv):
    kv, config = make_kv(spec, 40), Config(storage=StorageConfig(cpu_bytes_max=1 << 26))
    with kvdb.connect(tmp_path / "store", config=config) as db:
        db.import_context(spec, kv.tokens, kv.pairs(), name="acme/doc", metadata={"a": 1})
        db.update("acme/doc", shared_with=["globex", "b", "globex"])
    with kvdb.connect(tmp_path / "store", config=config) as db:
        info = db.get("acme/doc").info
        assert (info.shared_with, info.metadata) == (("b", "globex"), {"a": 1})


def test_ids_before_a_chunk_find_nothing_of_another_salt(engine, make_kv):
    spec = kvdb.ModelSpec("roped", layers=1, q_heads=4, kv_heads=2, head_dim=16, dtype="float32", rope=kvdb.Rope())
    kv, chunk = make_kv(spec, 130), make_kv(spec, 20, seed=3)
    tenant = TenantDatabase(engine, "acme", list)
    for writer, stored in (
        (engine.begin_import(spec, kv.tokens, "operators"), kv),
        (tenant.begin_import(spec, chunk.tokens, "chunk", 0), chunk),
    ):
        writer.write(0, *stored.pairs()[0])
        writer.commit()
    session = tenant.create_session_of_parts(spec, [PromptPart(kv.tokens), PromptPart("chunk")])
    assert [one.kind for one in session.layout] == ["tokens", "chunk"]
    session.close()


class Sharing(RuleBasedStateMachine):
    """Three tenants that store, share, rename and drop at random: nobody reads what a model does not allow."""

    spec = kvdb.ModelSpec("tiny", layers=1, q_heads=1, kv_heads=1, head_dim=8, dtype="float32")

    @initialize()
    def begin(self):
        self.engine = Database(Config())
        self.views = {tenant: TenantDatabase(self.engine, tenant, list) for tenant in READERS}
        self.stored = {}  # (owner, name) -> (tokens, who it is shared with)

    @rule(owner=st.sampled_from(READERS), name=st.sampled_from(NAMES), tokens=st.integers(1, 3))
    def store(self, owner, name, tokens):
        if (owner, name) not in self.stored:
            kv = np.zeros((1, tokens, 8), np.float32)
            writer = self.views[owner].begin_import(self.spec, np.arange(tokens, dtype=np.int32), name)
            if writer.start < tokens:
                writer.write(0, kv[:, writer.start :], kv[:, writer.start :])
            writer.commit()
            self.stored[owner, name] = tokens, frozenset()

    @precondition(lambda self: self.stored)
    @rule(data=st.data(), readers=st.sets(st.sampled_from(READERS)))
    def share(self, data, readers):
        owner, name = data.draw(st.sampled_from(sorted(self.stored)))
        self.views[owner].update(name, ContextUpdate(shared_with=tuple(sorted(readers))))
        self.stored[owner, name] = self.stored[owner, name][0], frozenset(readers)

    @precondition(lambda self: self.stored)
    @rule(data=st.data(), new=st.sampled_from(NAMES))
    def rename(self, data, new):
        owner, name = data.draw(st.sampled_from(sorted(self.stored)))
        if (owner, new) not in self.stored:
            self.views[owner].update(name, ContextUpdate(name=new))
            self.stored[owner, new] = self.stored.pop((owner, name))

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def drop(self, data):
        owner, name = data.draw(st.sampled_from(sorted(self.stored)))
        self.views[owner].drop(name)
        del self.stored[owner, name]

    @rule(reader=st.sampled_from(READERS), owner=st.sampled_from(READERS), name=st.sampled_from(NAMES))
    def read(self, reader, owner, name):
        tokens, readers = self.stored.get((owner, name), (0, frozenset()))
        view, asked = self.views[reader], f"{owner}/{name}"
        if reader in readers:
            assert view.get(asked).tokens == tokens
            view.create_session_of_parts(self.spec, [PromptPart(asked)]).close()
        else:
            for call in (view.get, view.token_ids, view.open_context):
                with pytest.raises(errors.NotFound):
                    call(asked)
            with pytest.raises(errors.NotFound):
                view.create_session_of_parts(self.spec, [PromptPart(asked)])

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.check_integrity()
            self.engine.close()


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
