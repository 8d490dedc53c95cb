"""A step whose launches are captured once and replayed, so that the host launches one thing where there were many."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

log = logging.getLogger(__name__)


class Step:
    """Calls `launch`, which launches on `stream` what depends on nothing on the host: on buffers that stay where they are,
    without waiting, and in the same way each time. On a card its second call captures it in a CUDA graph, which is replayed from
    then on; elsewhere, and where capturing fails, which one line of the log says, every call launches anew.

    The first call is not captured: Triton compiles in it, and what else is made at first use is made. Not for several threads at
    once; other threads may use the card meanwhile.
    """

    def __init__(self, launch: Callable[[], None], stream: object, buffers: Sequence[torch.Tensor] = ()) -> None:
        """stream: a `torch.cuda.Stream` that is not the default one, or whatever stands for it where there is no card. buffers:
        that `launch` reads, and that calls fill."""
        self._launch = launch
        self._stream = stream if isinstance(stream, torch.cuda.Stream) else None
        self._buffers = tuple(buffers)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = self._refused = False

    @property
    def captured(self) -> bool:
        """Whether the next call is a replay."""
        return self._graph is not None

    def __call__(self, *inputs: torch.Tensor) -> None:
        """Copies inputs to the buffers, and launches; the host does not wait. Inputs have the shapes of the buffers, and lie on
        the device or in pinned memory that stays as it is until they were copied. Raises ValueError where they are not as many,
        or of other shapes, and what `launch` raises."""
        expected, given = [tuple(part.shape) for part in self._buffers], [tuple(part.shape) for part in inputs]
        if expected != given:
            raise ValueError(f"inputs are {given}; the step was made for {expected}")
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for buffer, part in zip(self._buffers, inputs, strict=True):
                buffer.copy_(part, non_blocking=True)
            if self._warm and not self._refused and self._stream is not None and self._graph is None:
                self._graph = self._capture(self._stream)
            if self._graph is None:
                self._launch()
            else:
                self._graph.replay()
        self._warm = True

    def forget(self) -> None:
        """What was captured: `launch` will launch otherwise, or on other buffers. The next call is a first call again."""
        self._graph = None
        self._warm = self._refused = False

    def _capture(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph | None:
        """The launches, which do not run; None where they cannot be captured, now or later."""
        graph = torch.cuda.CUDAGraph()
        aside = torch.cuda.Stream(stream.device)  # others may launch on the step's stream, and mark it, meanwhile
        try:
            # Other threads may allocate and wait: only what this one does is held to the rules of capturing.
            with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                self._launch()
        except RuntimeError as error:
            log.warning("a step could not be captured in a CUDA graph and is launched each time: %s", error)
            self._refused = True
            return None
        return graph
