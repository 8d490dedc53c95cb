"""`kvdb explain` on a server."""

import json

import pytest

import kvdb
from kvdb.__main__ import main
from kvdb.commands.explain import table
from kvdb.config import Config, IndexConfig, OptimizerConfig, ServerConfig, StorageConfig, WindowConfig
from kvdb.database import Database
from kvdb.server.serve import Server
from query_optimizer.optimizer import Optimizer
from query_optimizer.plan import Plan
from query_optimizer.rules import base_rules
from tests.query_optimizer.made import facts, part, tail
from tests.query_optimizer.test_golden import MIXTURES, analyzed

NAME, N = "handbook", 1200


@pytest.fixture
def command(scan_for_flat, spec, make_kv, capsys):
    """`command(*arguments)` explains a context of 1,200 tokens, of which queries were kept: its status, and what it said."""
    config = Config(
        storage=StorageConfig(arena_bytes=1 << 20),
        indexes=IndexConfig(segment_tokens_min=100),
        window=WindowConfig(16, 64),
        optimizer=OptimizerConfig(64, ("short_context",)),
    )
    with Database(config) as engine:
        server = Server(engine, ServerConfig(port=0, token="secret"))
        server.start()
        kv = make_kv(spec, N)
        with kvdb.connect(server.target, token="secret") as db:
            db.import_context(spec, kv.tokens, kv.pairs(), name=NAME, queries=[8 * q[:, -4:] for q in kv.q])
            db.import_context(spec, kv.tokens[:5] + 1, kv.pairs(0, 5), name="short")
            db.build_index(NAME, "flat")

        def run(*arguments, name=NAME, token="secret"):
            status = main(["explain", name, *arguments, "--server", server.target, "--token", token])
            said = capsys.readouterr()
            return status, said.out + said.err

        yield run
        server.stop(grace=0)


def test_one_line_for_each_layer(command):
    status, said = command("--max-missed-mass", "0.5")
    assert status == 0
    head, titles, *layers, total = said.splitlines()
    assert head == "1,200 tokens, 2 KV heads, dipr(0.012) chosen by the optimizer"
    assert titles.split() == ["layer", "way", "rule", "cost", "ms", "bytes", "MiB"]
    assert [line.split()[:3] for line in layers] == [["0", "flat", "first_layers"], ["1", "flat", "cheapest_scan"]]
    assert total.split()[0] == "all"
    status, said = command()
    head, _, *layers, _ = said.splitlines()
    assert (status, head) == (0, "1,200 tokens, 2 KV heads, exact chosen by the optimizer")
    assert [line.split()[:3] for line in layers] == [["0", "exact", "error_budget"], ["1", "exact", "error_budget"]]


def test_with_what_it_took(command):
    status, said = command("--analyze", "--retrieval", "top-k", "--k", "7")
    head, titles, *layers, total = said.splitlines()
    assert (status, head) == (0, "1,200 tokens, 2 KV heads, top_k(7) asked for")
    assert titles.split()[-6:] == ["actual", "scanned", "read", "missed", "bound", "error"]
    for line in [*layers, total]:
        scanned, read, missed, bound, _ = (float(text.rstrip("%")) for text in line.split()[-5:])
        assert (scanned, 0 < read < 50, 0 < missed <= bound) == (100, True, True)


def test_with_an_error_of_its_own(command):
    status, said = command("--error-max", "0")
    assert (status, said.splitlines()[0]) == (0, "1,200 tokens, 2 KV heads, exact asked for")
    status, said = command("--error-max", "0.1", "--retrieval", "top-k")
    assert status == 2
    assert "error_max is 0.1 beside retrieval=top_k" in said


def test_the_tree_of_a_layer(command):
    status, said = command("--layer", "1", "--analyze", "--retrieval", "dipr", "--alpha", "0.1")
    assert status == 0
    assert said.startswith("Merge on layer 1  (cost=")
    assert "  Retrieve: dipr(0.1), asked for\n" in said
    assert "Tried Before" not in said
    status, said = command("--layer", "1", "--verbose", "--max-missed-mass", "0.5")
    assert "Tried Before cheapest_scan on segment " in said


def test_the_evidence_of_a_budget(command):
    _, said = command("--layer", "1", "--error-max", "0.02")
    assert "Rule: error_budget (no faster way is proven to keep its share of 2.00%; nearest: flat " in said
    assert "0 of 59 audits)" in said
    _, said = command("--layer", "1", "--verbose")
    ways = said[said.index("Tried Before error_budget on segment") :].splitlines()[1:]
    assert any(line.split()[:2] == ["flat", "dipr(0.012)"] and line.endswith("0 of 59 audits") for line in ways)


