"""What the console tells of a database."""

import json
from dataclasses import replace
from math import inf
from time import time

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

import kvdb.server.console.api as api
from kvdb.errors import InvalidArgument, LayerError, NotFound, Unsupported
from kvdb.server.metrics.calls import METHODS, CallMetrics
from kvdb.server.tiers import tier_uses
from kvdb.types.measures import overall
from query_optimizer.query_options import NO_OPTIONS
from tests.kvdb.server.console.conftest import AWAY, BASE, HOSTILE, NOTES, SPEC, store


def test_an_overview_counts_and_adds_up_the_bytes_of_each_tier(database):
    told = api.overview(database)
    assert (told["contexts"], told["sessions"]) == (len(database.contexts()), 1)
    tiers = {tier["name"]: tier for tier in told["tiers"]}
    assert set(tiers) == {"cpu", "disk"}
    for name, tier in tiers.items():
        assert tier["used"] == sum(t.blocks_used * t.block_nbytes for t in database.tiers() if t.name == name) > 0
    assert tiers["cpu"]["limit"] == database.config.storage.cpu_bytes_max
    assert tiers["disk"]["limit"] is None


def test_pages_of_contexts_join_to_all_of_them(database):
    names, after = [], ""
    while after is not None:
        page = api.contexts(database, after=after, limit=1)
        names += [context["name"] for context in page["contexts"]]
        after = page["next"]
    assert names == [info.name for info in database.contexts()] == sorted([BASE, NOTES, HOSTILE, AWAY])
    assert [context["name"] for context in api.contexts(database, prefix="handbook/")["contexts"]] == [NOTES]


@pytest.mark.parametrize("limit", [0, api.PAGE_MAX + 1])
def test_a_page_is_neither_empty_nor_long(database, limit):
    with pytest.raises(InvalidArgument, match="expected 1 to"):
        api.contexts(database, limit=limit)


def test_contexts_over_the_same_tokens_show_the_same_segment(database):
    base, notes = api.context(database, BASE), api.context(database, NOTES)
    (first,) = base["views"]
    assert notes["views"][0]["segment"] == first["segment"]
    assert [view["begin"] for view in notes["views"]] == [0, first["visible"]]
    assert sum(view["visible"] for view in notes["views"]) == notes["tokens"]
    assert first["holders"] == 3  # two contexts and a session
    assert notes["views"][1]["holders"] == 1


def test_a_view_says_how_much_of_its_segment_it_sees(database):
    rng = np.random.default_rng(5)
    half = database.token_ids(BASE)[:100]
    store(database, "half", np.concatenate([half, np.arange(2000, 2010, dtype=np.int32)]), rng)
    try:
        cut, own = api.context(database, "half")["views"]
        assert (cut["visible"], cut["stored"], own["visible"], own["stored"]) == (100, 320, 10, 10)
    finally:
        database.drop("half")


def test_a_context_is_told_with_its_index_its_metadata_and_what_is_known_of_it(database):
    told = api.context(database, BASE)
    assert [(index["kind"], index["state"]) for index in told["indexes"]] == [("flat", "ready")]
    assert told["metadata"] == {"team": "legal"}
    assert told["pinned"]
    assert "retrieved" in told["measures"]
    assert told["model"]["layers"] == SPEC.layers
    assert not api.context(database, AWAY)["resident"]
    with pytest.raises(NotFound):
        api.context(database, "nobody")


def test_a_heat_map_has_a_value_for_each_layer_and_head(database):
    told = api.heat(database, BASE, "retrieved")
    expected = overall(database.statistics(BASE), "retrieved")
    assert expected.shape == (SPEC.layers, SPEC.q_heads)
    np.testing.assert_allclose(told["values"], expected, rtol=1e-4)
    assert told["queries"] == max(int(segment.queries.max()) for segment in database.statistics(BASE).segments) > 0
    assert np.isnan(api.heat(database, HOSTILE, "retrieved")["values"]).all()
    with pytest.raises(InvalidArgument, match="expected one of retrieved"):
        api.heat(database, BASE, "colour")


