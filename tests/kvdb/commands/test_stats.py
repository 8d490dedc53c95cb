"""`kvdb stats` on a server."""

import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import kvdb
from kvdb.__main__ import main
from kvdb.attention.observation import Observation
from kvdb.client.client import Client
from kvdb.commands import heat_map
from kvdb.commands.measures import DRAWN, FORMS, text_map
from kvdb.commands.stats_table import audited
from kvdb.config import Config, ServerConfig, StorageConfig
from kvdb.database import Database
from kvdb.errors import InvalidArgument
from kvdb.server.serve import Server
from kvdb.types import ContextInfo, ContextStatistics, SegmentStatistics
from kvdb.types.measures import overall

NAME = "contract.pdf"
SPEC = kvdb.ModelSpec("model", layers=3, q_heads=4, kv_heads=2, head_dim=8, dtype="float32")
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def engine():
    with Database(Config(storage=StorageConfig(arena_bytes=1 << 20))) as database:
        yield database


@pytest.fixture
def segments(engine, make_kv):
    """Those of a context of 100 tokens, and of another that goes on for 30 after the first 60 of them."""
    kv = make_kv(SPEC, 130)
    kv.tokens[:] = np.arange(130)
    db = Client(engine)
    db.import_context(SPEC, kv.tokens[:100], kv.pairs(0, 100), name=NAME)
    other = np.concatenate([kv.tokens[:60], kv.tokens[100:]])
    db.import_context(SPEC, other, [(k[:, :90], v[:, :90]) for k, v in kv.pairs()], name="amendment.pdf")
    with closing(engine.create_session(SPEC, other)) as session:
        return [view.segment for view in session.views]


@pytest.fixture
def command(engine, segments, capsys):
    """`command(*arguments)` runs one against a server: its status, and what it said of segments #1 and #2."""
    server = Server(engine, ServerConfig(port=0))
    server.start()

    def run(*arguments):
        status = main(["stats", *arguments, "--server", server.target])
        said = capsys.readouterr()
        text = said.out + said.err
        for i, segment in enumerate(segments, 1):
            text = text.replace(f"segment {segment.number},", f"segment #{i},")
        return status, text

    yield run
    server.stop(grace=0)


def test_without_a_name_it_shows_what_memory_holds(engine, command):
    status, text = command()
    (tier,) = engine.tiers()
    *used, title, row, said = (line.split() for line in text.strip().splitlines() if line)
    assert [line[0] for line in used] == ["kvdb", "contexts", "sessions", "calls", "indexes"]
    assert used[1] == ["contexts", f"{len(engine.contexts())}"]
    assert used[2] == ["sessions", f"{engine.status().sessions}", "open"]
    assert said[:3] == ["contexts", "hold", f"{engine.space().held:,}"]
    assert status == 0
    assert title[:2] == ["tier", "blocks"]
    assert row == [tier.name, *(f"{n:,}" for n in (tier.blocks_used, tier.blocks_total, tier.block_nbytes, tier.nbytes, 0))]
    assert tier.blocks_used == 3 * 3  # blocks of 64: 100 tokens, and 30 of the other, in each of three layers


@pytest.mark.parametrize("flags", [["--layer", "0"], ["--png", "heat.png"], ["--measure", "error"]])
def test_what_is_of_a_context_wants_its_name(command, flags):
    status, text = command(*flags)
    assert status == 2
    assert "expected its name" in text


def observe(segment, layer, values, seen=None, times=1):
    one = Observation(np.array(values, np.float32), seen if seen is None else np.array(seen, bool))
    for _ in range(times):
        segment.statistics.observe(layer, one)


@pytest.fixture
def observed(segments):
    """Sharp heads in layer 0, one that is always dense in layer 1, of which one KV head was not asked, and nothing in layer 2."""
    first, _ = segments
    observe(first, 0, [[0.01, 0.012, 0.0005, 0], [0] * 4, [0.9, 0.75, 0.5, 0.9], [0, 1, 1, 0]], times=1200)
    observe(first, 0, [[0.02, 0.012, 0.0005, 0.1], [0] * 4, [0.8, 0.75, 0.5, 0.1], [1, 1, 1, 0]])
    observe(first, 1, [[1, 0.03, 0, 0], [1, 0, 0, 0], [0.002, 0.25, 0, 0], [0, 1, 0, 0]], [[1, 1, 0, 0]] * 4)


@pytest.mark.parametrize(("golden", "arguments"), [("layers", []), ("heads", ["--by", "head"]), ("layer_1", ["--layer", "1"])])
def test_it_says(command, observed, golden, arguments):
    status, said = command(NAME, *arguments)
    assert (status, said) == (0, (GOLDEN / f"stats_{golden}.txt").read_text())
    assert max(map(len, said.splitlines())) <= 100


