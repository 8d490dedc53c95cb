"""Prometheus itself, where it is installed (Debian: prometheus), takes the rules, the configuration and every query of ours."""

import json
import re
import shutil
import socket
import subprocess
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

import kvdb
from kvdb.config import Config, MetricsConfig, ServerConfig
from kvdb.server.http.opening import open_http
from kvdb.server.metrics.opening import metrics_route
from kvdb.server.tenancy.credentials import Credentials
from tests.kvdb.server.metrics.test_deployed import DEPLOY, expressions
from tests.waiting import until

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
pytestmark = pytest.mark.skipif(not (PROMETHEUS and PROMTOOL), reason="Prometheus is not installed")
SECONDS_MAX = 20
EMPTY_MAX = 0.5
"""The largest share of the dashboard's queries that may show nothing of a server that has just begun."""
CONFIG = """
global: {{scrape_interval: 250ms, evaluation_interval: 250ms}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: kvdb
    static_configs: [{{targets: ["{target}"]}}]
"""


def checked(*arguments):
    done = subprocess.run([PROMTOOL, "check", *arguments], check=False, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_and_the_configuration_are_taken():
    assert "rules found" in checked("rules", str(DEPLOY / "prometheus/alerts.yml"))
    checked("config", "--syntax-only", str(DEPLOY / "prometheus/prometheus.yml"))


@pytest.fixture
def prometheus(tmp_path, serve, spec, make_kv):
    """Asks a Prometheus that scrapes a server which answers something."""
    server, kv = serve(), make_kv(spec, 8)
    routes = [metrics_route(server.registry)]
    page = open_http(Config(metrics=MetricsConfig(port=0)), lambda: True, routes, Credentials(ServerConfig()))
    page.start()
    target = re.search(r"//([^/]+)", page.url)[1]
    (tmp_path / "prometheus.yml").write_text(CONFIG.format(rules=DEPLOY / "prometheus/alerts.yml", target=target))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address={address}",
    ]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen([PROMETHEUS, *flags], stdout=log, stderr=subprocess.STDOUT) as running,
        kvdb.connect(server.target) as db,
    ):

        def ask(path, **query):
            with urlopen(f"http://{address}/api/v1/{path}?{urlencode(query)}", timeout=SECONDS_MAX) as answer:
                return json.loads(answer.read())["data"]

        def scraped():
            db.import_context(spec, kv.tokens, kv.pairs(), name="doc")
            with db.create_session(spec, kv.tokens) as session:
                session.attend(0, kv.q[0], *kv.pairs()[0])
            db.drop("doc")
            try:
                found = ask("query", query='count_over_time(up{job="kvdb"}[1m])')["result"]
            except OSError:
                return False
            return bool(found) and float(found[0]["value"][1]) >= 3

        try:
            until(scraped)
            yield ask
        finally:
            running.terminate()
            page.stop()


def test_every_query_and_rule_is_answered(prometheus):
    assert prometheus("query", query='up{job="kvdb"}')["result"][0]["value"][1] == "1"
    rules = [rule for group in prometheus("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(expressions("prometheus/alerts.yml"))
    until(lambda: all(rule["health"] == "ok" for group in prometheus("rules")["groups"] for rule in group["rules"]))
    queries = [query.replace("$__rate_interval", "1m").replace("$instance", ".*") for query in expressions("grafana/kvdb.json")]
    empty = [query for query in queries if not prometheus("query", query=query)["result"]]
    assert len(empty) <= EMPTY_MAX * len(queries), empty
