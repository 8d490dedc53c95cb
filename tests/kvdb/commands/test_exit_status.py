"""Every error has one exit status, which help lists."""

import re
from pathlib import Path

import pytest

import kvdb
from kvdb import errors
from kvdb.__main__ import main
from kvdb.commands import exit_status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InternalError, 1),
        (errors.Unsupported, 1),
        (errors.AlreadyExists, 1),
        (errors.MessageTooLarge, 1),
        (errors.ShapeError, 2),
        (errors.ConfigError, 2),
        (errors.NotFound, 3),
        (errors.DeadlineExceeded, 4),
        (errors.Unavailable, 4),
        (errors.Unauthenticated, 5),
        (errors.CapacityError, 6),
        (errors.IntegrityError, 7),
    ],
)
def test_an_error_has_the_status_of_its_kind(error, status):
    assert exit_status.status_of(error("it is so")) == status


def test_help_lists_every_status(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    meant = {status for status, _ in exit_status.MEANINGS}
    assert {status for _, status in exit_status.BY_ERROR} <= meant
    for status, meaning in exit_status.MEANINGS:
        assert f"{status:>3}  {meaning}\n" in said


def test_a_server_that_is_not_there_is_status_4(capsys, monkeypatch):
    monkeypatch.setattr(kvdb.commands.ls, "open_server", refused)
    assert main(["ls"]) == 4
    assert capsys.readouterr().err == "kvdb: nobody answers\n"


def refused(given):
    raise errors.Unavailable("nobody answers")


def test_the_document_lists_every_status():
    text = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    listed = re.findall(r"^\| (\d+) \| (.+) \|$", text, re.MULTILINE)
    assert [(int(status), meaning) for status, meaning in listed] == list(exit_status.MEANINGS)
