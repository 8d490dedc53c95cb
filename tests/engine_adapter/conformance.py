"""What every adapter has to pass: a class of tests over one engine, which is run plain, on kvdb, and on kvdb after a restart.

A module subclasses `Conformance` and has a fixture `runs` that yields `Runs`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Run:
    """One greedy generation. reused: how many prompt tokens came from kvdb. tokens: the new ones."""

    reused: int
    tokens: tuple[int, ...]


class Runs(Protocol):
    """An engine under test.

    prompt: at least 300 ids of its vocabulary. slack: how many tokens of a stored prompt the engine computes all the same, such
    as the last one, or those of a block that is not full.
    """

    prompt: Sequence[int]
    slack: int

    def plain(self, tokens: Sequence[int]) -> Run:
        """The same model without kvdb."""
        ...

    def stored(self, tokens: Sequence[int], salt: str = "") -> Run:
        """On kvdb; once this returns, the prompt's KV is there."""
        ...

    def restart(self) -> None:
        """Forget everything but what is in the database."""
        ...


class Conformance:
    def test_tokens_are_those_of_the_plain_engine(self, runs):
        assert runs.stored(runs.prompt) == Run(0, runs.plain(runs.prompt).tokens)

    def test_a_stored_prompt_is_found_after_a_restart(self, runs):
        first = runs.stored(runs.prompt)
        runs.restart()
        again = runs.stored(runs.prompt)
        assert again.tokens == first.tokens == runs.plain(runs.prompt).tokens
        assert len(runs.prompt) - runs.slack <= again.reused < len(runs.prompt)

    def test_a_prompt_that_leaves_a_stored_one_shares_what_is_before(self, runs):
        runs.stored(runs.prompt)
        runs.restart()
        other = [*runs.prompt[:170], *runs.prompt[60:100]]
        got = runs.stored(other)
        assert got.tokens == runs.plain(other).tokens
        assert 170 - runs.slack <= got.reused <= 170

    def test_a_longer_prompt_goes_on_from_a_stored_one(self, runs):
        runs.stored(runs.prompt[:200])
        runs.restart()
        got = runs.stored(runs.prompt)
        assert got.tokens == runs.plain(runs.prompt).tokens
        assert 200 - runs.slack <= got.reused <= 200

    def test_nothing_is_reused_of_another_text(self, runs):
        runs.stored(runs.prompt)
        runs.restart()
        other = list(reversed(runs.prompt))
        assert runs.stored(other) == Run(0, runs.plain(other).tokens)
