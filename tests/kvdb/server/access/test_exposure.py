"""Ports that other machines reach are opened for those alone who say who they are."""

import subprocess
import sys

import pytest

from kvdb.config import Config, MetricsConfig, ServerConfig
from kvdb.errors import ConfigError
from kvdb.server.access.exposure import check_exposure, is_exposed

TLS = {"tls_cert": "cert", "tls_key": "key"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost", "::1", "unix:/tmp/kvdb.sock"])
def test_an_address_of_this_machine_alone_is_not_exposed(host):
    assert not is_exposed(host)
    assert check_exposure(Config(server=ServerConfig(host=host))) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_any_other_address_asks_who_comes_or_is_refused(host):
    assert is_exposed(host)
    with pytest.raises(ConfigError, match=r"server\.token.*KVDB_TOKEN.*server\.tls_client_ca"):
        check_exposure(Config(server=ServerConfig(host=host)))
    with pytest.raises(ConfigError, match="asks nobody"):
        check_exposure(Config(server=ServerConfig(host=host, **TLS)))
    assert "can be read on the way" in check_exposure(Config(server=ServerConfig(host=host, token="geheim")))
    assert check_exposure(Config(server=ServerConfig(host=host, token="geheim", **TLS))) == ""
    assert check_exposure(Config(server=ServerConfig(host=host, tls_client_ca="ca", **TLS))) == ""


def test_the_metrics_port_asks_for_the_token_whatever_the_other_asks():
    exposed = MetricsConfig(host="0.0.0.0", port=0)
    for server in (ServerConfig(), ServerConfig(tls_client_ca="ca", **TLS)):
        with pytest.raises(ConfigError, match=r"metrics\.host is 0\.0\.0\.0"):
            check_exposure(Config(server=server, metrics=exposed))
    assert check_exposure(Config(server=ServerConfig(token="geheim"), metrics=exposed)) == ""
    assert check_exposure(Config(metrics=MetricsConfig(host="0.0.0.0"))) == "", "without a port there is none to reach"


def test_a_name_that_nobody_knows_is_an_error():
    with pytest.raises(ConfigError, match="no-such-host"):
        is_exposed("no-such-host.invalid")


def test_a_process_that_others_would_reach_without_a_token_does_not_start():
    command = [sys.executable, "-m", "kvdb", "serve", "--host", "0.0.0.0", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "asks nobody who they are" in done.stderr
    assert done.stderr.count("\n") == 1
