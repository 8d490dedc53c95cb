"""`spec_of`: the spec of a transformers model, whoever answers its attention."""

from transformers import PreTrainedModel

import kvdb
from engine_adapter.transformers.answerable import refused
from engine_adapter.transformers.own.kept_model import KeptModel, check_handed_back
from engine_adapter.transformers.spec import fingerprint_of, spec_with
from engine_adapter.transformers.support import check_kept


def spec_of(model: PreTrainedModel) -> kvdb.ModelSpec:
    """The ModelSpec of a causal language model. Raises Unsupported for a model that kvdb can neither answer nor store.

    The name is the kind of model, such as "qwen3": where the weights were loaded from says nothing about them. The fingerprint
    tells weights apart, see `fingerprint_of`. A model that attends itself has a spec with a layer for each thing that a layer of
    its cache keeps.
    """
    fingerprint = fingerprint_of(model)
    return spec_with(model, fingerprint) if refused(model) is None else kept_model(model).spec(fingerprint)


def kept_model(model: PreTrainedModel) -> KeptModel:
    """What the layers of a model that attends itself keep. Raises Unsupported, naming the layer or the feature, where that
    cannot be stored and handed back."""
    check_kept(model)
    kept = KeptModel(model)
    check_handed_back(kept)
    return kept
