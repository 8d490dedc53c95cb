"""The worker's own decoder layers, run on tokens that kvdb selects, with its attention answered by kvdb."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import kvdb
from engine_adapter.recompute import LayerEnded, Pass
from kvdb.errors import Unsupported

KNOWN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""vLLM's models whose decoder is an embedding and layers of (positions, hidden_states, residual), and nothing else."""
PIECE_TOKENS = 512
"""How many tokens of a document go through the layers at a time."""
EXACT = kvdb.QueryOptions(kvdb.Exact())

Answer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: q, k, v after RoPE and its result are `[heads, n, head_dim]`."""


class Decoder:
    """The layers of the model that a worker runs. attentions: vLLM's attention modules by their names, in the order of the
    layers. Raises Unsupported for models whose layers kvdb does not know."""

    def __init__(self, attentions: Mapping[str, Any]) -> None:
        model = _model_of(attentions)
        for name, attention in attentions.items():
            if getattr(attention, "sliding_window", None) is not None:
                raise Unsupported(f"{name} has a sliding window; kvdb moves chunks of models without")
        self._embed: Callable[[Tensor], Tensor] = getattr(model.get_submodule("model"), "embed_input_ids")  # noqa: B009
        self._attentions = list(attentions.values())
        self._layers = [model.get_submodule(name.rsplit(".", 2)[0]) for name in attentions]

    def prefill(self, session: kvdb.Session, tokens: Tensor) -> None:
        """Compute all of a document alone, tokens int64 `[n]`, and leave its KV in a session that is empty. Raises what
        `Session.attend` raises."""
        for start in range(0, len(tokens), PIECE_TOKENS):
            piece = tokens[start : start + PIECE_TOKENS]
            positions = torch.arange(start, start + len(piece))
            hidden, residual = self._embed(piece), None
            for number in range(len(self._layers)):

                def answer(q: Tensor, k: Tensor, v: Tensor, number: int = number, start: int = start) -> Tensor:
                    out: Tensor = session.attend(number, q, k, v, start=start, options=EXACT)
                    return out

                hidden, residual = self._run(number, positions, hidden, residual, answer)

    def recompute(self, going: Pass) -> None:
        """Put the selected tokens of a session that was laid out through the layers. Raises what `Pass` raises."""
        if not len(going.positions):
            return
        positions = torch.from_numpy(going.positions)
        hidden, residual = self._embed(torch.from_numpy(going.tokens)), None
        for number in range(len(self._layers)):
            if going.checks(number):
                k, v = self._probe(number, positions, hidden, residual)
                kept = torch.from_numpy(going.keep(number, k, v))
                positions, hidden = positions[kept], hidden[kept]
                residual = None if residual is None else residual[kept]
            if going.done:
                return

            def answer(q: Tensor, k: Tensor, v: Tensor, number: int = number) -> Tensor:
                out = going.attend(number, q, k, v)
                if out is None:
                    raise LayerEnded(k, v)
                return out

            try:
                hidden, residual = self._run(number, positions, hidden, residual, answer)
            except LayerEnded:
                return

    def _probe(self, number: int, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer for all its tokens. The layer's norm writes into what it is given."""

        def answer(_q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            raise LayerEnded(k, v)

        try:
            self._run(number, positions, hidden.clone(), None if residual is None else residual.clone(), answer)
        except LayerEnded as ended:
            return ended.k, ended.v
        raise Unsupported(f"layer {number} did not call its attention, so its tokens cannot be recomputed")

    def _run(
        self, number: int, positions: Tensor, hidden: Tensor, residual: Tensor | None, answer: Answer
    ) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(), _answered(self._attentions[number], answer):
            out: tuple[Tensor, Tensor] = self._layers[number](positions=positions, hidden_states=hidden, residual=residual)
        return out


@contextmanager
def _answered(attention: Any, answer: Answer) -> Iterator[None]:
    """Let an attention module be answered by another, for the time of a `with`."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **_given: Any) -> Tensor:
        heads = (each.reshape(len(q), -1, attention.head_size).transpose(0, 1).contiguous() for each in (q, k, v))
        return answer(*heads).transpose(0, 1).reshape(len(q), -1)

    attention.forward = forward
    try:
        yield
    finally:
        del attention.forward


def _model_of(attentions: Mapping[str, Any]) -> nn.Module:
    """The model that has these modules. A connector is not given it, and modules do not know what they are in, so it is looked
    for among all objects; the module itself says whether it is the one. Raises Unsupported for a model that is not known."""
    name, attention = next(iter(attentions.items()))
    for found in gc.get_objects():
        if type(found).__name__ in KNOWN and isinstance(found, nn.Module) and dict(found.named_modules()).get(name) is attention:
            return found
    raise Unsupported(f"the model is none of {', '.join(KNOWN)}, so kvdb cannot run its layers")
