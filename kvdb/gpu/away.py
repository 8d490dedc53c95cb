"""What the GPU answers of one layer of a session: launched, and waited for once."""

from collections.abc import Callable, Sequence

from indexes.retrieval import Retrieval
from kvdb.attention.away import Answer, AwayFailed
from kvdb.attention.span import Span
from kvdb.attention.triton.pages import Pages
from kvdb.errors import CapacityError, GpuLost, KvdbError
from kvdb.gpu.decoding import Asked, Decoding
from kvdb.gpu.device import Device
from kvdb.gpu.results import Results
from kvdb.storage.gpu import GpuTier
from kvdb.types import Array, ModelSpec


class GpuAway:
    """See `kvdb.attention.away.Away`. What a decode step needs on the device is made once, and used by each.

    parts: what is read or searched there, in any order. failed: hears of a device that brings no answer.
    """

    def __init__(
        self,
        device: Device,
        tier: GpuTier,
        spec: ModelSpec,
        asked: Asked,
        failed: Callable[[KvdbError], None],
    ) -> None:
        self._device = device
        self._pages = Pages(tier.slab, tier.layout)
        self._spec = spec
        self._asked = asked
        self._failed = failed
        self._decoding: dict[Retrieval | None, Decoding] = {}

    @property
    def tail(self) -> bool:
        return self._asked.tail is not None

    @property
    def spans(self) -> Sequence[Span]:
        return [part.span for part in self._asked.parts]

    def launch(self, q: Array, retrieval: Retrieval | None) -> "Under":
        """See `Away.launch`."""
        try:
            if q.shape[1] > 1:
                results = self._prefilled(q)
            else:
                if retrieval not in self._decoding:
                    asked = self._asked.widened(retrieval)
                    self._decoding[retrieval] = Decoding(self._device, self._pages, self._spec, [asked])
                results = self._decoding[retrieval].launch(q[None, :, 0])
        except (CapacityError, GpuLost) as error:
            raise self.broken(error) from error
        return Under(self, results)

    def broken(self, error: KvdbError) -> AwayFailed:
        """Of a device that failed."""
        self._failed(error)
        return AwayFailed(str(error))


class Under:
    """A query under way."""

    def __init__(self, away: GpuAway, results: Results) -> None:
        self._away = away
        self._results = results

    def result(self) -> Answer:
        """See `kvdb.attention.away.Pending`."""
        try:
            return self._results.wait()[0]
        except (CapacityError, GpuLost) as error:
            raise self._away.broken(error) from error
