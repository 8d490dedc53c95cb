"""`kvdb completion` prints a script that the shell takes, with all commands and flags."""

import shutil
import subprocess

import pytest

from kvdb.__main__ import main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_setting_is_completed(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("serve", "backup", "completion", "storage.cpu-bytes-max", "metrics-port"):
        assert word in script
    if executable := shutil.which(shell):
        subprocess.run([executable, "-n"], input=script, text=True, check=True, timeout=30)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_a_command_and_a_flag(capsys):
    main(["completion", "bash"])
    script = capsys.readouterr().out
    for words, expected in ((["kvdb", "back"], "backup"), (["kvdb", "serve", "--storage.cpu"], "--storage.cpu-bytes-max")):
        ask = (
            f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_kvdb kvdb {words[-1]} {words[-2]}; "
            'echo "${COMPREPLY[@]}"'
        )
        done = subprocess.run(["bash"], input=f"{script}\n{ask}\n", capture_output=True, text=True, timeout=30, check=False)
        assert done.stdout.split() == [expected], done.stderr
