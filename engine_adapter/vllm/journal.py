"""What a worker's transfers did since it was last asked, as vLLM's statistics and its KV events want it."""

from dataclasses import dataclass, field
from threading import Lock

from engine_adapter.vllm.presence import Presence
from engine_adapter.vllm.requests import Transfer

Numbers = dict[str, list[float] | int]


@dataclass(frozen=True)
class Changes:
    """stored: transfers whose tokens are in the database now. missing: loads whose tokens are not there, against expectation."""

    stored: tuple[Transfer, ...] = ()
    missing: tuple[Transfer, ...] = ()


def no_numbers() -> Numbers:
    """The numbers of a time in which nothing was transferred: seconds of each transfer, their bytes, and what requests went
    without because the database was away."""
    return {"load_seconds": [], "save_seconds": [], "load_bytes": 0, "save_bytes": 0, "missed": 0}


@dataclass
class Journal:
    """Threads that load and save write it, and vLLM's worker takes what is in it at the end of a step. presence: whether the
    database is there for them."""

    presence: Presence = field(default_factory=Presence)
    _numbers: Numbers = field(default_factory=no_numbers)
    _stored: list[Transfer] = field(default_factory=list)
    _missing: list[Transfer] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def loaded(self, seconds: float, nbytes: int) -> None:
        """Note one load, or those of a step that go together."""
        self.presence.found()
        self._note("load", seconds, nbytes)

    def saved(self, transfer: Transfer, seconds: float, nbytes: int) -> None:
        """Note a save that the database has stored."""
        self.presence.found()
        self._note("save", seconds, nbytes)
        if transfer.hashes:
            with self._lock:
                self._stored.append(transfer)

    def missed(self, transfer: Transfer) -> None:
        """Note a load whose tokens were not there."""
        if transfer.hashes:
            with self._lock:
                self._missing.append(transfer)

    def take_numbers(self) -> Numbers:
        with self._lock:
            numbers, self._numbers = self._numbers, no_numbers()
        return numbers | {"missed": self.presence.take_missed()}

    def take_changes(self) -> Changes:
        with self._lock:
            changes = Changes(tuple(self._stored), tuple(self._missing))
            self._stored, self._missing = [], []
        return changes

    def _note(self, what: str, seconds: float, nbytes: int) -> None:
        with self._lock:
            observed, total = self._numbers[f"{what}_seconds"], self._numbers[f"{what}_bytes"]
            assert isinstance(observed, list) and isinstance(total, int)
            observed.append(seconds)
            self._numbers[f"{what}_bytes"] = total + nbytes
