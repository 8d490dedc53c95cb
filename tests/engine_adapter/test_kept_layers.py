"""What a model's own cache keeps is taken and handed back, for every family, without any database."""

import pytest
import torch

from engine_adapter.transformers.layers.base import copied
from engine_adapter.transformers.own.kept_model import KeptModel, columns_of
from tests.engine_adapter.families import FAMILIES, family
from tests.engine_adapter.tiny import prompts

TOKENS = 40
REST = 7


def filled(kept, ids, pieces=(TOKENS,)):
    cache = kept.fresh()
    for piece in torch.split(ids, list(pieces)):
        kept.decode(piece, cache)
    return cache


def goes_on(kept, cache, ids):
    """What the decoder says of tokens behind a cache, one piece and then one token."""
    outs = [kept.decode(ids[:-1], cache)[0], kept.decode(ids[-1:], cache)[0]]
    return torch.cat(outs, 1)


@pytest.fixture(scope="module", params=FAMILIES)
def kept(request):
    return KeptModel(family(request.param))


def test_a_cache_that_was_taken_and_handed_back_answers_alike(kept):
    ids = prompts(1, TOKENS + REST)[0]
    own = filled(kept, ids[:TOKENS])
    handed = kept.cache([copied(kept.taken(own, 0))], TOKENS)
    assert columns_of(handed) == TOKENS
    want = goes_on(kept, own, ids[TOKENS:])
    torch.testing.assert_close(goes_on(kept, handed, ids[TOKENS:]), want, atol=1e-5, rtol=1e-5)
    again = kept.taken(handed, 0)
    for parts, others in zip(kept.taken(own, 0), again, strict=True):
        for part, other in zip(parts, others, strict=True):
            pairs = zip(part, other, strict=True) if isinstance(part, tuple) else ((part[name], other[name]) for name in part)
            assert all(a is b is None or a.shape == b.shape for a, b in pairs)


def test_rows_of_a_batch_are_handed_back_together(kept):
    rows = prompts(3, TOKENS + REST)
    takens = [kept.taken(filled(kept, row[:TOKENS]), 0) for row in rows]
    batch = kept.cache(takens, TOKENS)
    model = kept.model.get_decoder()
    with torch.no_grad():
        got = model(input_ids=rows[:, TOKENS:], past_key_values=batch, use_cache=True)[0]
    for i, row in enumerate(rows):
        own = filled(kept, row[:TOKENS])
        torch.testing.assert_close(got[i], kept.decode(row[TOKENS:], own)[0][0], atol=1e-4, rtol=1e-4)


def test_pieces_are_as_good_as_the_whole(kept):
    ids = prompts(1, TOKENS + REST)[0]
    whole, pieces = filled(kept, ids[:TOKENS]), filled(kept, ids[:TOKENS], (13, 3, 2, 22))
    want = goes_on(kept, whole, ids[TOKENS:])
    torch.testing.assert_close(goes_on(kept, pieces, ids[TOKENS:]), want, atol=1e-4, rtol=1e-4)
