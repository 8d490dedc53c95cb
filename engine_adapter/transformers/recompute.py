"""Partial recompute: the decoder's layers run on the tokens whose stored KV would be most wrong where they now stand.

CacheBlend (arXiv 2405.16444). The model's own forward does it, on the selected tokens at their true positions. Its attention goes
to the session, as in decoding, where the selected tokens read everything before them, stored and fresh. Hooks in front of the
layers drop the tokens that do not go on.
"""

from contextlib import ExitStack, suppress
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

import kvdb
from engine_adapter.recompute import LayerEnded, Pass, Recomputed, SelectedTokens
from engine_adapter.transformers.cache import Row, SessionBatch, SessionLayer
from engine_adapter.transformers.support import decoder_layers
from kvdb.blend.strategies import Recompute
from kvdb.errors import Unsupported
from query_optimizer.query_options import NO_OPTIONS


def recompute(
    model: PreTrainedModel, session: kvdb.Session, options: Recompute, token_seconds: float | None = None
) -> Recomputed:
    """Fill the gaps of a session that was laid out from parts, and recompute the tokens of its chunks that the options choose.

    The model is attached. token_seconds: what one token took in one layer when it was last measured. Raises Unsupported for a
    model whose layers cannot be run on some tokens only, IntegrityError for chunks that this model did not compute, and what
    `Session.overlay` raises; the session is then unfinished.
    """
    started = perf_counter()
    selection = SelectedTokens(session, options, token_seconds)
    if selection.entering.any():
        _Run(session, Pass(session, selection)).through(model)
    return selection.result(session, started)


class _Done(Exception):
    """Ends the model's forward pass: the last layer's keys and values are in the session, and its output is not needed."""


class _Layer(SessionLayer):
    """A layer of the cache whose tokens stand at any positions before the tail."""

    def __init__(self, number: int, batch: SessionBatch, run: "_Run") -> None:
        super().__init__(number, batch, 0)
        self._run = run

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._run.probing:
            raise LayerEnded(key_states[0], value_states[0])
        return super().update(key_states, value_states, *args, **kwargs)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._run.attend(self.number, q[0], k[0], v[0]).unsqueeze(0)


class _Run:
    """One pass over the model's layers."""

    def __init__(self, session: kvdb.Session, going: Pass) -> None:
        self.probing = False
        self._session = session
        self._pass = going
        self._entered = len(going.positions)
        self._kept = np.arange(self._entered)  # which of those that entered are in the layer that is being run

    def through(self, model: PreTrainedModel) -> None:
        """Put the tokens through the model's layers. Raises Unsupported for layers that cannot be run on some tokens."""
        batch = SessionBatch(self._session.spec, [Row(self._session)], NO_OPTIONS)
        cache = Cache(layers=[_Layer(number, batch, self) for number in range(self._session.spec.layers)])
        ids = torch.from_numpy(self._pass.tokens).to(model.device)
        positions = torch.from_numpy(self._pass.positions).to(model.device)
        with ExitStack() as hooks:
            for number, module in enumerate(decoder_layers(model)):
                hooks.callback(module.register_forward_pre_hook(self._before(number), with_kwargs=True).remove)
            hooks.enter_context(torch.no_grad())
            hooks.enter_context(suppress(_Done))
            model.get_decoder()(input_ids=ids[None], position_ids=positions[None], past_key_values=cache, use_cache=True)
        if not self._pass.done:
            raise Unsupported(
                f"layer {self._pass.next} did not hand its keys to kvdb's attention, so its tokens cannot be recomputed"
            )

    def attend(self, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Answer a layer's queries, `[q_heads, n, head_dim]`."""
        out = self._pass.attend(number, q, k, v)
        if out is None:
            raise _Done
        return out

    def _before(self, number: int) -> Any:
        """A hook in front of a layer, which lets only those tokens through that go on from here."""

        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            hidden, *rest = args
            if len(self._kept) < self._entered:
                rest, kwargs = _selected(self._kept, self._entered, (rest, kwargs))
            if not self._pass.checks(number):
                return (hidden, *rest), kwargs
            probed = self._probe(number, module, (hidden, *rest), kwargs)
            before = len(self._kept)
            going = self._pass.keep(number, probed.k, probed.v)
            if not len(going):  # no later layer computes any token
                raise _Done
            self._kept = self._kept[going]
            hidden, rest, kwargs = _selected(going, before, (hidden, rest, kwargs))
            return (hidden, *rest), kwargs

        return hook

    def _probe(self, number: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerEnded:
        """The keys and values of a layer for all its tokens."""
        self.probing = True
        try:
            module.forward(*args, **kwargs)
        except LayerEnded as probed:
            return probed
        finally:
            self.probing = False
        raise Unsupported(f"layer {number} did not hand its keys to its cache, so its tokens cannot be recomputed")


def _selected(tokens: npt.NDArray[np.int64], total: int, given: Any) -> Any:
    """A copy of `given` where each tensor over `total` tokens, in its first dimension or behind a batch of 1, has only some
    tokens."""
    if isinstance(given, torch.Tensor):
        index = torch.from_numpy(tokens).to(given.device)
        if given.ndim >= 2 and given.shape[:2] == (1, total):
            return given.index_select(1, index)
        return given.index_select(0, index) if given.ndim and given.shape[0] == total else given
    if isinstance(given, dict):
        return {name: _selected(tokens, total, value) for name, value in given.items()}
    if isinstance(given, tuple | list):
        return type(given)(_selected(tokens, total, value) for value in given)
    return given
