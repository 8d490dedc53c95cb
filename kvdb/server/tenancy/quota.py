"""What one tenant may have, and how much of it is spoken for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from time import monotonic, sleep
from typing import NamedTuple

import kvdb.deadlines as deadlines
from kvdb.config.quotas import QuotasConfig
from kvdb.errors import QuotaExceeded
from kvdb.events import Events, Kind

NAP_SECONDS = 0.05
"""How often an import that waits looks whether anybody still waits for it."""
BURST_SECONDS = 1.0
"""So many seconds of its rate an import may have at once."""


OF_WHAT_IS_HELD = ("contexts_max", "bytes_max", "cpu_bytes_max", "disk_bytes_max")
"""The quotas of what `Holdings` has, in its order."""


class Holdings(NamedTuple):
    """What a tenant has. nbytes: of its contexts. cpu_nbytes: of those in main memory, and of its sessions. disk_nbytes: of those
    on disk."""

    contexts: int = 0
    nbytes: int = 0
    cpu_nbytes: int = 0
    disk_nbytes: int = 0

    def plus(self, more: "Holdings", times: int = 1) -> "Holdings":
        """Both together; times -1: without the other, and never less than nothing."""
        return Holdings(*(max(0, had + times * comes) for had, comes in zip(self, more, strict=True)))


class Quota:
    """The limits of one tenant. Thread-safe. What is about to be stored is counted from when it is announced, so that several at
    once cannot pass a limit together."""

    def __init__(self, limits: QuotasConfig, tenant: str, events: Events) -> None:
        """limits: those of all tenants, with what single ones have instead."""
        self._limits = limits.of(tenant)
        self._tenant = tenant
        self._events = events
        self._announced = Holdings()
        self._allowance = self._limits.import_bytes_per_second * BURST_SECONDS
        self._filled = monotonic()
        self._lock = Lock()

    @contextmanager
    def storing(self, comes: Holdings, held: Callable[[], Holdings]) -> Iterator[None]:
        """Store that in the body. Raises QuotaExceeded before it."""
        self.announce(comes, held)
        try:
            yield
        finally:
            self.done(comes)

    def announce(self, comes: Holdings, held: Callable[[], Holdings]) -> None:
        """So much is going to be stored; `done` it. held: what the tenant has. Raises QuotaExceeded."""
        limits = self._limits
        if not any(getattr(limits, name) for name in OF_WHAT_IS_HELD):
            return
        with self._lock:
            used = held().plus(self._announced)
            for name, had, more in zip(OF_WHAT_IS_HELD, used, comes, strict=True):
                if more:
                    self._check(name, had, more)
            self._announced = self._announced.plus(comes)

    def done(self, comes: Holdings) -> None:
        """What was announced is stored, or never will be."""
        with self._lock:
            self._announced = self._announced.plus(comes, -1)

    def check_sessions(self, opened: int) -> None:
        """Raises QuotaExceeded where a tenant with so many sessions opens another."""
        self._check("sessions_max", opened, 1)

    def pace(self, nbytes: int) -> None:
        """Wait until so many bytes of an import may come. Raises DeadlineExceeded or Cancelled."""
        rate = self._limits.import_bytes_per_second
        if not rate:
            return
        with self._lock:
            now = monotonic()
            self._allowance = min(rate * BURST_SECONDS, self._allowance + rate * (now - self._filled)) - nbytes
            self._filled = now
            owed = -self._allowance / rate
        end = now + owed
        while (left := end - monotonic()) > 0:
            deadlines.check()
            sleep(min(left, NAP_SECONDS))

    def _check(self, quota: str, used: int, more: int) -> None:
        most: int = getattr(self._limits, quota)
        if most and used + more > most:
            self._events.tell(Kind.QUOTA, quota=quota, used=used, asked=more, most=most)
            raise QuotaExceeded(
                f"tenant {self._tenant} has {used:,} of quotas.{quota}={most:,} and asks for {more:,} more; drop contexts or "
                "close sessions, or have whoever runs the server raise it"
            )
