"""The `kvdb` command says what is wrong in one line."""

import pytest

import kvdb
from kvdb.cli import main


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


def test_an_error_is_one_line_and_status_1(tmp_path, capsys):
    assert main(["serve", "--config", str(tmp_path / "none.toml")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
