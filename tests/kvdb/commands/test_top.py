"""`kvdb top`: a frame says what the server's metrics say."""

import re
import subprocess
import sys

import pytest

import kvdb
import kvdb.commands.metrics_text as metrics_text
from kvdb.__main__ import main
from kvdb.commands.metrics_text import Samples, read
from kvdb.commands.top import over
from kvdb.commands.top_frame import ASCII, BLOCKS, frame, mean_step, quantile, sparkline
from kvdb.config import Config, MetricsConfig, ServerConfig, StorageConfig
from kvdb.database import Database
from kvdb.errors import InvalidArgument, Unauthenticated, Unavailable
from kvdb.server.http.opening import open_http
from kvdb.server.metrics.opening import metrics_route
from kvdb.server.serve import Server


@pytest.fixture
def watched(spec, make_kv):
    """The address of the metrics port of a server that has answered one attend of each layer."""
    config = Config(
        storage=StorageConfig(cpu_bytes_max=1 << 24), server=ServerConfig(port=0, token="s3cret"), metrics=MetricsConfig(port=0)
    )
    kv = make_kv(spec, 20)
    with Database(config) as database:
        server = Server(database, config.server)
        server.start()
        http = open_http(config, lambda: True, [metrics_route(server.registry)], server.credentials)
        http.start()
        with kvdb.connect(server.target, token="s3cret") as db:
            db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
            session = db.create_session(spec, [])
            for layer in range(spec.layers):
                session.attend(layer, kv.q[layer], *kv.pairs()[layer])
            yield http.url
            session.close()
        http.stop()
        server.stop(grace=0)


def test_a_frame_shows_sessions_tiers_plans_and_latency(watched, capsys, monkeypatch):
    monkeypatch.setenv("KVDB_TOKEN", "s3cret")
    assert main(["top", "--url", watched, "--once"]) == 0
    text = capsys.readouterr().out
    assert f"kvdb {kvdb.__version__}, up" in text
    assert "1 session, 1 context\n" in text
    assert "% of 16 MiB" in text
    assert "100.0% of their tokens retrieved" in text
    assert "attend " in text
    assert "context_stored 1" in text
    assert "decode step p50" in text


def test_a_terminal_of_ascii_gets_ascii(watched):
    command = [sys.executable, "-m", "kvdb.__main__", "top", "--url", watched, "--once", "--token", "s3cret"]
    env = {"PYTHONIOENCODING": "ascii", "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, capture_output=True, env=env, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


def test_a_wrong_token_and_a_wrong_address_are_said(watched):
    with pytest.raises(Unauthenticated, match="--token"):
        read(watched, "wrong")
    with pytest.raises(InvalidArgument, match="expected one like"):
        read("kvdb://127.0.0.1:7700", "")


SAMPLES = """\
# HELP kvdb_decode_seconds x
kvdb_decode_seconds_bucket{call="attend",le="0.001"} 50.0
kvdb_decode_seconds_bucket{call="attend",le="0.01"} 99.0
kvdb_decode_seconds_bucket{call="attend",le="+Inf"} 100.0
kvdb_decode_seconds_count{call="attend"} 100.0
kvdb_decode_seconds_sum{call="attend"} 0.5
"""


def test_quantiles_and_means_are_of_what_came_between():
    none, now = Samples({}), Samples.parse(SAMPLES)
    assert [quantile(none, now, share) for share in (0.5, 0.99)] == [0.001, 0.01]
    assert mean_step(none, now) == 0.005
    assert quantile(now, now, 0.5) == mean_step(now, now) == 0
    assert "none since the last look" in frame(now, now, 1.0, [], BLOCKS)


def test_what_is_no_metric_is_refused():
    with pytest.raises(InvalidArgument, match="is no metric"):
        Samples.parse("<!doctype html>")


@pytest.mark.parametrize("marks", [BLOCKS, ASCII])
def test_a_sparkline_goes_from_nothing_to_the_largest(marks):
    assert sparkline([0, 1, 8], marks) == marks[0] + marks[1] + marks[-1]
    assert sparkline([0, 0], marks) == 2 * marks[0]


def test_a_server_that_is_away_and_begins_anew_is_looked_at_further(monkeypatch, capsys):
    def sample(started, attends):
        return Samples.parse(f'kvdb_start_time_seconds {started}\nkvdb_attends_total{{rule="exact"}} {attends}\n')

    looks = iter((sample(100, 70), Unavailable("it is away"), sample(200, 2), KeyboardInterrupt()))

    def read(*_):
        found = next(looks)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(metrics_text, "read", read)
    assert main(["top", "--interval", "0.05"]) == 130
    first, away, shown_again, anew = re.split(r"^(?=kvdb \?, up|http:)", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    assert "does not answer; this was before" in away
    assert shown_again == first
    assert "-" not in re.search("plans: (.*)", anew).group(1)


def test_a_frame_is_written_over_the_last_one_and_cut_to_the_terminal():
    screen = over("0123456789\nab\nlast", 4, 3)
    assert screen == "\x1b[H0123\x1b[K\nab\x1b[K\x1b[J"
