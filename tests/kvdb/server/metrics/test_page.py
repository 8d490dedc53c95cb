"""/metrics of a server process, as Prometheus reads it."""

import re
import signal
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

import kvdb


def test_a_process_offers_its_metrics(process):
    with process("--metrics-port", "0") as (running, _):
        url = re.search(r"http\S+/metrics", running.stdout.readline())[0]
        with urlopen(url, timeout=10) as answer:
            families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
        assert families["kvdb_build_info"].samples[0].labels == {"version": kvdb.__version__}
        assert families["kvdb_contexts"].samples[0].value == 0
        assert "process_resident_memory_bytes" in families
        with urlopen(Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"}), timeout=10) as answer:
            assert answer.read().decode().endswith("# EOF\n")
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=10) == 0
