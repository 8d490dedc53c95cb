"""How often what is known of each layer has changed, as native steps compare it."""

import kvdb._native as _native


class LayerChanges:
    """Counts changes of each layer apart, so that what is found out about one ends no plan of another. Thread-safe.

    version: grows with every change of any layer.
    """

    def __init__(self) -> None:
        self._all = _native.Version()
        self._layers: dict[int, _native.Version] = {}

    @property
    def version(self) -> int:
        return self._all.value

    def of(self, layer: int) -> _native.Version:
        """The count of one layer, always the same object."""
        return self._layers.setdefault(layer, _native.Version())

    def advance(self, layer: int | None = None) -> None:
        """Something of a layer has changed; None for all of them."""
        for changed in list(self._layers.values()) if layer is None else [self.of(layer)]:
            changed.advance()
        self._all.advance()
