"""The states of one session: those that it began with, and those that its model handed in since."""

from collections.abc import Mapping
from contextlib import ExitStack

import kvdb.validate as validate
from kvdb.catalog.segments.segment_view import Views
from kvdb.catalog.segments.states import StateSnapshot, nbytes_of, surplus_of
from kvdb.errors import KvdbError, PositionError
from kvdb.storage.budget import CpuBudget, Reservation
from kvdb.types import Array, ModelSpec, State


class SessionStates:
    """Snapshots by the position that they are of: the number of tokens before it. Of each position there may be those of some
    layers only. Not thread-safe: its session takes turns.

    layers: the numbers of those that keep a state.
    """

    def __init__(self, spec: ModelSpec, budget: CpuBudget, views: Views = ()) -> None:
        """views: what the session stands on, at whose end it may go on from their snapshot."""
        self.layers = tuple(number for number, layer in enumerate(spec.all_layers) if isinstance(layer, State))
        self._spec = spec
        self._own: dict[int, dict[int, Mapping[str, Array]]] = {}
        self._beside = Reservation(budget)
        self._begin: tuple[int, StateSnapshot | KvdbError] | None = None
        self._rest_on(views)

    def get(self, layer: int, position: int) -> Mapping[str, Array]:
        """The arrays of one layer at that position, which are not to be written. Raises LayerError for a layer without a state,
        PositionError where there is none, and IntegrityError or Unavailable for one on disk that cannot be read."""
        validate.state_layer(self._spec, layer)
        own = self._own.get(position, {})
        if layer in own:
            return own[layer]
        if self._begin is not None and self._begin[0] == position:
            if isinstance(self._begin[1], KvdbError):
                raise self._begin[1]
            return self._begin[1][layer]
        known = sorted(position for position, layers in self._own.items() if layer in layers)
        raise PositionError(
            f"layer {layer} has no state at position {position}; it was handed in at {', '.join(map(str, known)) or 'none'}, and "
            "can be had there, or where the session began"
        )

    def put(self, layer: int, arrays: Mapping[str, Array], position: int) -> None:
        """Keep the arrays of one layer at that position. Raises LayerError, InvalidArgument, ShapeError, DtypeError and
        CapacityError; then nothing is kept."""
        given = validate.state(self._spec, layer, arrays)
        kept = {at: dict(layers) for at, layers in self._own.items()}
        kept.setdefault(position, {})[layer] = given
        for surplus in surplus_of(kept):
            del kept[surplus]
        self._beside.resize(sum(nbytes_of(layers) for layers in kept.values()))
        self._own = kept

    def snapshots(self) -> dict[int, StateSnapshot]:
        """Those that hold the states of all layers, by position."""
        return {position: layers for position, layers in self._own.items() if len(layers) == len(self.layers)}

    def truncate(self, tokens: int) -> None:
        """Forget those behind so many tokens."""
        self._own = {position: layers for position, layers in self._own.items() if position <= tokens}
        self._beside.resize(sum(nbytes_of(layers) for layers in self._own.values()))

    def rebase(self, views: Views) -> None:
        """Stand on these views from now on, which hold as many tokens or fewer."""
        self._rest_on(views)

    def share(self, budget: CpuBudget, views: Views) -> "SessionStates":
        """The same for a fork of the session over these views. Raises CapacityError."""
        twin = SessionStates(self._spec, budget, views)
        with ExitStack() as undo:
            undo.callback(twin.release)
            twin._begin = self._begin
            twin._beside.resize(self._beside.nbytes)
            twin._own = {position: dict(layers) for position, layers in self._own.items()}
            undo.pop_all()
        return twin

    def release(self) -> None:
        """Forget all of them."""
        self._own, self._begin = {}, None
        self._beside.release()

    def _rest_on(self, views: Views) -> None:
        """Take what the segments have at the end of these views, because they may give it up later."""
        if not self.layers or not views or (self._begin is not None and self._begin[0] == views[-1].end):
            return
        states = views[-1].segment.states
        self._begin = None
        if views[-1].visible in states.positions:
            try:
                self._begin = views[-1].end, states.get(views[-1].visible)
            except KvdbError as error:
                self._begin = views[-1].end, error