def test_segments_stand_one_below_the_other(command, observed, segments):
    status, said = command("amendment.pdf")
    assert status == 0
    assert "\n\nsegments of which no search was observed: 1\n\n" in said
    assert "segment #2," not in said
    observe(segments[1], 2, np.full((4, 4), 0.25), times=7)
    status, said = command("amendment.pdf")
    assert "no search" not in said
    assert said.index("\nsegment #1, 100 tokens\n") < said.index("\nsegment #2, 30 tokens\n")
    assert "    2        7  25.00%  25.00%  25.00%   0.250  0.250  0.250     25%  25%  25%       0 of 4\n" in said


def test_a_large_model_fits_in_a_hundred_columns():
    from kvdb.commands.stats_table import heads_of_layer, summary

    segment = made(32, 32)
    segment.queries[:] = 1_234_567
    for text, rows in ((summary(segment, "layer"), 32), (summary(segment, "head"), 32), (heads_of_layer(segment, 31, 8), 32)):
        lines = text.splitlines()
        assert len(lines) - rows in {1, 2}
        assert max(map(len, lines)) <= 100
        assert len({len(line) for line in lines[-rows:]}) == 1


def test_where_nothing_was_observed_it_says_what_to_do(command, tmp_path):
    png = ["--png", str(tmp_path / "map.png")]
    for arguments, expected in (([], 0), (png, 1), (["--measure", "dense"], 0)):
        status, said = command(NAME, *arguments)
        assert status == expected
        assert said.startswith("no query of one token has searched an index of 'contract.pdf' yet: ")
        assert said.count("\n") == 1
    for arguments, expected in ((["--measure", "error"], 0), (["--measure", "error", *png], 1)):
        status, said = command(NAME, *arguments)
        assert status == expected
        assert said.startswith("no answer over 'contract.pdf' was compared with an exact one yet: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "expected", "error"),
    [
        (["none"], 3, "no context is named 'none'"),
        ([NAME, "--layer", "3"], 2, "layer is 3"),
        ([NAME, "--layer", "-1"], 2, "layer is -1"),
    ],
    ids=str,
)
def test_errors_are_one_line_and_have_a_status(command, observed, arguments, expected, error):
    status, said = command(*arguments)
    assert status == expected
    assert said.startswith("kvdb: ")
    assert error in said
    assert said.count("\n") == 1