def test_sessions_are_told_with_or_without_a_label_the_latest_first(database):
    with_label = api.sessions(database)["sessions"]
    assert [(session["label"], session["queries"], session["reused"]) for session in with_label] == [("chat", 6, 320)]
    assert 0 < with_label[0]["retrieved"] <= 1
    other = database.create_session(SPEC, database.token_ids(HOSTILE))
    try:
        told = api.sessions(database)
        assert [session["label"] for session in told["sessions"]] == ["", "chat"]
        assert told["total"] == 2
        assert told["sessions"][0]["retrieved"] is None
        assert told["sessions"][0]["opened"] >= told["sessions"][1]["opened"] > time() - 600
        assert other.id.startswith(told["sessions"][0]["id"])
        assert len(told["sessions"][0]["id"]) < len(other.id)
    finally:
        other.close()


@pytest.mark.parametrize("analyze", [False, True])
def test_a_plan_is_told_as_the_tree_that_explain_draws(database, analyze):
    told = api.explain(database, BASE, 1, analyze)
    plan = database.explain(BASE, 1, NO_OPTIONS, analyze=False)[0]
    assert [access["part"] for access in told["accesses"]] == [access.part for access in plan.accesses]
    assert told["text"].startswith("Merge on layer 1")
    assert (told["actual"] is not None) == (told["outcome"] is not None) == analyze
    assert all((access["actual"] is not None) == analyze for access in told["accesses"])


def test_a_plan_of_a_session_is_found_by_its_id(database):
    (session,) = api.sessions(database)["sessions"]
    assert api.explain_session(database, session["id"], 0, analyze=True)["outcome"]["missed_true"] <= 1
    with pytest.raises(NotFound, match="nobody"):
        api.explain_session(database, "nobody", 0, analyze=False)


def test_a_plan_neither_brings_a_context_back_from_disk_nor_counts_as_its_use(database):
    with pytest.raises(Unsupported, match="is on disk"):
        api.explain(database, AWAY, 0, analyze=True)
    assert not database.get(AWAY).resident
    uses = database.get(BASE).uses
    api.explain(database, BASE, 0, analyze=True)
    assert database.get(BASE).uses == uses
    with pytest.raises(LayerError):
        api.explain(database, BASE, 99, analyze=False)


def test_looking_changes_nothing(database):
    database.check_integrity()
    before = database.tiers(), database.contexts(), api.sessions(database)
    api.overview(database)
    json.dumps([api.contexts(database), api.context(database, NOTES), api.explain(database, NOTES, 0, analyze=True)])
    assert before == (database.tiers(), database.contexts(), api.sessions(database))


def test_blocks_whose_pages_come_and_go_are_main_memory(database, monkeypatch):
    cpu = next(tier for tier in database.tiers() if tier.name == "cpu")
    monkeypatch.setattr(database, "tiers", lambda: [cpu, replace(cpu, name="paged")])
    (told,) = tier_uses(database)
    assert told == ("cpu", 2 * cpu.blocks_used * cpu.block_nbytes, 2 * cpu.nbytes, database.config.storage.cpu_bytes_max)


def test_calls_are_told_as_they_were_counted():
    measured, paths = CallMetrics(CollectorRegistry()), {name: path for path, name in METHODS.items()}
    for seconds in (2e-4, 3e-4, 2e-3):
        measured.stepped("attend", seconds)
    measured.ended(paths["GetContext"], grpc.StatusCode.NOT_FOUND, 0.02)
    measured.ended(paths["Decode"], grpc.StatusCode.OK, 60.0)  # a stream lasts as long as its session
    measured.failed(grpc.StatusCode.INVALID_ARGUMENT)
    told = api.calls(measured)
    assert told["codes"] == {"NOT_FOUND": 1, "OK": 1, "INVALID_ARGUMENT": 1}
    steps, calls = (dict(told["latencies"][kind]) for kind in ("steps", "calls"))
    assert (steps[2.5e-4], steps[1e-3], steps[inf]) == (1, 2, 3)
    assert (calls[0.01], calls[0.025], calls[inf]) == (0, 1, 1)


def test_calls_are_nothing_for_whoever_may_not_know():
    assert api.calls(None) == {}


def test_a_database_without_anything_has_an_empty_console(engine):
    assert api.overview(engine)["tiers"] == []
    assert api.contexts(engine) == {"contexts": [], "next": None}
    assert api.sessions(engine) == {"sessions": [], "total": 0}
