"""How decode steps ask for what earlier steps asked for: measured on a real model, and made to measure for a benchmark."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

REUSED = {1: 0.69, 4: 0.88, 16: 0.96, 64: 0.98}
"""The share of the tokens that the heads of one KV head find which they also found in one of the last so many steps, `Dipr()`:
SmolLM2-135M behind 15,000 tokens of a novel, every other layer, steps 64 to 95 of its decode."""
WINDOWS = tuple(REUSED)
BEFORE = 448
"""Steps that a course leaves out, in which its queries spread over the windows."""


def reused(steps: Sequence[npt.NDArray[np.integer]]) -> dict[int, float]:
    """The share of what steps find which one of the last steps found, for each of `WINDOWS`.

    steps: the tokens, or pages, that each step finds, in their order. Counted are the steps that have as many before them as the
    longest window.
    """
    last: dict[int, int] = {}
    found, again = 0, dict.fromkeys(WINDOWS, 0)
    for number, here in enumerate(steps):
        if number >= WINDOWS[-1]:
            ages = np.array([number - last.get(one, -number - 1) for one in here.tolist()])
            found += len(ages)
            for window in WINDOWS:
                again[window] += int((ages <= window).sum())
        last.update(dict.fromkeys(here.tolist(), number))
    return {window: count / max(found, 1) for window, count in again.items()}


def course(rng: np.random.Generator, queries: int, steps: int) -> npt.NDArray[np.int64]:
    """`[steps]`: which of a head's queries each step asks, so that they come back about as `REUSED` says of tokens.

    Each step draws how long ago its query was asked last, and takes the one whose last time was then, or next before; where it is
    longer than the longest window, the one that was not asked for the longest time.
    """
    ends = [0, *WINDOWS]
    chances = np.diff([0.0, *REUSED.values(), 1.0])
    last = -WINDOWS[-1] - 1 - rng.permutation(queries)
    asked = np.empty(BEFORE + steps, np.int64)
    for step in range(len(asked)):
        ages = step - last
        band = int(rng.choice(len(chances), p=chances))
        if band == len(WINDOWS):
            query = ages.argmax()
        else:
            drawn = rng.integers(ends[band] + 1, ends[band + 1] + 1)
            query = np.where(ages >= drawn, ages, np.inf).argmin()
        asked[step] = query
        last[query] = step
    return asked[BEFORE:]
