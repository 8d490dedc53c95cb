"""The transformers adapter passes what every adapter has to pass."""

import pytest
import torch

from engine_adapter.transformers import attach
from tests.engine_adapter.conformance import Conformance, Run
from tests.engine_adapter.tiny import build, prompts

NEW_TOKENS = 8


class TransformersRuns:
    """Each generation on kvdb is attached anew, so that a restart has nothing to forget."""

    slack = 1  # the last token of a prompt, whose logits are wanted

    def __init__(self, db):
        self.prompt = prompts(1, 320, seed=3)[0].tolist()
        self._model = build()
        self._db = db

    def plain(self, tokens):
        return Run(0, self._new(self._model.generate(torch.tensor([tokens]), max_new_tokens=NEW_TOKENS), tokens))

    def stored(self, tokens, salt=""):
        assert not salt, "transformers has no salt"
        with attach(self._model, self._db) as engine:
            name = f"prompt {len(self._db.contexts())}"
            answer = engine.generate(torch.tensor([tokens]), max_new_tokens=NEW_TOKENS, keep=name)
            return Run(engine.last.reused[0], self._new(answer, tokens))

    def restart(self):
        pass

    @staticmethod
    def _new(answer, tokens):
        return tuple(answer[0, len(tokens) :].tolist())


@pytest.fixture
def runs(db):
    return TransformersRuns(db)


class TestTransformers(Conformance):
    """Embedded and remote."""
