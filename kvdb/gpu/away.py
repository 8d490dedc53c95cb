"""What the GPU answers of one layer of a session: launched, and waited for once."""

from collections.abc import Callable, Sequence

from indexes.retrieval import Retrieval
from kvdb.attention.away import Answer, AwayFailed, TailHasNoRoom
from kvdb.attention.span import Span
from kvdb.attention.triton.pages import Pages
from kvdb.errors import CapacityError, GpuLost, KvdbError
from kvdb.gpu.asked import Asked
from kvdb.gpu.decoding import Decoding
from kvdb.gpu.device import Device
from kvdb.gpu.prefilling import Prefilling
from kvdb.gpu.scratch import Scratch
from kvdb.storage.gpu import GpuTier
from kvdb.types import Array, ModelSpec


class GpuAway:
    """See `kvdb.attention.away.Away`. What a decode step needs on the device is made once, and used by each.

    parts: what is read or searched there, in any order. failed: hears of a device that brings no answer.
    """

    def __init__(
        self,
        device: Device,
        scratch: Scratch,
        tier: GpuTier,
        spec: ModelSpec,
        asked: Asked,
        failed: Callable[[KvdbError], None],
    ) -> None:
        self.device = device
        self.scratch = scratch
        self.pages = Pages(tier.slab, tier.layout)
        self.spec = spec
        self.asked = asked
        self._failed = failed
        self._decoding: dict[Retrieval | None, Decoding] = {}

    @property
    def tail(self) -> bool:
        return self.asked.tail is not None

    def takes(self, n: int) -> bool:
        """See `Away.takes`."""
        return n == 1 or (self.asked.tail is not None and 1 < n <= self.asked.tail.length)

    @property
    def spans(self) -> Sequence[Span]:
        return [part.span for part in self.asked.parts]

    def launch(self, q: Array, retrieval: Retrieval | None) -> "Under":
        """See `Away.launch`."""
        step: Prefilling | Decoding
        try:
            if q.shape[1] > 1:
                step = Prefilling(self.device, self.scratch, self.pages, self.spec, self.asked, q)
            else:
                if retrieval not in self._decoding:
                    asked = self.asked.widened(retrieval)
                    self._decoding[retrieval] = Decoding(self.device, self.scratch, self.pages, self.spec, [asked])
                step = self._decoding[retrieval]
                step.launch(q[None, :, 0])
        except (CapacityError, GpuLost) as error:
            raise self.broken(error) from error
        return Under(self, Once(step.wait), 0)

    def broken(self, error: KvdbError) -> AwayFailed:
        """Of a device that failed, or has no room."""
        self._failed(error)
        full = self.asked.tail is not None and self.asked.tail.full
        return TailHasNoRoom(str(error)) if full else AwayFailed(str(error))


class Once:
    """Waits for the answers of one step, when the first of its sessions asks. Raises CapacityError or GpuLost."""

    def __init__(self, wait: Callable[[], list[Answer]]) -> None:
        self._wait = wait
        self._answers: list[Answer] | None = None

    def __call__(self) -> list[Answer]:
        if self._answers is None:
            self._answers = self._wait()
        return self._answers


class Under:
    """A query under way. number: of its session in the step."""

    def __init__(self, away: GpuAway, answers: Once, number: int) -> None:
        self._away = away
        self._answers = answers
        self._number = number

    def result(self) -> Answer:
        """See `kvdb.attention.away.Pending`."""
        try:
            return self._answers()[self._number]
        except (CapacityError, GpuLost) as error:
            raise self._away.broken(error) from error
