"""Attention over blocks of keys and values, and what moves them in and out. CPU, C++.

A block is one allocation of keys, [kv_heads][block_size][head_dim], and behind them values, [kv_heads][block_size][value_dim];
or of keys alone, where values are the first numbers of keys, or where there are none. A run is a sequence of blocks, given by
`table`, uint64 [blocks], their base addresses. Addresses are trusted: the caller keeps the memory alive and large enough.
Every other argument is checked, and a wrong one raises ValueError (TypeError if it is no such array at all).

Arrays are anything with DLPack or the buffer protocol, on the CPU. 16-bit floats cross as uint16, their bits. Arrays of shape
[heads, n, head_dim] may have any strides between heads and tokens; the last dimension is contiguous. Every call releases the
GIL, may come from any thread, and runs on up to `threads()` threads.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal

class Dtype(enum.Enum):
    """The element type of a block."""

    float32 = 0
    float16 = 1
    bfloat16 = 2

class Geometry:
    """What fixes the bytes of a block. head_dim: the numbers of a key, a multiple of 8, up to 640; block_size: up to 1024 tokens.
    value_dim: the numbers of a value, likewise, head_dim for None; with 0 tokens have no values, and are not attended.
    values_in_keys: there are keys alone, and a value is the first value_dim numbers of its key."""

    def __init__(
        self,
        dtype: Dtype,
        kv_heads: int,
        head_dim: int,
        block_size: int = 64,
        value_dim: int | None = None,
        values_in_keys: bool = False,
    ) -> None: ...
    @property
    def dtype(self) -> Dtype: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def values_in_keys(self) -> bool: ...
    @property
    def block_bytes(self) -> int: ...

class BlockFormat(enum.Enum):
    """How the numbers of a block are stored: as they came, keys and values in eight bits, values in four, or both in four."""

    raw = 0
    int8 = 1
    int8_int4 = 2
    int4 = 3

def block_bytes(geometry: Geometry, block_format: BlockFormat) -> int:
    """The bytes of a block. A quantized one takes a multiple of 64, its block_size is a multiple of 16, and its values are as
    long as its keys, and apart from them, up to 256 numbers."""

def quantize(geometry: Geometry, block_format: BlockFormat, table: Any, n: int, out: Any) -> tuple[float, float, float, float]:
    """Writes the first n tokens of a run into quantized blocks, uint64 `out`, one for each block of the run.

    Numbers are rotated, so that no channel stands out, and coded relative to the mean of their channel in the block, with a scale
    for each key and each value. Returns the squared length of what rounding changed in the keys, that of the keys, and the same
    of the values.
    """

def dequantize(geometry: Geometry, block_format: BlockFormat, table: Any, start: int, n: int, k_out: Any, v_out: Any) -> None:
    """Reads positions [start, start + n) of quantized blocks into k_out, v_out [kv_heads, n, head_dim], rounded to the geometry's
    type."""

def cut(geometry: Geometry, block_format: BlockFormat, block: int, n: int, out: int) -> None:
    """Copies the quantized block at an address to another one, with zeros in place of all that is behind its first n tokens."""

class Placement:
    """That the first blocks of a run stand elsewhere than they were computed. See `attend`; the arrays are copied.

    view: int32 [blocks], which of the views each block belongs to; -1: not moved. cos, sin: float32 [views, pairs], of
    shift * frequency, where keys computed at p stand at p + shift; the first 2 * pairs dimensions rotate, dimension i with
    i + pairs, or with `interleaved` 2i with 2i + 1. hidden: uint64 [blocks, ceil(block_size / 64)]; where bit t % 64 of word
    t // 64 is set, nobody sees token t of the block. It must hold finite numbers all the same.
    """

    def __init__(self, view: Any, cos: Any, sin: Any, interleaved: bool = False, hidden: Any | None = None) -> None: ...
    @property
    def blocks(self) -> int: ...

def append(geometry: Geometry, table: Any, start: int, k: Any, v: Any | None) -> tuple[Literal["k", "v"], int, int] | None:
    """Writes k [kv_heads, n, head_dim], v [kv_heads, n, value_dim] at positions [start, start + n) of the run. v: not looked at
    where a block has no values of its own.

    Position p is slot p % block_size of block p // block_size. If an element is NaN or infinite, returns (which, KV head, token
    of k or v) of the first such token, keys before values; what the positions hold is unspecified then.
    """

def finite(geometry: Geometry, array: Any, logs: Any | None = None) -> bool:
    """Whether array [heads, n, head_dim] or [heads, n, value_dim], of any number of heads, and logs, float32 [heads, n], hold
    neither NaN nor infinity."""

def gather(geometry: Geometry, table: Any, start: int, n: int, k_out: Any, v_out: Any | None) -> None:
    """Reads positions [start, start + n) of the run into k_out [kv_heads, n, head_dim], v_out [kv_heads, n, value_dim]; None:
    keys alone, where a block has no values of its own."""

def copy(geometry: Geometry, source: Any, source_start: int, target: Any, target_start: int, n: int) -> None:
    """Copies n positions from one run (its table) to another. The memory of the two may not overlap."""

def place(
    geometry: Geometry,
    source: Any,
    start: int,
    target: Any,
    target_start: int,
    n: int,
    cos: Any | None,
    sin: Any | None,
    interleaved: bool = False,
) -> None:
    """Copies as `copy` does, with keys rotated forward: as if they had been computed `shift` positions further on.

    cos, sin: float32 [pairs], of shift * frequency, as in `Placement`; None and None: a plain copy. Keys are rotated in float32
    and rounded to their type. Those that hold values are not rotated: ValueError.
    """

def scatter(geometry: Geometry, source: Any, source_start: int, target: Any, positions: Any) -> None:
    """Copies token source_start + i of one run to position positions[i], int64 [n], of another; of several the last stays."""

def gather_at(geometry: Geometry, table: Any, positions: Any, k_out: Any, v_out: Any | None) -> None:
    """Reads the tokens at positions, int64 [n], in any order, into k_out and v_out as `gather` does."""

def rotate(geometry: Geometry, q: Any, cos: Any, sin: Any, interleaved: bool, out: Any) -> None:
    """Rotates q [heads, n, head_dim], of the geometry's type, back: as keys that were moved by `shift` want it.

    cos, sin: float32 [pairs], of shift * frequency, as in `Placement`. out: [heads, n, head_dim] of q's type, rounded, or
    float32; or q itself. `geometry` tells type and head_dim alone; any number of heads goes.
    """

def attend(
    geometry: Geometry,
    q: Any,
    table: Any,
    counts: Any,
    causal: int,
    scale: float,
    out: Any,
    lse: Any | None = None,
    top: Any | None = None,
    kv_begin: int = 0,
    kv_end: int | None = None,
    ends: Any | None = None,
    placement: Placement | None = None,
    sinks: Any | None = None,
    window: int = 0,
) -> None:
    """Softmax attention of q [q_heads, n, head_dim] over the first counts[b] tokens of each block b, in order.

    Blocks may be of several formats: the three lowest bits of an address are the value of its block's `BlockFormat`. A quantized
    block is attended as it is stored; a query and the weights of 64 tokens are rounded to 16 bits beside codes of eight, and to
    eight beside codes of four.

    counts: int32 [blocks]. causal: 0, every query sees all N tokens; or n, the last n tokens are the queries' own, and query i
    sees the first N - n + i + 1. Query head h reads KV head h // (q_heads // kv_heads). out: [q_heads, n, value_dim] of q's
    type or float32. lse: float32 [q_heads, n], contiguous, the logarithm of sum exp(scale * q.k).
    top: the same, the largest q.k. Only KV heads [kv_begin, kv_end) are attended; what belongs to others is left as it
    is. ends: int64 [n], ascending, instead of causal: query i sees the first ends[i] tokens. placement: of the run's first
    blocks, or of all; nobody sees what it hides, and queries are rotated back by the shift of what they meet, in float32, and
    rounded to their type. A query that sees nothing gets out 0 and lse and top -inf. sinks: float32 [q_heads], a logit of each
    query head, which weighs in the softmax as a token would whose value is 0, and raises no top; -inf for none. window: where it
    is not 0, a query sees only the last so many of the tokens that it would see, its own among them; what lies before is not
    read. Sums are float32; with 16-bit types the
    relative error is that of rounding the output, about 2e-3, and where blocks were moved that of rounding the query, too.
    """

def attend_retrieved(
    geometry: Geometry,
    table: Any,
    offsets: Any,
    ids: Any,
    scores: Any,
    scale: float,
    state_out: Any,
    state_lse: Any,
    out: Any,
    lse: Any,
) -> None:
    """The states float32 state_out [q_heads, n, value_dim], state_lse [q_heads, n], merged with attention over chosen tokens.

    Row h * n + i has the tokens ids[offsets[row] : offsets[row + 1]], int32, of the run `table`, with q.k in scores, float32.
    Only values are read. out: float32 or of the geometry's type, contiguous; lse: float32 [q_heads, n]. Both may be the state's
    own arrays. A row that sees nothing gets 0 and -inf.
    """

def merge_tail(geometry: Geometry, state_out: Any, state_lse: Any, tail_out: Any, tail_lse: Any, out: Any, lse: Any) -> None:
    """The states float32 state_out [q_heads, n, value_dim], state_lse [q_heads, n], merged with others, tail_out and tail_lse.

    out and lse as those of `attend_retrieved`. A row whose tail_lse is -inf stays as it is; NaN and +inf are refused.
    """

def indexer_scores(geometry: Geometry, queries: Any, weights: Any, table: Any, counts: Any, out: Any) -> None:
    """Scores of all N tokens of a run by the keys of an indexer, which are of one KV head; out: float32 [n, N].

    queries: float32 [heads, n, head_dim], weights: float32 [heads, n], all contiguous. The score of a token for query i is the
    sum over the heads of weights[:, i] * max(0, queries[:, i] . key). Products and sums are float32; queries are not rounded, and
    where they hold bfloat16 numbers, and keys are bfloat16, half the time is taken. Blocks are as they came, not quantized.
    """

def indexer_select(geometry: Geometry, queries: Any, weights: Any, table: Any, counts: Any, ids: Any, found: Any) -> None:
    """What each of the last n tokens of a run selects by the scores of `indexer_scores`, among the tokens up to its own: the
    `top` of the largest scores, ascending, of equal scores the earlier token; all where they are fewer.

    ids: int32 [n, top], positions among the run's tokens, of which the first found[i] of row i are written. found: int32 [n].
    """

def attend_chosen(
    geometry: Geometry,
    q: Any,
    table: Any,
    counts: Any,
    ids: Any,
    found: Any,
    scale: float,
    out: Any,
    lse: Any | None = None,
    sinks: Any | None = None,
) -> None:
    """Attention as that of `attend`, where query i sees the tokens ids[i, : found[i]] alone, positions among those of the run,
    ascending, each once. ids: int32 [n, m]. found: int32 [n]. Blocks are as they came, not quantized."""

class StepCut(enum.Enum):
    """Tokens within a range of the largest score of all searches, or the k of all searches with the largest scores."""

    range = 0
    top_k = 1

class StepEnd(enum.Enum):
    """How a step ended: it is answered; or so much is to be read whole that reading everything costs less; or float32 cannot hold
    a score or an estimate; or more may have been left out than the plan's bound allows; or a query is unlike those for
    which the plan was proven."""

    answered = 0
    reads_everything = 1
    not_finite = 2
    bound_exceeded = 3
    unlike = 4

class StepResult:
    """What a step did. scanned, retrieved: tokens looked at and attended, once for each group of query heads that shared their
    read. search_ns, gather_ns: the nanoseconds of the searches, and of what followed them. missed, bound: the share of the mass
    that was left out, estimated and bounded, means over the query heads; bound_max: the largest. searches: how many there
    were. signs: float32 [SIGNS * q_heads], as `kvdb.attention.signs` has them. unlike: uint8 [kv_heads], the heads that were
    outside of their ranges; empty where that was not judged."""

    @property
    def end(self) -> StepEnd: ...
    @property
    def searches(self) -> int: ...
    @property
    def scanned(self) -> float: ...
    @property
    def retrieved(self) -> float: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def missed(self) -> float: ...
    @property
    def bound(self) -> float: ...
    @property
    def bound_max(self) -> float: ...
    @property
    def search_ns(self) -> int: ...
    @property
    def gather_ns(self) -> int: ...
    def signs(self) -> Any: ...
    def unlike(self) -> Any: ...
    def given_up(self) -> Any:
        """uint8 [q_heads]: the rows that some search gave up; empty where none was made."""

    def found(self, search: int) -> tuple[Any, ...]:
        """Of one search the arrays offsets, ids, scores, the numbers scanned and nbytes, the arrays missed, bound, tail (empty
        for none) and dense, and the nanoseconds it took."""

class Step:
    """One query of a layer, by a plan: some blocks are read whole, indexes search the others, one after the other, and everything
    is merged.

    Blocks are tuples of table and counts, as `attend` takes them, and a Placement or None. window: read whole, together with
    the run's blocks from grows_from on (-1: none of them). sinks: of the window, but a range does not begin at their scores;
    None for none. searches: tuples of a searcher (a capsule of `indexes._native`), the tokens [begin, end) of its index, the
    blocks that hold them, active_heads, bool [kv_heads], and hidden, uint64, a bit for each token of the index; None for all
    heads, and for none hidden; whether it is observed; the rotation by which the query is turned back for it, cos and sin,
    float32 [pairs], and whether pairs are neighbours, or None; and, where there are several, what of its finds counts once
    all were made, a StepCut and its parameter (the range in units of q.k, or the number of tokens), or None for all. whole:
    tuples of blocks that are read whole for some KV heads, their number of tokens, and the heads, bool [kv_heads]. tokens:
    how many are searched, in all. guards: float32 [kv_heads], the logarithm of what a head may be estimated to miss relative
    to what it reads, or it is read whole. ranges: float32 [2, SIGNS, q_heads], the least and
    the largest of each sign (`kvdb.attention.signs`), or the head is read whole. found_share_max: of the searched tokens; a KV
    head that finds more is read whole. whole_share_max: of the searched tokens and heads; where more are to be read whole,
    nothing is. bound_max: of the share of the mass that is left out, the most that the bound may be; infinite for any.
    """

    def __init__(
        self,
        geometry: Geometry,
        q_heads: int,
        scale: float,
        window: tuple[Any, ...],
        grows_from: int,
        sinks: tuple[Any, ...] | None,
        searches: Any,
        whole: Any,
        tokens: int,
        guards: Any | None,
        ranges: Any | None,
        found_share_max: float,
        whole_share_max: float,
        bound_max: float,
    ) -> None: ...
    def run(
        self,
        q: Any,
        queries: Sequence[int],
        causal: bool,
        table: Any,
        counts: Any,
        out: Any,
        logs: Any,
        observed: bool,
        judged: bool,
        sinks: Any | None = None,
    ) -> list[StepResult]:
        """Answers some of the queries q [q_heads, n, head_dim], of the last n tokens of the run as it is now. queries: their
        numbers. causal: whether each sees the window up to its own token alone. out: of q's type, [queries * q_heads, 1,
        value_dim], contiguous. logs: float32 [queries, 3, q_heads], the logarithms of the sum of exp(scale * q.k) over
        everything; over the tokens read, without estimates; and over those left out, estimated. Both arrays hold nothing of a
        query that is not answered; but where a bound is exceeded, the last two logarithms are known. observed: whether
        `observations` is to be asked. judged: whether a head whose signs are outside of their ranges is read whole. sinks: as
        `attend` takes them; they count among the tokens read."""

    def observations(self, result: StepResult, top: Any | None, lse: Any) -> list[tuple[int, bytes, bytes]]:
        """What the searches of an observed query showed that are to be told: the number of the search, and of `observe` the
        values [4, q_heads] and which of them are known, empty for all. result: of this step. top, lse: float32 [q_heads, 1], the
        largest q.k and the log of the sum of exp(scale * q.k) over everything, as far as they are known; None for the largest of
        what was read and found, where the step was answered or a bound was exceeded."""

class Version:
    """A number that grows whenever a fact changes that plans depend on. Thread-safe."""

    def __init__(self) -> None: ...
    @property
    def value(self) -> int: ...
    def advance(self) -> None: ...

class StepTotals:
    """Sums over steps, as in `StepResult`; ns: the nanoseconds they took; bound_max: the largest; tokens: of the runs that were
    asked."""

    @property
    def steps(self) -> int: ...
    @property
    def scanned(self) -> float: ...
    @property
    def retrieved(self) -> float: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def ns(self) -> int: ...
    @property
    def missed(self) -> float: ...
    @property
    def bound(self) -> float: ...
    @property
    def bound_max(self) -> float: ...
    @property
    def search_ns(self) -> int: ...
    @property
    def gather_ns(self) -> int: ...
    @property
    def tokens(self) -> int: ...

class LayerSteps:
    """Decode steps of one layer: a token is appended to the run's last block, and its query answered. The calls of one object
    take turns.

    like: an array of numpy of the dtype of queries, keys and values. window: a query sees the last so many tokens, its own among
    them; 0: all. Such steps have no plan.
    """

    def __init__(self, geometry: Geometry, q_heads: int, scale: float, like: Any, window: int = 0) -> None: ...
    def set_sinks(self, sinks: Any | None) -> None:
        """The logits of all steps to come, as `attend` takes them, which are copied; None for none."""
    def follow(
        self,
        options: object,
        plan: Step | None,
        table: Any,
        counts: Any,
        blocks: int,
        placement: Placement | None,
        tokens: int,
        steps: int,
        facts: list[tuple[Version, int]],
    ) -> None:
        """How the next steps are carried out. options: what they are asked; equal ones mean the same. plan: None where
        everything is read. table, counts: of the run, whose first `blocks` blocks are read; the last one takes the tokens,
        and its count grows with them. placement: of the run, which is copied. tokens: of the run. steps: how many may be
        taken. facts: versions with the values that they must have."""

    def take_tensors(self, tensor: type, dtype: object) -> None:
        """Take arrays of another type too: those of torch, in this dtype of its own."""

    def stop(self) -> None:
        """Refuse further steps."""

    def step(self, q: Any, k: Any, v: Any | None, options: object, start: object) -> Any | None:
        """Appends k [kv_heads, 1, head_dim] and v [kv_heads, 1, value_dim] and answers q [q_heads, 1, head_dim] by [q_heads, 1,
        value_dim] of its library. v: not looked at where tokens have no values of their own. start: the position of the token,
        or None. Returns None where the step is none that `follow` spoke of, an argument is
        wrong or a number not finite: then nothing was done."""

    def sample_next(self, in_steps: int, every: int) -> None:
        """Keep the query of the step after `in_steps` others, and then of every `every`-th; 0: of none."""

    def observe_next(self, asked: int, first: int, every: int) -> None:
        """Which queries are observed: the first `first` and every `every`-th of all, of which `asked` came before the next step;
        none where `asked` is negative. Those of plans without an observed search are only counted."""

    def keep_last(self, most: int) -> None:
        """Keep the last `most` queries and their answers, from now on until `stop`; 0: none."""

    def recent(self) -> tuple[bytes, bytes]:
        """The queries, [tokens, q_heads, head_dim], and the answers, [tokens, q_heads, value_dim], that are kept, their bits, the
        oldest first. They go on being kept."""

    @property
    def full(self) -> bool:
        """Whether what was kept of steps has to be taken before there are more."""

    @property
    def halted(self) -> bool:
        """Whether no more steps may be taken, or not before what was kept is."""

    @property
    def left(self) -> int:
        """How many more steps may be taken."""

    @property
    def threads(self) -> int:
        """How many threads a step uses."""

    last_ns: int
    """The nanoseconds that the kernels of the layer's last attend took, native or not."""

    def take_observations(self) -> list[tuple[int, bytes, bytes]]:
        """What observed queries showed since the last time, as `Step.observations` has it."""

    def take_totals(self) -> StepTotals:
        """What was done since the last time."""

    def take_samples(self) -> list[tuple[int, bytes]]:
        """The queries kept since the last time, their bits, and how many steps came before each since `take_totals`."""

    def last_query(self) -> bytes:
        """The last query, [q_heads, head_dim], its bits."""

