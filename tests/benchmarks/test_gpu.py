"""The GPU's benchmark, where there is no card: every question runs, results are right, and no time is told."""

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import reference
from benchmarks.gpu.card import Card
from benchmarks.gpu.results import TIMED, Results, Wrong, read, table
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.supervise import supervise

ROOT = Path(__file__).parents[2]
no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="what is tested is what happens without a card")
pytestmark = no_card


def asked(name, path, seed=3):
    results = Results(path, name, timed=False)
    SECTIONS[name].run(Card(), results, seed)
    return [row for row in read(path) if row["benchmark"] == "gpu"]


@pytest.mark.parametrize("name", SECTIONS)
def test_every_question_is_answered_without_times(name, tmp_path):
    rows = asked(name, tmp_path / "rows.jsonl")
    assert rows
    assert not [row for row in rows if "skipped" in str(row.get("status"))]
    assert not [row for row in rows if set(row) & set(TIMED)]
    assert all(row["error"] <= 0.01 for row in rows if "error" in row)


def test_all_of_it_is_one_command(tmp_path):
    path = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu", "--only", "build", "--json", str(path), "--seed", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = read(path)
    assert rows[0]["benchmark"] == "gpu.machine"
    assert rows[0]["card"] is None
    assert rows[0]["seed"] == 5
    assert [row["question"] for row in rows if row["benchmark"] == "gpu.end"] == ["build"]
    assert [line for line in done.stdout.splitlines() if line.startswith("{")] == path.read_text().splitlines()
    assert "No card was found" in done.stdout
    assert not {name for row in rows for name in row} & {*TIMED, "seconds"}
    (header,) = [line for line in done.stdout.splitlines() if line.startswith("question")]
    assert "ms" not in header.split()


ONE_AFTER_THE_OTHER = """
import sys
from benchmarks.gpu.__main__ import main

path, *names = sys.argv[1:]
for name in names:
    sys.argv[1:] = ["--section", name, "--json", path]
    main()
"""