def test_without_matplotlib_a_picture_is_refused_and_the_table_is_not(command, observed, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, said = command(NAME, "--png", str(tmp_path / "map.png"))
    assert status == 1
    assert said.endswith("kvdb: a heat map needs matplotlib, which is not installed; pip install 'kvdb[plots]'\n")
    assert command(NAME)[0] == 0


def made(layers, heads, number=1):
    """Statistics of a segment, seeded by their shape, in which the first head is dense, a few were not observed, and of every
    fourth audits are too few."""
    rng = np.random.default_rng(layers * heads + number)
    queries = np.full((layers, heads), 100)
    if layers > 2:
        queries[2, 1:] = 0
    shares = rng.random((4, layers, heads)).astype(np.float32)
    shares[1] = 0
    if heads > 1:
        shares[:2, 0, 0] = 1
    audits = np.full((layers, heads), 181)
    error = (10.0 ** -rng.uniform(0.5, 4, (layers, heads))).astype(np.float32)
    audits[:, 3::4], error[:, 3::4] = 12, np.inf
    return SegmentStatistics(number, 50_000, queries, *np.where(queries, shares, 0), audits, error)


def picture(path, layers, heads, measures=DRAWN, name=NAME):
    """The pixels drawn, float32 `[height, width, 4]`."""
    image = pytest.importorskip("matplotlib.image")
    info = ContextInfo(name, kvdb.ModelSpec("m", layers, heads, 1, 8), 50_000, 1, 0)
    heat_map.draw(info, ContextStatistics(name, (made(layers, heads),)), measures, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    return image.imread(path)


@pytest.mark.parametrize(
    ("layers", "heads", "measures"),
    [(1, 1, DRAWN), (32, 32, DRAWN), (3, 4, ["sharpness"]), (126, 128, ["error"])],
    ids=str,
)
def test_a_picture_has_a_panel_for_each_measure(tmp_path, layers, heads, measures):
    pixels = picture(tmp_path / "map.png", layers, heads, measures)
    height, width, _ = pixels.shape
    across = min(len(measures), 2)
    assert 450 * across <= width <= 1250 * across
    down = -(-len(measures) // across)
    assert 400 * down <= height <= 1300 * down
    colours = np.rint(pixels[..., :3] * 255).astype(np.uint32) @ np.array([1, 256, 65536], np.uint32)
    assert len(np.unique(colours)) > 100  # the colour bar alone has so many; a blank page has one
    edges = np.concatenate([pixels[:2].ravel(), pixels[-2:].ravel(), pixels[:, :2].ravel(), pixels[:, -2:].ravel()])
    assert (edges == 1).all(), "something is cut off"


def test_cells_have_the_colour_of_their_value(tmp_path):
    from matplotlib import colormaps

    pixels = picture(tmp_path / "map.png", 3, 4, ["sharpness"])[..., :3]
    expected = colormaps["viridis"](made(3, 4).sharpness.astype(np.float64))[..., :3]
    expected[2, 1:] = 0.85
    for colour in expected.reshape(-1, 3):
        same = (np.abs(pixels - colour) < 0.005).all(axis=2)
        assert same.sum() > 0.03 * same.size


def test_several_segments_are_one_picture_each_by_its_queries():
    one, other = made(3, 4), made(3, 4, number=2)
    other.queries[:] = 300
    both = ContextStatistics(NAME, (one, other))
    mean = overall(both, "retrieved")
    assert mean[1] == pytest.approx((one.retrieved[1] + 3 * other.retrieved[1]) / 4)
    assert mean[2, 1:] == pytest.approx(other.retrieved[2, 1:])
    assert np.isnan(overall(ContextStatistics(NAME, (one,)), "sharpness")[2, 1:]).all()
    one.error[0, 3] = 0.5
    assert overall(both, "error")[:, :3] == pytest.approx(np.maximum(one.error, other.error)[:, :3])
    assert overall(both, "error")[0, 3] == 0.5, "one segment knows"
    assert np.isnan(overall(both, "error")[1:, 3]).all()


def test_any_name_can_be_drawn(tmp_path):
    picture(tmp_path / "map.png", 2, 2, ["dense"], name="$x^ 契約書 \\frac " + 180 * "n")


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(InvalidArgument, match="cannot be written: No such file"):
        picture(tmp_path / "none" / "map.png", 1, 1)


def test_the_command_draws_what_was_asked_for(command, observed, tmp_path):
    pytest.importorskip("matplotlib")
    four, one = tmp_path / "four.png", tmp_path / "one.png"
    status, said = command(NAME, "--png", str(four))
    assert status == 0
    assert said.endswith(f"\n\nheat map: {four}\n")
    status, said = command(NAME, "--png", str(one), "--measure", "window_hits")
    assert status == 0
    assert said.endswith(f"\n\nheat map: {one}\n")
    assert 0 < one.stat().st_size < four.stat().st_size


def test_a_measure_is_a_map_in_the_terminal_too(command, observed):
    status, said = command(NAME, "--measure", "retrieved")
    assert (status, said) == (0, (GOLDEN / "stats_measure.txt").read_text())
    assert max(map(len, said.splitlines())) <= 100


@pytest.mark.parametrize(("layers", "heads"), [(3, 4), (12, 16), (30, 64), (126, 90)])
@pytest.mark.parametrize("measure", DRAWN)
def test_a_map_has_a_row_for_each_layer_and_a_cell_for_each_head(measure, layers, heads):
    values = overall(ContextStatistics(NAME, (made(layers, heads),)), measure)
    title, *rows = text_map(measure, values).splitlines()
    assert title.startswith(measure.replace("_", " "))
    assert max(map(len, rows)) <= 100
    if heads == 4:
        assert rows[0].split() == ["layer", "0", "1", "2", "3"]
        shown = [row.split() for row in rows[1:]]
        assert [row[0] for row in shown] == ["0", "1", "2"]
        for row, expected in zip(shown, values, strict=True):
            assert row[1:] == ["-" if np.isnan(value) else FORMS[measure].format(value) for value in expected]
    elif heads > 16:
        *rows, key = rows
        assert [len(row) for row in rows] == [len(str(layers - 1)) + 1 + heads] * layers
        shades = np.array([list(row.split()[1]) for row in rows])
        assert ((shades == "-") == np.isnan(values)).all()
        for low, high in zip("·░▒▓", "░▒▓█", strict=True):
            assert max(values[shades == low], default=0) <= min(values[shades == high], default=1)
        assert ("- unknown" in key) == np.isnan(values).any()


def test_audits_stand_below_the_table():
    segment = made(3, 4)
    segment.error[:, :3] = [[0.001, 0.002, 0.003], [0.004, 0.005, 0.006], [0.007, 0.008, 0.012]]
    said = audited(overall(ContextStatistics(NAME, (segment,)), "error"))
    assert said == "audited error at p95: median 0.50%, largest 1.20% of a layer's output, known of 9 of 12 heads"
    segment.error[:] = np.inf
    assert audited(overall(ContextStatistics(NAME, (segment,)), "error")) == "audited error: known of 0 of 12 heads"


def test_a_measure_that_does_not_exist_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["stats", NAME, "--measure", "entropy"])
    assert ended.value.code == 2
    assert "window_hits" in capsys.readouterr().err
