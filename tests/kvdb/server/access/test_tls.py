"""TLS on every port of a server, and certificates of clients."""

import socket
import ssl
import subprocess
import sys
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
import trustme

import kvdb
from kvdb import errors
from kvdb.config import Config, MetricsConfig, ServerConfig, Tls
from kvdb.server.access.tls import ssl_context
from kvdb.server.http.opening import open_http
from kvdb.server.tenancy.credentials import Credentials


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The paths of a CA, a server's certificate for 127.0.0.1 and a client's, each with its key, and another CA's."""
    folder = tmp_path_factory.mktemp("certificates")
    ca, other = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca")
    other.cert_pem.write_to_path(folder / "other_ca")
    pairs = {"server": ca.issue_cert("127.0.0.1"), "client": ca.issue_cert("client"), "stranger": other.issue_cert("client")}
    for name, pair in pairs.items():
        pair.private_key_pem.write_to_path(folder / f"{name}_key")
        for blob in pair.cert_chain_pems:
            blob.write_to_path(folder / name, append=True)
    return {path.name: str(path) for path in folder.iterdir()}


@pytest.fixture
def served(serve, files):
    return lambda **more: serve(tls_cert=files["server"], tls_key=files["server_key"], **more).target


def test_contexts_travel_over_tls(served, files, spec, make_kv):
    kv, target = make_kv(spec, 40), served(token="geheim")
    assert target.startswith("kvdbs://127.0.0.1:")
    with kvdb.connect(target, token="geheim", tls=Tls(ca=files["ca"])) as db:
        assert db.import_context(spec, kv.tokens, kv.pairs(), name="doc").tokens == 40
    with pytest.raises(errors.Unauthenticated):
        kvdb.connect(target, token="falsch", tls=Tls(ca=files["ca"]))


def test_a_server_of_another_ca_and_a_client_without_tls_are_refused(served, files):
    target = served()
    with pytest.raises(errors.Unavailable):
        kvdb.connect(target, tls=Tls(ca=files["other_ca"]), timeout=3.0)
    with pytest.raises(errors.Unavailable):
        kvdb.connect(target.replace("kvdbs", "kvdb"), timeout=3.0)


def test_who_takes_the_wrong_scheme_or_trusts_nobody_is_told_what_to_do(serve, served, files):
    plain, safe = serve().target, served()
    told = {
        safe: r"signed by nobody .* connect to kvdbs://127.* with tls=kvdb.Tls\(ca=...\)",
        safe.replace("kvdbs", "kvdb"): r"if it speaks TLS, connect to kvdbs://127.* with tls=kvdb.Tls\(ca=...\)",
        plain.replace("kvdb", "kvdbs"): r"it speaks no TLS: connect to kvdb://127.* kvdbs://127.* with tls=kvdb.Tls\(ca=...\)",
    }
    for target, said in told.items():
        with pytest.raises(errors.Unavailable, match=said):
            kvdb.connect(target)


def test_a_failed_handshake_is_one_line_for_the_client_and_none_for_the_server(process, files, monkeypatch):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    monkeypatch.delenv("KVDB_TLS_CA", raising=False)
    with process("--server.tls-cert", files["server"], "--server.tls-key", files["server_key"]) as (server, line):
        command = [sys.executable, "-m", "kvdb", "ls", "--server", line.rpartition(" ")[2]]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        assert said.startswith("kvdb: the server at kvdbs://")
        assert said.count("\n") == 1
        with pytest.raises(errors.Unavailable):
            kvdb.connect(line.rpartition(" ")[2].replace("kvdbs", "kvdb"))
        server.terminate()
        assert "ssl_transport_security" not in server.communicate()[1]


def test_clients_without_a_certificate_of_the_ca_come_no_further_than_the_handshake(served, files):
    target = served(tls_client_ca=files["ca"], local_socket="auto")
    with kvdb.connect(target, tls=Tls(files["ca"], files["client"], files["client_key"])) as db:
        assert db.contexts() == []
        assert not db._transport._connection.lanes._server.path, "nobody is asked for a certificate there"
    for tls in (Tls(files["ca"]), Tls(files["ca"], files["stranger"], files["stranger_key"])):
        with pytest.raises(errors.Unavailable):
            kvdb.connect(target, tls=tls, timeout=3.0)


def test_the_http_port_speaks_tls_too_and_nobody_is_kept_waiting_by_a_silent_client(files):
    server = ServerConfig(tls_cert=files["server"], tls_key=files["server_key"])
    config = Config(server=server, metrics=MetricsConfig(port=0))
    port = open_http(config, lambda: True, [], Credentials(server), ssl_context(server))
    port.start()
    try:
        address, trusted = urlsplit(port.url), ssl.create_default_context(cafile=files["ca"])
        with (
            socket.create_connection((address.hostname, address.port)),
            urlopen(f"{port.url}/healthz", context=trusted, timeout=3) as answer,
        ):
            assert answer.status == 200
    finally:
        port.stop()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls_cert": "server"}, "go together"),
        ({"tls_client_ca": "ca"}, "needs both"),
        ({"tls_cert": "server", "tls_key": "client_key"}, "no certificate and its key"),
        ({"tls_cert": "server", "tls_key": "absent"}, "No such file"),
        ({"tls_cert": "server", "tls_key": "server_key", "tls_client_ca": "client_key"}, "tls_client_ca"),
    ],
)
def test_files_that_fit_nothing_are_errors(serve, files, settings, said):
    with pytest.raises(errors.ConfigError, match=said):
        serve(**{setting: files.get(name, f"/{name}") for setting, name in settings.items()})


def test_a_clients_certificate_needs_its_key_and_files_that_are_there(files):
    with pytest.raises(errors.ConfigError, match="go together"):
        Tls(cert=files["client"])
    with pytest.raises(errors.ConfigError, match="/absent"):
        kvdb.connect("kvdbs://127.0.0.1:1", tls=Tls(ca="/absent"))
    with pytest.raises(errors.InvalidArgument, match="no tls="):
        kvdb.connect(tls=Tls())


def test_commands_find_certificates_in_the_environment(served, files, monkeypatch):
    from kvdb.__main__ import main

    monkeypatch.setenv("KVDB_TLS_CA", files["ca"])
    assert main(["ls", "--server", served()]) == 0
