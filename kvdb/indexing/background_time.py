"""The time that proofs and builds may take beside the steps of sessions."""

from collections.abc import Callable, Hashable
from math import inf
from threading import Lock
from time import monotonic
from weakref import WeakKeyDictionary

SHARE = 0.02
"""What audits, and builds that nobody waits for, may take of the time of steps."""
BURST_STEPS = 16
"""Time is saved up for at most so many steps, so that over any 32 steps no more than 3 % is taken."""
QUIET_LOOKS = 2.0
"""Sessions step no longer once nobody has looked for so many times as long as between the last two looks."""
QUIET_SECONDS_MIN, QUIET_SECONDS_MAX = 0.05, 10.0
LOOKS_SECONDS_MAX = QUIET_SECONDS_MAX / QUIET_LOOKS
"""A session that steps looks at least this often, so that it is known to go on."""
FIRST_STEPS = 8
"""A session looks after so many steps at the latest, before it is known how long a step takes."""
BUSY_SECONDS = 1.0
"""For so long after many tokens of a prompt, more are expected."""
SEATS = 4
"""So many layers gather queries at once to have their ways proven; the others wait until one of these has nothing to prove."""


class BackgroundTime:
    """One account for a whole database, of seconds: steps earn, audits and builds spend. Thread-safe.

    While no session steps, nobody is disturbed: builds need not wait, and nothing is counted.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._balance = self._most = 0.0
        self._counted_until = self._steps_until = self._claimed_until = -1.0
        self._stepping: WeakKeyDictionary[Hashable, float] = WeakKeyDictionary()
        self._seats: WeakKeyDictionary[Hashable, float] = WeakKeyDictionary()

    def stepped(self, who: Hashable, step_seconds: float, looks_in: float) -> None:
        """A session takes steps of so many seconds, and looks again in so many, as one of its layers says."""
        now = self._clock()
        with self._lock:
            self._earn(now)
            self._most = SHARE * BURST_STEPS * step_seconds
            until = now + min(max(QUIET_LOOKS * looks_in, QUIET_SECONDS_MIN), QUIET_SECONDS_MAX)
            self._stepping[who] = until
            self._steps_until = max(self._steps_until, until)

    def busy(self, who: Hashable) -> None:
        """A session computes many tokens at once, as one of its layers says; nobody is to be in its way."""
        now = self._clock()
        with self._lock:
            self._earn(now)
            self._stepping[who] = until = now + BUSY_SECONDS
            self._steps_until = max(self._steps_until, until)

    def ended(self, who: Hashable) -> None:
        """The layer of a session that ends takes no more steps."""
        with self._lock:
            self._earn(self._clock())
            if self._stepping.pop(who, None) is not None:
                self._steps_until = max(self._stepping.values(), default=-1.0)

    def stepping(self) -> bool:
        """Whether any session takes steps now."""
        return self._clock() < self._steps_until

    def allows(self, seconds: float) -> bool:
        """Whether there is time for work that takes so long; for what takes longer than can be saved up, when all of that is
        there."""
        with self._lock:
            return self._covers(seconds)

    def allows_build(self, seconds: float) -> bool:
        """The same for a build, which comes behind the proofs that are due."""
        with self._lock:
            return self._covers(seconds) and self._clock() >= self._claimed_until

    def claims(self, seconds: float, again_in: float) -> bool:
        """The same for a proof that is due; where there is no time yet, it is asked for again in so many seconds, and no build
        comes before it."""
        with self._lock:
            if self._covers(seconds):
                return True
            self._claimed_until = self._clock() + QUIET_LOOKS * again_in
            return False

    def spend(self, seconds: float) -> None:
        """Work has taken so long beside steps."""
        with self._lock:
            if self._clock() < self._steps_until:
                self._balance -= seconds

    def seats(self, who: Hashable) -> bool:
        """Whether it is this one's turn, among few, to spend time. It has its seat until it leaves it, or no longer asks."""
        with self._lock:
            now = self._clock()
            if who not in self._seats:
                for other in [other for other, until in self._seats.items() if until < now]:
                    del self._seats[other]
                if len(self._seats) >= SEATS:
                    return False
            self._seats[who] = now + QUIET_SECONDS_MAX
            return True

    def leave(self, who: Hashable) -> None:
        """Let another one have the seat of this one, if it has any."""
        with self._lock:
            self._seats.pop(who, None)

    def _covers(self, seconds: float) -> bool:
        """See `allows`; called with the lock held."""
        self._earn(self._clock())
        return self._most > 0 and self._balance >= min(seconds, self._most)

    def _earn(self, now: float) -> None:
        """Count the time since this was last done, as far as sessions stepped in it; called with the lock held."""
        until = min(now, self._steps_until)
        if self._counted_until < 0:
            self._counted_until = now
        elif until > self._counted_until:
            self._balance = min(self._balance + SHARE * (until - self._counted_until), self._most)
        self._counted_until = max(self._counted_until, now)


class StepClock:
    """What the steps of a session take, as one of its layers sees it.

    account: where they earn. layers: how many the session has. seconds: of the fastest steps so far, 0 before any was measured.
    """

    __slots__ = ("__weakref__", "_clock", "_looked", "account", "layers", "seconds")

    def __init__(self, account: BackgroundTime, layers: int, clock: Callable[[], float] = monotonic) -> None:
        self.account = account
        self.layers = layers
        self.seconds = 0.0
        self._clock = clock
        self._looked: float | None = None

    def look(self, steps: int) -> None:
        """The layer took so many steps since it last looked."""
        now = self._clock()
        before, self._looked = self._looked, now
        if before is None or steps < 1 or now <= before:
            return
        self.seconds = min((now - before) / steps, self.seconds or inf)
        self.account.stepped(self, self.seconds, now - before)

    def until_next(self, steps: int) -> int:
        """The layer need not look for so many steps. Returns after how many it does, so that the account knows meanwhile that the
        session goes on."""
        if not self.seconds:
            return min(steps, FIRST_STEPS)
        steps = min(steps, int(LOOKS_SECONDS_MAX / self.seconds) + 1)
        self.account.stepped(self, self.seconds, steps * self.seconds)
        return steps

    def busy(self) -> None:
        """The layer was given many tokens at once."""
        self.account.busy(self)

    def close(self) -> None:
        """The session ends."""
        self.account.ended(self)