def take_steps(
    layers: list[LayerSteps],
    q: Any,
    k: Any,
    v: Any,
    options: object,
    starts: Sequence[int] | None,
    out: Any,
    shared_tokens_min: int,
) -> bool:
    """A step of each layer, all of them or none: of searches that ask one index for the same one is made, and blocks of so many
    tokens that several read whole are read once. q, k, v, starts: of each layer as `LayerSteps.step` takes it; the answers go to
    out [layers, q_heads, 1, head_dim]. False where one is refused as `LayerSteps.step` would: then nothing was done. Raises
    ValueError for a layer that comes twice, and for layers of several models."""

def crc32c(table: Any, nbytes: int, out: Any) -> None:
    """The CRC-32C (Castagnoli) of the nbytes bytes at each address of table, uint64 [n], into out, uint32 [n]. On one thread."""

class ReadWay(enum.Enum):
    """Who carries many reads out: the system, from a queue of up to 128 (io_uring), or up to 16 threads that wait for theirs."""

    ring = 0
    threads = 1

def read_pages(file: int, offsets: Any, addresses: Any, way: ReadWay = ...) -> None:
    """Fills pages of 4,096 bytes at addresses, uint64 [n], from the bytes of a file at offsets, uint64 [n]; file is a descriptor,
    addresses and offsets are multiples of 4,096 where it was opened past the page cache. Pages that stand beside each other in
    both, in this order, are one read. ring falls back to threads where the system has no io_uring, or forbids it. Raises OSError,
    EIO for a file that ends before; then the contents of the pages are unspecified."""

