"""A step whose launches are captured once in a CUDA graph and replayed, so that the host launches once instead of many times."""

import logging
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)


class CapturedStep:
    """Calls `launch` again and again, on a card as a CUDA graph. Whoever calls has made `stream` the current one.

    `launch` must launch the same way each time, on buffers that stay where they are, without waiting and without
    depending on the host. The first call is never captured, because Triton compiles in it. On a card the second call captures the
    launches, and from then on they are replayed. Where there is no card, or capturing fails, which is logged once, every call
    launches anew. Not for several threads at once; other threads may use the card meanwhile.
    """

    def __init__(self, launch: Callable[[], None], stream: object) -> None:
        """stream: a `torch.cuda.Stream` other than the default one, or anything else where there is no card."""
        self._launch = launch
        self._stream = stream if isinstance(stream, torch.cuda.Stream) else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = self._refused = False

    @property
    def captured(self) -> bool:
        """Whether the next call is a replay."""
        return self._graph is not None

    def __call__(self) -> None:
        """Launch or replay; the host does not wait. Raises what `launch` raises."""
        if self._graph is None and self._warm and not self._refused and self._stream is not None:
            self._graph = self._capture(self._stream)
        if self._graph is None:
            self._launch()
        else:
            self._graph.replay()
        self._warm = True

    def reset(self) -> None:
        """Forget the captured graph, because `launch` will launch something else. The next call is a first call again."""
        self._graph = None
        self._warm = self._refused = False

    def _capture(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph | None:
        """A graph of the launches, which do not run meanwhile; None where they cannot be captured."""
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
