"""A model's own cache for one sequence: from what is stored of it, and from the model for the rest."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor

import kvdb
from engine_adapter.base import Progress
from engine_adapter.transformers.own.kept_model import KeptModel
from engine_adapter.transformers.own.recording import Recording, recording
from engine_adapter.transformers.own.stored import put, row_of


class PieceSizes:
    """How a text goes through a model. tokens: how many at once. states: a state is kept at multiples of so many.

    No piece but a text's only one has a single token: some recurrent layers compute one token in another way than several, not
    always to the same result (Nemotron-H's steps are at least `time_step_min` in a text), and the model's own generate puts a
    prompt through at once.
    """

    def __init__(self, tokens: int, states: int) -> None:
        self.tokens = tokens
        self.states = states

    def of(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The pieces of tokens [begin, end), which end at multiples of `states`, so that there is one."""
        while begin < end:
            stop = min(begin + self.tokens, end, (begin // self.states + 1) * self.states)
            stop = end if end - stop == 1 else stop
            yield begin, stop
            begin = stop

    def keeps_state(self, position: int, end: int) -> bool:
        """Whether a state is kept behind so many tokens of `end`."""
        return position == end or position % self.states == 0


def fill(
    kept: KeptModel,
    session: kvdb.Session,
    tokens: Tensor,
    pieces: PieceSizes,
    *,
    store: bool,
    progress: Progress | None = None,
) -> Any:
    """A cache of the model's own that holds these tokens, int64 `[n]`, of which the session has the first.

    store: whether the session gets the others. progress: called as (done, n), first with what was stored already. Raises what
    the database raises; the session is then unfinished.
    """
    held, n = session.start, len(tokens)
    cache = kept.cache([row_of(kept, session, held)], held) if held else kept.fresh()
    if progress is not None:
        progress(held, n)
    with ExitStack() as stack:
        seen: Recording | None = stack.enter_context(recording(kept, cache)) if store else None
        for start, stop in pieces.of(held, n):
            kept.decode(tokens[start:stop], cache)
            if seen is not None:
                put(kept, session, start, stop, seen.taken(0, stop), states=pieces.keeps_state(stop, n))
                seen.forget()
            if progress is not None:
                progress(stop, n)
    return cache