class PagePool:
    """What the pages of all layers take together that do not fit into memory."""

    def __init__(self) -> None: ...
    @property
    def nbytes(self) -> int:
        """The bytes of pages that are there or being read."""

    def set_limit(self, nbytes: int) -> int:
        """Sets the bytes that pages may take, at least those that they take already. Returns how many."""

    def shrink(self, nbytes: int) -> int:
        """Has pages go that take so many bytes, of layers that are not pinned. Returns the bytes that went."""

class LayerPages:
    """The pages of one layer, in memory of whole pages from the address `begin` on: whoever searches a pinned layer, or reads it
    whole, brings in what is absent, and raises OSError where that fails: ENOBUFS where the pool has no room, EBADMSG where the
    file does not hold what was written, each with the file's name.

    The layer is read in units of unit_nbytes from the file's bytes [at, at + nbytes). sums: uint32, the CRC-32C of each unit, or
    of each sum_nbytes of the only one. layer, block_nbytes: for messages. read: called by any thread, with the GIL, to fill pages
    of 4,096 bytes at addresses from offsets of what is no file, uint64 [n] each; an OSError of it goes on without a name.
    """

    def __init__(
        self,
        pool: PagePool,
        begin: int,
        nbytes: int,
        unit_nbytes: int,
        file: str,
        file_nbytes: int,
        at: int,
        layer: int,
        block_nbytes: int,
        sum_nbytes: int,
        sums: Any,
        read: Callable[[Any, Any], None] | None = None,
    ) -> None: ...
    def prefer(self, units: Any) -> None:
        """Units, int32 `[n]`, that go only once nothing else can go of any layer that nobody reads."""

    def pin(self) -> None:
        """Nothing of it goes until as many `unpin`."""

    def unpin(self) -> None: ...
    def take_all(self) -> bool:
        """Takes the room of all that is absent, which `read` reads. False where there is no room."""

    def read(self) -> None:
        """Reads what `take_all` took; where that fails, what was taken is absent again. Raises OSError."""

    def give_up(self) -> None:
        """Gives the room back that `take_all` took, where it was not read."""

    def discard(self, preferred_too: bool = True) -> None:
        """Has everything go, or everything but what is preferred; nobody reads it."""

    def leave(self) -> None:
        """The same for good: the memory is given back."""

    @property
    def full(self) -> bool:
        """Whether everything is there."""

    @property
    def nbytes(self) -> int:
        """The bytes that are there or being read."""

    @property
    def missing_nbytes(self) -> int:
        """The bytes of the others."""

    @property
    def preferred_nbytes(self) -> int:
        """The bytes that are there or being read of what is preferred."""

    @property
    def waits(self) -> tuple[int, int, float]:
        """The pages that searches had read, in how many batches, and the seconds that they waited, each by itself."""

