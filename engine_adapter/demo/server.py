"""A real server process for the demo."""

import subprocess
import sys
from functools import cached_property
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Self

from kvdb.errors import Unavailable


class ServerProcess:
    """`kvdb serve` on a free port of 127.0.0.1, for as long as the `with` lasts. It starts while its caller does other things.

    log: the file to which it writes what it has to say, which stays.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-m", "kvdb", "serve", "--host", "127.0.0.1", "--port", "0"]
        with NamedTemporaryFile(prefix="kvdb-demo-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    @cached_property
    def ready_line(self) -> str:
        """The line that the server prints when it is ready; waits for it. Raises Unavailable for a server that ends before."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            self._process.communicate()
            status = self._process.returncode
            said = self.log.read_text(errors="replace").strip()
            raise Unavailable(f"the server ended with status {status} before it was ready: {said or 'it said nothing'}")
        return line

    @property
    def target(self) -> str:
        """Where it can be reached. Raises what `ready_line` raises."""
        return self.ready_line.split()[-1]

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