def test_a_checkout_without_compiled_kernels_answers_what_it_can(tmp_path):
    """A machine with torch and Triton alone: -S hides the editable installation, which knows the compiled modules."""
    path = tmp_path / "rows.jsonl"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(part for part in sys.path if part.endswith("site-packages"))}
    command = [sys.executable, "-S", "-c", ONE_AFTER_THE_OTHER, str(path), "overlap", "shared"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    rows = [row for row in read(path) if row["benchmark"] == "gpu"]
    assert [row.get("status") for row in rows] == ["skipped", None, None]
    assert "not compiled" in rows[0]["note"]
    assert [row["what"] for row in rows[1:]] == ["1 session", "5 sessions"]


def test_a_kernel_that_forgets_a_token_is_found_out(tmp_path, monkeypatch):
    from benchmarks.gpu import decoding

    decode = decoding.decode

    def forgetful(q, pages, batch, *rest):
        batch.lengths -= 1
        decode(q, pages, batch, *rest)
        batch.lengths += 1

    monkeypatch.setattr(decoding, "decode", forgetful)
    with pytest.raises(Wrong, match=r"decode, batch 1, 136 tokens: row \[0, \d\] is off by"):
        asked("decode", tmp_path / "rows.jsonl")


def test_a_kernel_that_leaves_its_output_alone_is_found_out(tmp_path, monkeypatch):
    from benchmarks.gpu import decoding

    monkeypatch.setattr(decoding, "decode", lambda *_: None)
    with pytest.raises(Wrong, match=r"128 elements are not finite"):
        asked("decode", tmp_path / "rows.jsonl")


def test_a_search_that_misses_tokens_is_found_out(tmp_path, monkeypatch):
    from benchmarks.gpu import retrieving

    dipr = retrieving.dipr
    monkeypatch.setattr(retrieving, "dipr", lambda q, pages, runs, scale, beta, *rest: dipr(q, pages, runs, scale, 0.0, *rest))
    with pytest.raises(Wrong, match=r"\d+ tokens within the range were not attended in sequence 0"):
        asked("dipr", tmp_path / "rows.jsonl")


def test_what_fails_or_hangs_takes_nothing_with_it(capfd):
    failed = supervise([sys.executable, "-c", "import sys; print('on the way', file=sys.stderr); raise ValueError('no')"], 20.0)
    assert (failed.status, failed.error) == ("failed", "ValueError: no")
    assert "on the way" in capfd.readouterr().err
    hung = supervise([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
    assert hung.status == "out of time"
    assert hung.seconds < 20
    assert supervise([sys.executable, "-c", "pass"], 20.0).status == "done"


def test_times_are_written_on_a_card_alone(tmp_path):
    figures = {"ms": 1.23456, "gb_s": 4000.0, "of_copy": 0.91, "ratio": 2.0, "reach": ">= 1", "holds": True, "error": 0.0017}
    for timed in (True, False):
        Results(tmp_path / f"{timed}", "decode", timed).add("batch 1", "kvdb", **figures)
    (told,), (kept,) = read(tmp_path / "True"), read(tmp_path / "False")
    assert told["ms"] == 1.235
    assert set(told) - set(kept) == set(TIMED)
    cells = ["decode", "batch 1", "kvdb", "1.235", "4000.0", "91.0 %", "2.0x", ">= 1", "yes", "0.17 %"]
    assert re.split(" {2,}", table([told]).splitlines()[1]) == cells
    assert table([kept]).splitlines() == ["question  case     what  error", "decode    batch 1  kvdb  0.17 %"]


@no_card
def test_without_a_card_nothing_is_checked_and_that_is_said(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check"])
    runpy.run_module("benchmarks.gpu.check", run_name="__main__")
    (said,) = capsys.readouterr().out.splitlines()
    assert "no card" in said


def test_the_table_says_what_failed(tmp_path):
    Results(tmp_path / "rows", "dipr", timed=False).end("failed", 1.0, "Wrong: off")
    assert table(read(tmp_path / "rows")).splitlines()[1].split() == ["dipr", "FAILED", "Wrong:", "off"]
    assert "seconds" not in json.loads((tmp_path / "rows").read_text())


class Clocked(Card):
    """The smallest sizes, and a clock that says what it likes."""

    def __init__(self):
        super().__init__()
        self.timed = True
        self.sizes = replace(self.sizes, tokens=72, batches=(1,), sessions=1, sharing=2)

    def time(self, candidates, rounds=30, budget_s=3.0):
        for run in candidates.values():
            run()
        return {name: 1.0 + number for number, name in enumerate(candidates)}

    def wall(self, run, calls=200):
        run()
        return 2.0


@pytest.mark.parametrize("name", [name for name in SECTIONS if name not in {"dipr", "model"}])
def test_with_times_every_question_tells_them(name, tmp_path):
    path = tmp_path / "rows.jsonl"
    SECTIONS[name].run(Clocked(), Results(path, name, timed=True), 3)
    rows = read(path)
    assert any(row.get("ms", 0) > 0 for row in rows)
    assert all(("reach" in row) == ("holds" in row) for row in rows)
    assert len(table(rows).splitlines()) == 1 + len(rows)


def test_the_median_of_the_cards_own_events_is_told(monkeypatch):
    class Event:
        clock = 0.0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = Event.clock

        def elapsed_time(self, end):
            return end.at - self.at

    for name, fake in {"Event": Event, "synchronize": lambda: None, "_sleep": lambda _: None}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    card = Card()
    card.timed, card._flushed = True, torch.ones(4, dtype=torch.uint8)
    took = iter([0.0] * 3 + [5.0, 1.0, 3.0, 9.0, 2.0])

    def run():
        Event.clock += next(took)

    assert card.time({"it": run}, rounds=5) == {"it": 3.0}
    assert not card._flushed.any()
    assert card.wall(lambda: None, calls=5) >= 0


@pytest.mark.parametrize("n", [1, 100, reference.PIECE + 3])
def test_the_reference_is_dense_attention(n):
    rng = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(*size, generator=rng, dtype=torch.float64) for size in ((4, 8), (2, n, 8), (2, n, 8)))
    kept = torch.rand(2, n, generator=rng) < 0.5
    for mask in (None, kept):
        got = reference.attention(q, k, v, 0.3, mask)
        raw = (q.view(2, 2, 8) @ k.transpose(1, 2)).masked_fill(~(kept if mask is not None else kept | True)[:, None], -torch.inf)
        logits = 0.3 * raw
        expected = logits.softmax(-1).nan_to_num(0) @ v
        assert torch.allclose(got.out, expected.flatten(0, 1))
        assert torch.allclose(got.lse, logits.logsumexp(-1).flatten())
        assert torch.equal(got.top, raw.amax(-1).flatten())
    wanted = (q.view(2, 2, 8) @ k.transpose(1, 2)) >= 0.5
    assert reference.overlooked(q, k, kept, torch.full((4,), 0.5)) == int((wanted & ~kept[:, None]).sum())


def test_sharp_heads_are_sharp():
    from benchmarks.gpu.sharp import sharp
    from benchmarks.workloads import MASS, SHARP_TOKENS

    card = Card()
    k, _, q = sharp(card, 1, 1000)
    logits = q.double().view(card.sizes.kv_heads, card.sizes.group, -1) @ k.double().transpose(1, 2) / card.sizes.head_dim**0.5
    share = logits.softmax(-1).topk(SHARP_TOKENS).values.sum(-1)
    assert torch.allclose(share, torch.full_like(share, MASS), atol=0.02)
    assert all(torch.equal(a, b) for a, b in zip(sharp(card, 1, 1000), sharp(card, 1, 1000), strict=True))
