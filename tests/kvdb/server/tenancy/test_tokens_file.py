"""Tokens at rest: only hashes are kept, a revoked token is refused at once, and a wrong file lets nobody in."""

import hashlib
import json
import os

import pytest

from kvdb.__main__ import main
from kvdb.config import ServerConfig
from kvdb.errors import ConfigError, Unauthenticated
from kvdb.server.tenancy.credentials import OPERATOR, Credentials
from kvdb.server.tenancy.tokens_file import Principal, TokensFile, new_token


def change(path, text):
    """Write a file whose time differs from before, however coarse the clock of the file system is."""
    before = path.stat().st_mtime_ns
    path.write_text(text)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def test_the_command_prints_a_token_once_and_keeps_its_hash(tmp_path, capsys):
    path = tmp_path / "tokens.json"
    assert main(["token", "new", "--tenant", "acme", "--file", str(path)]) == 0
    token = capsys.readouterr().out.strip()
    assert token not in path.read_text()
    assert hashlib.sha256(token.encode()).hexdigest() in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    assert TokensFile(str(path)).find(token.encode()) == Principal("acme")


def test_tokens_are_found_and_others_are_not(tmp_path):
    path = tmp_path / "tokens.json"
    tokens = [new_token(path, tenant, admin=tenant == "ops") for tenant in ("acme", "acme", "globex", "ops")]
    file = TokensFile(str(path))
    assert [file.find(token.encode()) for token in tokens] == [
        Principal("acme"),
        Principal("acme"),
        Principal("globex"),
        Principal("ops", admin=True),
    ]
    assert file.find(b"") is file.find(tokens[0][:-1].encode()) is file.find(b"\xff" * 40) is None


def test_a_revoked_token_is_refused_without_a_restart(tmp_path):
    path = tmp_path / "tokens.json"
    kept, revoked = new_token(path, "acme"), new_token(path, "globex")
    file = TokensFile(str(path))
    assert file.find(revoked.encode()) == Principal("globex")
    value = json.loads(path.read_text())
    change(path, json.dumps({"tokens": value["tokens"][:1]}))
    assert file.find(revoked.encode()) is None
    assert file.find(kept.encode()) == Principal("acme")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"tokens": {}}', '{"tokens": [{"tenant": "a/b", "sha256": "%s"}]}' % ("0" * 64)]
)
def test_a_file_that_became_wrong_lets_nobody_in(tmp_path, text):
    path = tmp_path / "tokens.json"
    token = new_token(path, "acme").encode()
    credentials = Credentials(ServerConfig(tokens_file=str(path), token="operator"))
    assert credentials.of_token(token) == Principal("acme")
    change(path, text)
    for _ in range(2):
        with pytest.raises(Unauthenticated):
            credentials.of_token(token)
    assert credentials.of_token(b"operator") == OPERATOR
    with pytest.raises(ConfigError):
        Credentials(ServerConfig(tokens_file=str(path)))


@pytest.mark.parametrize("tenant", ["", "a/b", "-a", "a b", "a" * 65, "\u00e9"])
def test_a_tenant_has_a_name_that_is_no_path(tmp_path, tenant):
    with pytest.raises(ConfigError, match="expected letters"):
        new_token(tmp_path / "tokens.json", tenant)
    assert not list(tmp_path.iterdir())


def test_two_who_write_at_once_do_not_lose_a_token(tmp_path):
    path = tmp_path / "tokens.json"
    (tmp_path / "tokens.json.new").touch()
    with pytest.raises(ConfigError, match="another process"):
        new_token(path, "acme")
    assert not path.exists()
