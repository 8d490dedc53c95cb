"""The same answers from a database in this process and from a server."""

import random

from engine_adapter.rag import RagEngine
from tests.engine_adapter.rag.characters import Characters

SEEN = {}


def test_a_rag_engine_on_either_transport(model, db, write, request):
    with RagEngine(model, Characters(), db, chunk_tokens=24, instruction="Read: ") as rag:
        for i in range(5):
            rag.add(str(i), write(50 + i, seed=i))
        rag.delete("4")
        order = random.Random(1).sample("0123", 4)
        answers = [rag.answer("so?", order, recompute=ratio, max_new_tokens=6, do_sample=False) for ratio in (0, 0.3, 1)]
        stream = rag.stream("so?", order, recompute=0.3, max_new_tokens=6, do_sample=False)
        assert "".join(stream) == answers[1].text
        found = rag.check([("so?", order)], ratios=(1,), max_new_tokens=6)
        assert found.rows[0].same == 1
    assert len([context for context in db.contexts() if context.name.startswith("rag/") and context.name[-3:-1] == "of"]) == 12
    result = [(answer.tokens, answer.usage.reused, answer.usage.recomputed, answer.usage.read) for answer in answers]
    assert SEEN.setdefault("result", result) == result
