"""Whether kvdb answers the attention of a model: `refused` says why it does not.

A few tokens go through the model, because what a layer does between its cache and the attention function is known only when it
runs; its config does not say it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

import kvdb
from engine_adapter.transformers.attention import Attached, register
from engine_adapter.transformers.cache import SessionBatch, SessionLayer
from engine_adapter.transformers.own.trial import evaluating
from engine_adapter.transformers.spec import spec_with
from engine_adapter.transformers.support import check_model, text_config, windows_of
from kvdb.errors import InvalidArgument, Unsupported
from query_optimizer.query_options import NO_OPTIONS

TRIAL_TOKENS = 2


def refused(model: PreTrainedModel) -> Unsupported | None:
    """Why kvdb does not answer the attention of a model; None where it does."""
    try:
        check_model(model)
        with named(model):
            check_attention(model, spec_with(model, ""))
    except Unsupported as error:
        return error
    return None


@contextmanager
def named(model: PreTrainedModel) -> Iterator[None]:
    """The model's layers ask kvdb for their attention. Raises InvalidArgument for a model whose layers do already."""
    config = text_config(model)
    before = config._attn_implementation
    name = before if isinstance(before, Attached) else Attached(before)
    if id(model) in name.models:
        raise InvalidArgument("the model is attached to a database already; leave that `with` before you attach it to another")
    register()
    name.models.add(id(model))
    config._attn_implementation_internal = name  # only this config; the public setter also changes the configs inside of it
    try:
        yield
    finally:
        name.models.discard(id(model))
        if not name.models:
            config._attn_implementation_internal = name.before


def check_attention(model: PreTrainedModel, spec: kvdb.ModelSpec) -> None:
    """Raises Unsupported, naming the layer, for an attached model one of whose layers asks for other attention than kvdb
    computes, or does not ask for any. It takes as long as a step of decoding; no database has part in it."""
    batch = SessionBatch(spec, [], NO_OPTIONS)
    layers = [_TrialLayer(number, batch, window) for number, window in enumerate(windows_of(model))]
    ids = torch.zeros(1, TRIAL_TOKENS, dtype=torch.long, device=model.device)
    with evaluating(model), torch.no_grad():
        model.get_decoder()(input_ids=ids, past_key_values=Cache(layers=list(layers)), use_cache=True)
    batch.check_answered()
    for layer in layers:
        if not layer.length:
            raise Unsupported(
                f"layer {layer.number} of {type(model).__name__} does not put its keys into its cache; kvdb works with models "
                "of which every layer does"
            )


class _TrialLayer(SessionLayer):
    """A layer over no session, whose answers are zero."""

    def __init__(self, number: int, batch: SessionBatch, window: int | None) -> None:
        super().__init__(number, batch, 0)
        self.window = window

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> torch.Tensor:
        self._check_asked(k, v, scaling)
        spec = self.batch.spec
        heads = {"queries": (q, spec.q_heads), "keys": (k, spec.kv_heads), "values": (v, spec.kv_heads)}
        for name, (states, expected) in heads.items():
            if (states.shape[1], states.shape[3]) != (expected, spec.head_dim):
                raise Unsupported(
                    f"layer {self.number} has {name} of {states.shape[1]} heads of {states.shape[3]} dimensions; expected "
                    f"{expected} heads of {spec.head_dim}, as the model's config says, in every layer"
                )
        self.batch.waiting = None
        self.length += k.shape[2]
        return torch.zeros_like(q).transpose(1, 2).contiguous()
