"""The engine's door: so many calls are under way at a time, and the others wait in a fair queue."""

from collections.abc import Callable
from threading import Event, Lock
from time import monotonic, perf_counter

import kvdb.deadlines as deadlines
from kvdb.errors import CapacityError, KvdbError, QuotaExceeded
from kvdb.events import Events, Kind
from kvdb.server.admission.fair_queue import FairQueue, Work

LOOK_SECONDS = 0.05
"""How often a thread that waits looks whether anybody waits for it."""


class Admission:
    """The calls that use the engine, and those that wait for it. Thread-safe.

    requests_max: how many are under way at a time. tenant_max: says how many of a tenant may be under way or wait, 0 for
    no limit. queue_max: how many more may wait. waited: told of each call that waits how many seconds it did. events: told of
    those that `tenant_max` refuses.
    """

    def __init__(
        self,
        requests_max: int,
        queue_max: int,
        waited: Callable[[float], None] = lambda _seconds: None,
        tenant_max: Callable[[str], int] = lambda _tenant: 0,
        events: Events | None = None,
    ) -> None:
        self._tenant_max = tenant_max
        self._events = events or Events()
        self._free = self._requests_max = requests_max
        self._queue: FairQueue[Callable[[], object]] = FairQueue(queue_max)
        self.waited = waited
        self._closed = False
        self._lock = Lock()

    @property
    def under_way(self) -> int:
        """How many calls use the engine."""
        return max(0, self._requests_max - self._free)

    @property
    def room(self) -> int:
        """How many calls may use the engine at a time."""
        return self._requests_max

    @property
    def waiting(self) -> int:
        """How many calls wait for it."""
        return len(self._queue)

    def begin(self, work: Work, go_on: Callable[[], object]) -> bool:
        """Whether the call may begin now. Otherwise it waits, and `go_on` is called when its turn comes, in the thread that ended
        another, which it must not keep. Either way `end` it. Raises CapacityError where too many wait; then there is nothing to
        end.
        """
        with self._lock:
            if self._over(work):
                most = self._tenant_max(work.tenant)
                self._events.tell(Kind.QUOTA, quota="requests_max", used=most, asked=1, most=most)
                raise QuotaExceeded(
                    f"tenant {work.tenant} has {most} calls under way or waiting, as many as quotas.requests_max "
                    "lets; wait for answers before more is asked"
                )
            if self._begins(work):
                return True
            try:
                self._queue.push(work, go_on)
            except CapacityError:
                if not self._let_late_go():
                    raise
                self._queue.push(work, go_on)
            return False

    def take(self, work: Work) -> bool:
        """Whether the call may begin now, without waiting; then `end` it."""
        with self._lock:
            return self._begins(work)

    def wait(self, work: Work) -> None:
        """Wait in this thread until the call may begin. `end` it. Raises CapacityError, and DeadlineExceeded or Cancelled where
        the call is waited for no longer; then there is nothing to end."""
        if self.take(work):  # nearly always
            return
        come = Event()
        go_on, came = come.set, perf_counter()
        if self.begin(work, go_on):
            return
        while not come.wait(LOOK_SECONDS):
            try:
                deadlines.check()
            except KvdbError:
                with self._lock:
                    if self._queue.remove(work, go_on):
                        raise
                break  # it was let go on meanwhile, and finds the same again
        self.waited(perf_counter() - came)

    def admitted(self, work: Work) -> "Admitted":
        """For `with`: `wait` for the work before the body, `end` it after."""
        return Admitted(self, work)

    def end(self, work: Work) -> None:
        """The call is over; the next begins."""
        with self._lock:
            self._queue.done(work)
            self._free += 1
            self._go_on()

    def close(self) -> None:
        """Let everybody go on at once, those that wait and those that still come. For a server whose calls were all cancelled."""
        with self._lock:
            self._closed = True
            self._free += len(self._queue)
            self._go_on()

    def _over(self, work: Work) -> bool:
        most = self._tenant_max(work.tenant) if work.tenant and not self._closed else 0
        return bool(most) and self._queue.of_tenant(work.tenant) >= most

    def _begins(self, work: Work) -> bool:
        if self._over(work):
            return False
        if not self._closed and (self._free <= 0 or self._queue.length):
            return False
        self._queue.start(work)
        self._free -= 1
        return True

    def _let_late_go(self) -> bool:
        """Let those go on that are waited for no longer, which find that out first. Whether there were any."""
        late = self._queue.expired(monotonic())
        self._free -= len(late)
        for go_on in late:
            go_on()
        return bool(late)

    def _go_on(self) -> None:
        while self._free > 0 and (go_on := self._queue.pop(monotonic())) is not None:
            self._free -= 1
            go_on()


class Admitted:
    """Work that has been admitted while the body of a `with` runs. A context manager by hand, because each step of decoding needs
    one."""

    __slots__ = ("_admission", "_work")

    def __init__(self, admission: Admission, work: Work) -> None:
        self._admission = admission
        self._work = work

    def __enter__(self) -> None:
        self._admission.wait(self._work)

    def __exit__(self, *_: object) -> None:
        self._admission.end(self._work)
