"""A queue that serves tenants alike: whoever has been served the fewest tokens goes next.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2: each tenant has a
counter of the tokens that it was served; the smallest goes first. A tenant that comes, or comes back, begins no lower than the
smallest of those that are there, so that nobody saves service up by being away. Two tenants that always have calls waiting differ
by at most twice the tokens of the largest call.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from kvdb.errors import CapacityError

T = TypeVar("T")

NEIGHBOURS_MAX = 8
"""How many calls of one group may follow one another while an older one of the same tenant waits."""
AWAY_MAX = 4096
"""How many tenants without calls keep their counters; those with the smallest are forgotten first, which lifts them at most."""


class Work(NamedTuple):
    """What a call asks for. tenant: whose it is, "" for nobody's. tokens: how many it is counted as. group: calls of one group
    are better served next to each other, since they read the same; None for none. due: until when it is waited for, in seconds of
    the monotonic clock."""

    tenant: str = ""
    tokens: int = 1
    group: Hashable = None
    due: float = float("inf")


class _Waiting(NamedTuple, Generic[T]):
    number: int
    work: Work
    item: T


@dataclass(slots=True)
class _Tenant(Generic[T]):
    """One tenant. groups: what waits, by group, in the order of its coming. running: how many of its calls are under way."""

    counter: int
    groups: dict[Hashable, deque[_Waiting[T]]] = field(default_factory=dict)
    running: int = 0
    last: Hashable = None
    neighbours: int = 0

    @property
    def active(self) -> bool:
        return bool(self.groups) or self.running > 0


class FairQueue(Generic[T]):
    """Items that wait, of several tenants. It knows no clock and no threads; its user holds a lock. length_max: the most that
    may wait. length: how many do."""

    def __init__(self, length_max: int) -> None:
        self._length_max = length_max
        self._tenants: dict[str, _Tenant[T]] = {}
        self.length = 0
        self._number = 0
        self._last_counter = 0

    def __len__(self) -> int:
        return self.length

    def counter(self, tenant: str) -> int:
        """The tokens that the tenant counts as served, 0 for one that is not known."""
        known = self._tenants.get(tenant)
        return 0 if known is None else known.counter

    def of_tenant(self, name: str) -> int:
        """How many items of the tenant wait or are under way."""
        known = self._tenants.get(name)
        return 0 if known is None else known.running + sum(map(len, known.groups.values()))

    def push(self, work: Work, item: T) -> None:
        """Let an item wait. Raises CapacityError where too many wait; then it does not."""
        if self.length >= self._length_max:
            raise CapacityError(
                f"{self.length} calls wait for the engine, as many as server.queue_max lets; "
                "wait before more is asked, or raise server.queue_max or server.requests_max"
            )
        tenant = self._come(work.tenant)
        self._number += 1
        tenant.groups.setdefault(work.group, deque()).append(_Waiting(self._number, work, item))
        self.length += 1

    def start(self, work: Work) -> None:
        """Count work that begins without having waited. `done` it."""
        tenant = self._tenants.get(work.tenant)
        if tenant is None or not tenant.running:
            tenant = self._come(work.tenant)
        tenant.counter += work.tokens
        tenant.running += 1

    def pop(self, now: float = float("-inf")) -> T | None:
        """The item that goes next, which is under way until `done`; None where none waits. now: what is due by then is not
        counted as served."""
        waiting = [tenant for tenant in self._tenants.values() if tenant.groups]
        if not waiting:
            return None
        tenant = min(waiting, key=lambda tenant: (tenant.counter, _oldest(tenant).number))
        taken = self._next(tenant)
        late = taken.work.due <= now
        self._serve(tenant, taken.work._replace(tokens=0) if late else taken.work)
        return taken.item

    def done(self, work: Work) -> None:
        """Work that was started or popped has ended."""
        tenant = self._tenants[work.tenant]
        tenant.running -= 1
        if not tenant.running and not tenant.groups:
            self._leave(tenant)

    def remove(self, work: Work, item: T) -> bool:
        """Take an item out that is waited for no longer. Whether it still waited."""
        tenant = self._tenants.get(work.tenant)
        waiting = () if tenant is None else tenant.groups.get(work.group, ())
        for one in waiting:
            if one.item is item:
                assert tenant is not None
                self._take(tenant, one)
                if not tenant.active:
                    self._leave(tenant)
                return True
        return False

    def expired(self, now: float) -> list[T]:
        """Take out the items that are due, which are under way until `done`. They are not counted as served."""
        late = [
            (tenant, one)
            for tenant in self._tenants.values()
            for waiting in tenant.groups.values()
            for one in waiting
            if one.work.due <= now
        ]
        for tenant, one in late:
            self._take(tenant, one)
            tenant.running += 1
        return [one.item for _, one in late]

    def _come(self, name: str) -> _Tenant[T]:
        """The tenant, lifted to the others where it was away."""
        tenant = self._tenants.get(name)
        if tenant is not None and tenant.active:
            return tenant
        floor = self._last_counter
        if len(self._tenants) > (tenant is not None):  # others are known
            floor = min((other.counter for other in self._tenants.values() if other.active), default=floor)
        if tenant is None:
            self._forget()
            tenant = self._tenants[name] = _Tenant(floor)
        tenant.counter = max(tenant.counter, floor)
        return tenant

    def _leave(self, tenant: _Tenant[T]) -> None:
        self._last_counter = max(self._last_counter, tenant.counter)
        tenant.last, tenant.neighbours = None, 0

    def _forget(self) -> None:
        """Forget the tenants that are away, where there are too many."""
        if len(self._tenants) < AWAY_MAX:
            return
        away = sorted((tenant.counter, name) for name, tenant in self._tenants.items() if not tenant.active)
        for _, name in away[: AWAY_MAX // 2]:
            del self._tenants[name]

    def _serve(self, tenant: _Tenant[T], work: Work) -> None:
        tenant.counter += work.tokens
        tenant.running += 1
        tenant.neighbours = tenant.neighbours + 1 if work.group == tenant.last else 1
        tenant.last = work.group

    def _next(self, tenant: _Tenant[T]) -> _Waiting[T]:
        """The tenant's next item: one of the group of its last, unless an older one has waited for too many of these."""
        alike = None if tenant.last is None else tenant.groups.get(tenant.last)
        first = _oldest(tenant)
        chosen = alike[0] if alike and tenant.neighbours < NEIGHBOURS_MAX else first
        return self._take(tenant, chosen)

    def _take(self, tenant: _Tenant[T], one: _Waiting[T]) -> _Waiting[T]:
        waiting = tenant.groups[one.work.group]
        waiting.remove(one)
        if not waiting:
            del tenant.groups[one.work.group]
        self.length -= 1
        return one


def _oldest(tenant: _Tenant[T]) -> _Waiting[T]:
    return min((waiting[0] for waiting in tenant.groups.values()), key=lambda one: one.number)
