"""`kvdb ping` names the way that calls take, and why it is no other."""

import json

import pytest

from kvdb.__main__ import main
from kvdb.config import ServerConfig
from kvdb.server.serve import Server


@pytest.fixture
def serve(engine):
    servers = []

    def start(**settings):
        servers.append(Server(engine, ServerConfig(port=0, **settings)))
        servers[-1].start()
        return servers[-1].target

    yield start
    for server in servers:
        server.stop(grace=0)


def test_it_names_the_ways_the_fastest_first(serve, capsys):
    assert main(["ping", "--server", serve(), "--count", "20", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["transport"], said["refusal"], [*said["ways"]]) == ("shared memory", "", ["shared memory", "gRPC"])
    assert 0 < said["ways"]["shared memory"]["p50_seconds"] <= said["ways"]["shared memory"]["p99_seconds"]


def test_without_shared_memory_it_says_why(serve, capsys):
    assert main(["ping", "--server", serve(local_socket="", token="geheim"), "--token", "geheim", "--count", "20"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("answers through gRPC; not through shared memory: the server offers none")
    assert second.split()[0] == "gRPC"


@pytest.mark.parametrize(("arguments", "status"), [(["--server", "."], 2), (["--server", "kvdb://127.0.0.1:1"], 4)])
def test_what_is_no_server_is_an_error(arguments, status, capsys):
    assert main(["ping", *arguments]) == status
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("count", ["1", "many", "-5"])
def test_a_wrong_count_is_an_error_of_usage(count, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["ping", "--count", count])


@pytest.mark.parametrize(("transport", "way"), [("shared", "shared memory"), ("grpc", "gRPC")])
def test_one_way_alone_is_measured(serve, capsys, transport, way):
    assert main(["ping", "--server", serve(), "--count", "5", "--transport", transport, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["transport"], said["refusal"], [*said["ways"]]) == (way, "", [way])


def test_a_way_that_is_not_there_is_unavailable(serve, capsys):
    assert main(["ping", "--server", serve(local_socket=""), "--transport", "shared"]) == 4
    assert "the server offers none" in capsys.readouterr().err
