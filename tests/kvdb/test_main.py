"""The `kvdb` command says what is wrong in one line."""

import argparse
import os
import re
import socket
import subprocess
import sys

import pytest

import kvdb
import kvdb.commands
from kvdb.__main__ import main


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"kvdb {kvdb.__version__}"


def test_without_a_command_it_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "offer a database over gRPC" in capsys.readouterr().out


def test_a_wrong_setting_is_one_line_and_status_2(tmp_path, capsys):
    assert main(["serve", "--config", str(tmp_path / "none.toml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_error_that_cannot_be_stops_a_server_before_it_starts(capsys):
    assert main(["serve", "--error-max", "2"]) == 2
    assert "optimizer.error_max is 2.0; expected a relative error from 0" in capsys.readouterr().err


def test_it_is_a_module_too():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"kvdb {kvdb.__version__}\n")
    assert "usage: kvdb " in run("--help").stdout


def test_every_command_is_added_by_a_module_and_named_by_help(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    for module in kvdb.commands.COMMANDS:
        commands = argparse.ArgumentParser().add_subparsers()
        module.add(commands)
        assert commands.choices
        for name in commands.choices:
            assert re.search(rf"^    {name}\b", said, re.MULTILINE)


@pytest.mark.parametrize("arguments", [["doctor"], ["--help"]], ids=" ".join)
def test_a_reader_that_went_away_is_one_line(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    done = run(*arguments, stdout=writer, stderr=subprocess.PIPE, capture_output=False, PYTHONUNBUFFERED="")
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "kvdb: the reader of the output went away before its end\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        done = run("doctor", stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert (done.returncode, done.stderr) == (1, "kvdb: [Errno 28] No space left on device\n")


def test_output_in_ascii_escapes_what_it_lacks(tmp_path):
    (tmp_path / "größe").write_text("no folder")
    config = tmp_path / "kvdb.toml"
    config.write_text(f'[storage]\ndisk_path = "{tmp_path}/größe/x"\n', "utf-8")
    done = run("doctor", "--config", str(config), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "gr\\xf6\\xdfe" in done.stdout


def test_a_taken_port_is_one_line_and_status_2():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--port", str(port))
    assert done.returncode == 2
    assert done.stdout == ""
    place = f"127.0.0.1:{port}"
    assert done.stderr == (
        f"kvdb: the server cannot listen on {place} (Address already in use); choose another, or port 0 for a free one\n"
    )


def test_a_configuration_that_is_not_utf8_is_one_line_and_status_2(tmp_path, capsys):
    path = tmp_path / "kvdb.toml"
    path.write_bytes(b"\xff\xfe")
    assert main(["doctor", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert "is not UTF-8" in said
    assert said.count("\n") == 1


def test_a_name_that_is_not_utf8_is_a_usage_error():
    done = run("stats", b"gr\xf6sse", PYTHONUTF8="1")
    assert done.returncode == 2
    assert done.stderr.endswith("argument NAME: 'gr\\udcf6sse' is not UTF-8\n")


def run(*arguments, stdout=None, stderr=None, capture_output=True, **environment):
    """`python -m kvdb` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "kvdb", *arguments],
        stdout=stdout,
        stderr=stderr,
        capture_output=capture_output,
        env=os.environ | environment,
        text=True,
        timeout=60,
        check=False,
    )