def read_blocks(geometry: Geometry, table: Any) -> int:
    """Reads every byte of the blocks, on all threads, and returns the xor of their 64-bit words: memory's own speed."""

def isa() -> str:
    """The instruction set in use: KVDB_ISA from the environment, or the best of `isas()`."""

def isas() -> list[str]:
    """What this machine can run, of amx, avx512_bf16, avx512, avx2, neon, portable; best first."""

def emulated_isas() -> list[str]:
    """Those that this machine can emulate, for tests: amx_emulated is amx with the arithmetic of its tiles in C++."""

def set_isa(name: str) -> None:
    """Uses another instruction set from now on, for every operation of the whole process. Raises ValueError."""

def variants() -> list[str]:
    """The instruction sets among which an operation may choose, best first: `isa()` and those below it, without portable code
    unless it is all there is."""

def kernels() -> dict[str, str]:
    """The instruction set that each operation (decode, prefill, scan, gather) uses."""

def set_kernels(operation: str, isa: str) -> None:
    """Uses another instruction set, not better than `isa()`, for one operation of the whole process. Raises ValueError."""

def processor_family() -> str:
    """The processor's family in the table of what is fastest where nothing was measured; "" where it has none."""

def kernels_of(vendor: str, family: int, model: int, avx512_bf16: bool) -> tuple[str, dict[str, str]]:
    """The row of that table for any processor: its name, and the instruction set that each operation uses on it; "" and nothing
    where it has none. vendor: as CPUID spells it, `GenuineIntel`. family, model: of CPUID's leaf 1, extended."""

