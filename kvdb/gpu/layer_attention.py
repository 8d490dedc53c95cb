"""Queries of one layer of a session, answered by the GPU: launched, and waited for once."""

from collections.abc import Callable, Sequence

from indexes.retrieval import Retrieval
from kvdb.attention.block_run import Span
from kvdb.attention.device import Answer, DeviceFailed, TailHasNoRoom
from kvdb.attention.triton.pages import Pages
from kvdb.errors import CapacityError, GpuLost, KvdbError
from kvdb.gpu.decoding import DecodeStep
from kvdb.gpu.device import Device
from kvdb.gpu.notes import StepNotes
from kvdb.gpu.prefilling import PrefillStep
from kvdb.gpu.request import AttentionRequest
from kvdb.gpu.resident import ResidentLayer
from kvdb.gpu.scratch import Scratch
from kvdb.storage.gpu import GpuTier
from kvdb.types import Array, ModelSpec


class LayerAttention:
    """Implements `kvdb.attention.device.DeviceAttention`. Each retrieval's decode step is made once and used again.

    request: what the device reads and searches for each query. on_failure: called with the error when the device fails.
    """

    def __init__(
        self,
        device: Device,
        scratch: Scratch,
        tier: GpuTier,
        spec: ModelSpec,
        request: AttentionRequest,
        on_failure: Callable[[KvdbError], None],
    ) -> None:
        self.device = device
        self.scratch = scratch
        self.pages = Pages(tier.slab, tier.layout)
        self.spec = spec
        self.request = request
        self._on_failure = on_failure
        self._decoding: dict[Retrieval | None, DecodeStep] = {}
        self._resident: ResidentLayer | None = None

    @property
    def tail(self) -> bool:
        return self.request.tail is not None

    def takes(self, n: int) -> bool:
        """See `DeviceAttention.takes`."""
        return n == 1 or (self.request.tail is not None and 1 < n <= self.request.tail.length)

    @property
    def spans(self) -> Sequence[Span]:
        return [part.span for part in self.request.parts]

    def launch(self, q: Array, retrieval: Retrieval | None) -> "PendingAnswer":
        """See `DeviceAttention.launch`."""
        step: PrefillStep | DecodeStep
        try:
            if q.shape[1] > 1:
                step = PrefillStep(self.device, self.scratch, self.pages, self.spec, self.request, q)
            else:
                if retrieval not in self._decoding:
                    request = self.request.with_retrieval(retrieval)
                    self._decoding[retrieval] = DecodeStep(self.device, self.scratch, self.pages, self.spec, [request])
                step = self._decoding[retrieval]
                step.launch(q[None, :, 0])
        except (CapacityError, GpuLost) as error:
            raise self.device_failed(error) from error
        return PendingAnswer(self, SharedAnswers(step.wait), 0)

    def resident(self, notes: StepNotes) -> ResidentLayer | None:
        """Steps whose arrays lie on the device; None where it has not all tokens, or not as they are. Raises CapacityError or
        GpuLost."""
        if self._resident is None and self.tail and self.pages.layout.format == self.spec.dtype:
            self._resident = ResidentLayer(self.device, self.scratch, self.pages, self.spec, self.request, notes)
        return self._resident

    def device_failed(self, error: KvdbError) -> DeviceFailed:
        """Report the error to `on_failure`. Returns what callers raise: TailHasNoRoom where only the tail found no room."""
        self._on_failure(error)
        full = self.request.tail is not None and self.request.tail.full
        return TailHasNoRoom(str(error)) if full else DeviceFailed(str(error))


class SharedAnswers:
    """The answers of one step. The first session that asks waits for all of them. Raises CapacityError or GpuLost."""

    def __init__(self, wait: Callable[[], list[Answer]]) -> None:
        self._wait = wait
        self._answers: list[Answer] | None = None

    def __call__(self) -> list[Answer]:
        if self._answers is None:
            self._answers = self._wait()
        return self._answers


class PendingAnswer:
    """The answer of one session of a step, once it is there. number: the session's place in the step."""

    def __init__(self, layer: LayerAttention, answers: SharedAnswers, number: int) -> None:
        self._layer = layer
        self._answers = answers
        self._number = number

    def result(self) -> Answer:
        """See `kvdb.attention.device.Pending.result`."""
        try:
            return self._answers()[self._number]
        except (CapacityError, GpuLost) as error:
            raise self._layer.device_failed(error) from error
