"""What vLLM's scheduler knows of its requests, and what it tells the worker to load and to save in a step.

Nothing here is vLLM's own: ids of requests are texts, tokens and blocks are numbers.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvdb.types import Tokens

Find = Callable[[Tokens, str], int]
"""How many leading tokens are stored under a salt."""


@dataclass(frozen=True)
class Transfer:
    """The KV of tokens [start, stop) of a request, between its blocks and kvdb.

    tokens: all ids from the first to `stop`, int32 `[stop]`. salt: whom they belong to. blocks: the numbers of the blocks that
    hold them, from the first token on. hashes: vLLM's own of its full blocks, where it publishes events.
    """

    request: str
    tokens: Tokens
    salt: str
    start: int
    stop: int
    blocks: tuple[int, ...]
    hashes: tuple[bytes | int, ...] = ()

    def span(self, block_size: int) -> tuple[int, ...]:
        """The blocks that the transfer touches."""
        return self.blocks[self.start // block_size : -(-self.stop // block_size)]


@dataclass(frozen=True)
class Decoding:
    """A request that computes one token behind `computed` others, whose KV is in its blocks.

    tokens: the ids that are known of it, at most `computed`, int32 `[n]`. salt: whom they belong to. blocks: the numbers of all
    its blocks. expected: how many tokens it may generate, None where that is not known.
    """

    request: str
    tokens: Tokens
    salt: str
    computed: int
    blocks: tuple[int, ...]
    expected: int | None = None


@dataclass(frozen=True)
class Step:
    """What a worker transfers in one step: what is there before a layer's attention, and what is copied behind it.

    background: loads whose requests wait until they are told of as finished, while others go on. tails: saves of requests that
    ended, whose blocks vLLM keeps until they are copied. decodes: long requests that compute one token. ended: the names of
    requests that ended, or lost their blocks.
    """

    loads: tuple[Transfer, ...] = ()
    background: tuple[Transfer, ...] = ()
    saves: tuple[Transfer, ...] = ()
    tails: tuple[Transfer, ...] = ()
    decodes: tuple[Decoding, ...] = ()
    ended: frozenset[str] = frozenset()


@dataclass
class _Known:
    """A request. prompt: how many of its tokens are the prompt. expected: as of `Decoding`. asked: how many tokens it had when
    the database was asked. computed: how many of them vLLM has in blocks of its own."""

    tokens: Tokens
    prompt: int
    salt: str
    expected: int | None = None
    found: int = 0
    asked: int = -1
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class Requests:
    """The requests of one scheduler. find: asks the database; it is asked once for each length of a request, though vLLM asks in
    every step in which a request waits. block_size: tokens of a block. decodes_from: how many tokens a request has at least whose
    decoding a worker is told of, None for none. background: whether requests wait for their loads while others go on."""

    def __init__(self, find: Find, block_size: int, decodes_from: int | None = None, *, background: bool = False) -> None:
        self._find = find
        self._block_size = block_size
        self._decodes_from = decodes_from
        self._background = background
        self._known: dict[str, _Known] = {}
        self._loads: list[Transfer] = []
        self._saves: list[Transfer] = []
        self._tails: list[Transfer] = []
        self._decodes: list[Decoding] = []
        self._ended: set[str] = set()

    def match(self, name: str, tokens: Sequence[int], prompt: int, salt: str, computed: int, expected: int | None = None) -> int:
        """How many tokens behind the `computed` ones can be loaded. The last token is left to vLLM, which needs its output.
        expected: as of `Decoding`."""
        known = self._known.get(name)
        if known is None or len(known.tokens) != len(tokens):
            known = self._known[name] = _Known(np.asarray(tokens, np.int32), prompt, salt, expected)
        if known.asked != len(tokens):
            known.found, known.asked = self._find(known.tokens, salt), len(tokens)
        known.computed = computed
        return max(0, min(known.found, len(tokens) - 1) - computed)

    def allocate(self, name: str, blocks: Sequence[int], external: int) -> None:
        """Note the blocks of a request that is about to run, `external` of whose tokens shall be loaded into them."""
        known = self._known.get(name)
        if known is None:
            return
        known.blocks = list(blocks)
        if external:
            stop = known.computed + external
            self._loads.append(self._transfer(name, known, known.computed, stop))

    def schedule(self, name: str, computed: int, tokens: int, blocks: Sequence[int], *, all_blocks: bool) -> None:
        """Note that a step computes `tokens` tokens behind the `computed` ones. blocks: those that are new, or all of them. The
        step that completes the prompt saves it, where more of it is known now than is stored."""
        known = self._known.get(name)
        if known is None:
            return
        known.blocks = list(blocks) if all_blocks else [*known.blocks, *blocks]
        if computed < known.prompt <= computed + tokens and known.found < known.prompt:
            self._saves.append(self._transfer(name, known, known.found, known.prompt))
        if self._decodes_from is not None and tokens == 1 and computed >= len(known.tokens) >= self._decodes_from:
            self._decodes.append(Decoding(name, known.tokens, known.salt, computed, tuple(known.blocks), known.expected))

    def end(self, name: str, tokens: Sequence[int], blocks: Sequence[int]) -> bool:
        """Note that a request has its answer; whether its blocks have to stay until a worker has copied what it generated. All of
        its tokens but the last are in them."""
        known = self._known.get(name)
        stop = len(tokens) - 1
        if known is None or stop <= max(known.prompt, known.found):
            return False
        known.tokens, known.blocks = np.asarray(tokens, np.int32), list(blocks)
        self._tails.append(self._transfer(name, known, max(known.prompt, known.found), stop))
        return True

    def preempt(self, names: Iterable[str]) -> None:
        """Note that requests lost their blocks."""
        if self._decodes_from is not None:
            self._ended.update(names)

    def distrust(self, blocks: Iterable[int]) -> None:
        """Expect nothing to be stored of the requests in these blocks, because a load into them failed."""
        failed = set(blocks)
        for known in self._known.values():
            if failed.intersection(known.blocks):
                known.found = 0

    def forget(self, names: Collection[str]) -> None:
        """Let go of requests that ended, or were cancelled."""
        self.preempt(names)
        for name in names:
            self._known.pop(name, None)

    def take_step(self) -> Step:
        """What the worker transfers in the step that was scheduled last; each transfer is given once."""
        loads = tuple(self._loads)
        step = Step(
            loads=() if self._background else loads,
            background=loads if self._background else (),
            saves=tuple(self._saves),
            tails=tuple(self._tails),
            decodes=tuple(self._decodes),
            ended=frozenset(self._ended),
        )
        self._loads, self._saves, self._tails, self._decodes, self._ended = [], [], [], [], set()
        return step

    def _transfer(self, name: str, known: _Known, start: int, stop: int) -> Transfer:
        blocks = tuple(known.blocks[: -(-stop // self._block_size)])
        return Transfer(name, known.tokens[:stop], known.salt, start, stop, blocks)