def threads() -> int:
    """How many threads one call may use: KVDB_THREADS from the environment, or the CPUs this process may use."""

def set_threads(n: int) -> None:
    """From 1 to 1024, from now on, for the whole process. Raises ValueError."""

def spin_us() -> int:
    """Microseconds that a thread without work spins before it sleeps."""

def set_spin_us(microseconds: int) -> None:
    """From 0 to 1,000,000, from now on, for the whole process. Raises ValueError."""

def usable_cpus() -> int:
    """The processors of this process's affinity, but no more than its CPU quota is worth, rounded down, and at least one."""

def cpu_quota(root: str = "") -> float:
    """The smallest CPU quota of the control groups (version 2 or 1) that this process is in, in processors; inf without one.
    root: the folder below which proc/ and sys/ lie, "" for the system's."""

def memory_nodes(root: str = "") -> list[tuple[int, list[int]]]:
    """The memory nodes of the machine and the processors of each that this thread may use, of nodes that have some; empty where
    the system does not say. root: the folder below which sys/ lies, "" for the system's."""

def set_memory_nodes(nodes: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Sets the nodes, as `memory_nodes` returns them, over which memory and new threads are spread from now on, for the whole
    process. With fewer than two nothing is. Raises ValueError."""

def interleave(address: int, nbytes: int) -> bool:
    """Ask for memory that nobody has touched yet from all memory nodes in turns, page by page. Whether the system took it; False
    where there is but one node."""

def pool_counters() -> list[tuple[int, int, int, int]]:
    """For the callers together and each worker of this thread's pool: how many calls of several threads it took part in, items of
    these, how often it was woken from sleep, and how often it met work while it spun."""

def leave_processor() -> None:
    """From now on, attends of this thread are for another process of this machine, which has an answer sooner if it waits awake:
    a short attend leaves a processor to it."""

def work_in_background() -> None:
    """From now on, calls from this thread are helped by threads of their own, which have the priority of those that call so."""

class SharedRing:
    """One end of two rings of fixed-size messages between two processes: requests of 128 bytes to the server, and answers of 64
    back. One thread sends and receives; `stop` may come from another."""

    def __init__(self, region: Any, is_server: bool) -> None:
        """region: uint8 `[n]`, memory that both processes map, of RING_BYTES at least and zeros at first. Raises ValueError."""

    def send(self, message: bytes) -> bool:
        """Send a message. False where a client has RING_SLOTS requests without an answer. Raises ValueError for another size."""

    def receive(self, seconds: float) -> bytes | None:
        """Wait so long for a message; None where none came, or `stop` was called. Raises ValueError where the other end claims to
        have sent more than there are slots."""

    def stop(self) -> None:
        """End the wait at this end, and every later one."""

    @property
    def times_us(self) -> tuple[float, float, float]:
        """What the last answer said: how long it waited, was carried out, and was in the kernel."""

class SharedStep:
    """The attends of one token through a ring that are of one session, layer and options, and thus of one message."""

    def __init__(
        self,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: Dtype,
        like: Any,
        message: bytes,
        arena: int,
        region_bytes: int,
        value_dim: int | None = None,
        values_in_keys: bool = False,
    ) -> None:
        """like: an array of numpy of the dtype. arena: where the message lies in a region, before the arrays; of v there are no
        bytes where tokens have no values of their own. Raises ValueError where a region of so many bytes has no room."""

    def take_tensors(self, tensor: type, dtype: object) -> None:
        """Take arrays of another type too: those of torch, in this dtype of its own."""

    def attend(
        self, ring: SharedRing, generation: int, number: int, q: Any, k: Any, v: Any, start: object, seconds: float, wait: float
    ) -> Any | bytes | None:
        """Send one token's q and k, `[heads, 1, head_dim]`, and v, `[heads, 1, value_dim]`, and wait so long for the answer,
        which is returned, of the library that q is of. None for arrays of another form, or a start that is no int; then nothing
        was sent. The bytes of the request where the answer is anything but what was asked for, and is the next that `ring`
        receives. seconds: how long the caller waits, for the server. Raises ValueError where too many requests are under way."""

class SharedCalls:
    """A server's end of a ring, whose client asks the same again and again."""

    def __init__(self, ring: SharedRing, generation: int) -> None: ...
    def receive(self, seconds: float) -> Any | bytes | None:
        """Wait so long for a request: what was learned with one like it, or its bytes, or None where none came. Raises what
        `SharedRing.receive` raises."""

    def learn(self, message: bytes, payload: object) -> None:
        """From now on, requests like the last, of this message, are received as this; they may be of another number and start."""

    def forget(self) -> None:
        """Forget what was learned."""

    def answer(
        self, reply_nbytes: int, queue_us: float = 0.0, engine_us: float = 0.0, kernel_us: float = 0.0, busy: int = 0
    ) -> None:
        """Answer the last request. busy: see `kvdb.rpc.shared_records.SharedAnswer`."""

    @property
    def answered(self) -> bool:
        """Whether `answer` has answered the last request."""

    @property
    def start(self) -> int | None:
        """Of the last request."""

    @property
    def last(self) -> bytes:
        """The last request, as it came."""

RING_BYTES: int
RING_SLOTS: int