def test_hints_go_along(command):
    assert "Rule: hinted" in command("--layer", "1", "--index", "flat")[1]
    assert "Rule: no_index" in command("--layer", "0", "--rules-off", "error_budget, first_layers, cheapest_scan")[1]
    assert "Rule: no_index" in command("--layer", "1", "--memory-budget", "21000", "--rules-off", "error_budget")[1]
    assert "Rule: exact_asked" in command("--layer", "1", "--retrieval", "exact")[1]


def test_objects_for_machines_are_the_plans(command):
    status, said = command("--json", "--analyze")
    plans = [Plan.from_dict(json.loads(line)) for line in said.splitlines()]
    assert (status, [plan.layer for plan in plans]) == (0, [0, 1])
    assert all(plan.actual is not None for plan in plans)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "2"], "expected 0 to 1"),
        (["--rules-off", "hinted,none"], "'none'; expected one of exact_asked"),
        (["--memory-budget", "0"], "expected a positive number of bytes"),
        (["--memory-budget", "9"], "below the window"),
        (["--retrieval", "top_k", "--k", "0"], "expected an integer of at least 1"),
        (["--retrieval", "exact", "--index", "flat"], "exact attention reads everything"),
        (["--max-missed-mass", "2"], "expected a share of the softmax mass"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_one_line_and_status_2(command, arguments, message):
    status, said = command(*arguments)
    assert status == 2
    assert said.startswith("kvdb: ")
    assert message in said
    assert said.count("\n") == 1


def test_contexts_and_tokens_that_are_none(command):
    for expected, (status, said) in (
        (3, command(name="none")),
        (5, command(token="wrong")),
        (2, command("--analyze", name="short")),
    ):
        assert (status, said.count("\n")) == (expected, 1)


def test_a_retrieval_that_does_not_exist_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["explain", NAME, "--retrieval", "nearest"])
    assert ended.value.code == 2
    assert "top_p" in capsys.readouterr().err


def test_the_table_is_narrow_and_says_where_heads_and_retrievals_differ():
    optimizer = Optimizer(base_rules())
    given = [MIXTURES["heads that differ"], MIXTURES["heads whose rest is estimated"], facts(part("segment 3", 50_000), tail())]
    said = table([optimizer.plan(one) for one in given])
    assert "top_k(64)" in said
    assert "hnsw 3, exact 1" in said
    assert "no_index" in said
    for plans in ([analyzed()] * 32, [optimizer.plan(one) for one in given]):
        assert max(map(len, table(plans).splitlines())) <= 100


@pytest.fixture
def running(spec, make_kv, capsys):
    """`running(*arguments)` asks a server that has a labelled session over 60 stored tokens and 4 others, which was queried."""
    kv = make_kv(spec, 64)
    with Database(Config(storage=StorageConfig(arena_bytes=1 << 20))) as engine:
        server = Server(engine, ServerConfig(port=0))
        server.start()
        with kvdb.connect(server.target) as db:
            db.import_context(spec, kv.tokens[:60], kv.pairs(0, 60), name=NAME)
            with db.create_session(spec, kv.tokens, label="request-7") as session, db.create_session(spec, kv.tokens):
                for layer in range(spec.layers):
                    session.attend(layer, kv.q[layer][:, 60:], kv.k[layer][:, 60:], kv.v[layer][:, 60:])

                def run(*arguments):
                    status = main(["explain", *arguments, "--server", server.target])
                    said = capsys.readouterr()
                    return status, said.out + said.err

                yield run
            assert not db.sessions()
        server.stop(grace=0)


def test_open_sessions_that_have_a_label_are_listed(running, spec):
    assert running("--session") == (0, f"64 tokens, 60 of them stored, {spec.layers} queries  request-7\n")
    status, said = running("--session", "--json")
    assert (status, json.loads(said)) == (0, {"label": "request-7", "tokens": 64, "reused": 60, "queries": spec.layers})


def test_an_open_session_is_explained_by_its_label(running, spec):
    status, said = running("--session", "request-7", "--analyze", "--json")
    plans = [json.loads(line) for line in said.splitlines()]
    assert (status, [plan["layer"] for plan in plans]) == (0, list(range(spec.layers)))
    status, said = running("--session", "request-7", "--layer", "1")
    assert status == 0
    assert "layer 1" in said


@pytest.mark.parametrize("arguments", [("--session", "request-8"), (), (NAME, "--session", "request-7")])
def test_what_names_no_session_or_too_much_is_refused(running, arguments):
    status, said = running(*arguments)
    assert status != 0
    assert "label" in said or "expected one of the two" in said
