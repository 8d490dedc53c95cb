"""The C++ kernels that search keys in their blocks, on the CPU.

Every array is C-contiguous and on the CPU. Block addresses are trusted: the caller keeps the memory alive and large enough.
Everything else is checked: a wrong value raises ValueError, and an argument of another type or dtype TypeError. Every call
releases the GIL, may come from any thread, and runs on up to `threads()` threads.
"""

import enum
from collections.abc import Sequence
from typing import Any

class Dtype(enum.Enum):
    """The element type of a block."""

    float32 = 0
    float16 = 1
    bfloat16 = 2

class Blocks:
    """`tokens` tokens of one layer in blocks of keys, [kv_heads][block_size][head_dim], and then values, [kv_heads][block_size]
    [value_dim], at the addresses `table`, uint64 [blocks]. value_dim: head_dim for None. values_in_keys: there are keys alone,
    and a value is the first value_dim numbers of its key."""

    def __init__(
        self,
        dtype: Dtype,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        table: Any,
        tokens: int,
        value_dim: int | None = None,
        values_in_keys: bool = False,
    ) -> None: ...

class Queries:
    """Queries q float32 [q_heads, n, head_dim]; query i sees tokens [begin[i], end[i]), int64 [n], except those whose bit in
    `hidden`, uint64 [ceil(tokens / 64)], is set. floor: float32 [q_heads, n], the largest q.k elsewhere, -inf for none.
    active_heads: bool [kv_heads], the heads whose queries a search answers, None for all."""

    def __init__(
        self, q: Any, kv_heads: int, begin: Any, end: Any, floor: Any, hidden: Any | None = None, active_heads: Any | None = None
    ) -> None: ...

def score(blocks: Blocks, queries: Queries, offsets: Any, ids: Any, scores: Any) -> None:
    """scores float32 [count]: q.k of each row with its own tokens, ids[offsets[row] : offsets[row + 1]], ids int32 [count],
    offsets int64 [q_heads * n + 1]. Row h * n + i is query i of head h. Sums are float32."""

def read_keys(blocks: Blocks, kv_head: int, begin: int, out: Any) -> None:
    """Keys [begin, begin + len(out)) of a KV head into out, float32 [count, head_dim]."""

def copy_keys(blocks: Blocks, kv_head: int, begin: int, out: Any) -> None:
    """The keys of `read_keys` in their stored dtype, into out, uint8 [count, bytes of a key]."""

def read_values(blocks: Blocks, kv_head: int, begin: int, out: Any) -> None:
    """Values of a KV head into out, float32 [count, value_dim], as `read_keys` does with keys."""

SearchFields = tuple[Any, Any, Any, int, int, Any, Any, Any, Any]
"""What a search returns: the first nine fields of `indexes.base.SearchResult`, those of each row flat. The tail is empty unless
it is estimated, and dense is uint8."""

CHUNK: int
"""The number of tokens that are coded together."""

class Flat:
    """Codes of chunks of keys, in arrays that the caller owns, by name, `[chunks, kv_heads, ...]`; `indexes.flat.Flat.shapes`
    lists them."""

    def __init__(self, chunks: int, kv_heads: int, head_dim: int, arrays: dict[str, Any]) -> None: ...
    def insert(self, blocks: Blocks, coded: int) -> None:
        """Codes the keys of tokens [coded, tokens)."""

    def verify(self, blocks: Blocks) -> int:
        """The number of keys that lie outside of the bounds of their codes."""

    def search(
        self, blocks: Blocks, queries: Queries, beta: float, k: int, scale: float, give_up: bool
    ) -> tuple[SearchFields, Any]:
        """The tokens within beta of each row's largest q.k or, with k > 0, the k largest; and caps, float32 [rows]: upper bounds
        of q.k over the visible tokens that were not found."""

    def searcher(self, blocks: Blocks, beta: float, k: int, scale: float) -> Any:
        """`search` with give_up, as a capsule that `kvdb._native.Step` takes. It keeps the codes and the table alive."""

    def missed_mass(
        self, blocks: Blocks, queries: Queries, offsets: Any, ids: Any, caps: Any, scale: float, missed: Any, bound: Any
    ) -> None:
        """Writes missed and bound, float32 [q_heads, n]: the missed mass and its bound, computed from the codes of all visible
        tokens that are not among a row's ids. Rows with a cap of +inf are left as they are."""

class Quantized:
    """Codes of four bits of chunks of keys and values, in arrays that the caller owns, by name, `[chunks, kv_heads, ...]`;
    `indexes.quantized.Quantized.shapes` lists them."""

    def __init__(self, chunks: int, kv_heads: int, head_dim: int, arrays: dict[str, Any]) -> None: ...
    def insert(self, blocks: Blocks, coded: int) -> None:
        """Codes the tokens from the chunk on that holds token `coded`."""

    def verify(self, blocks: Blocks) -> int:
        """The number of chunks, over all KV heads, whose codes are not those of their keys and values."""

    def search(
        self,
        blocks: Blocks,
        queries: Queries,
        retrieval: int,
        parameter: float,
        scale: float,
        margin: float,
        outside: Any,
        tail: bool,
        tight: bool,
        give_up: bool,
    ) -> SearchFields:
        """retrieval, parameter: see `coarse_search`. margin: the share of the bound on a code's error that a token is given."""

    def searcher(self, blocks: Blocks, retrieval: int, parameter: float, scale: float, margin: float, tail: bool) -> Any:
        """`search` with give_up, and not tight, as a capsule that `kvdb._native.Step` takes. It keeps codes and table alive."""

QUANTIZED_RUNS: int
"""The number of runs of tokens, in a chunk, that share their bounds."""

class CoarsePages:
    """Pages of segments of equal length, in arrays that the caller owns; `indexes/coarse/layout.py` lists them.

    fields: begin, segments, tokens of a segment, pages of a segment, kv_heads, head_dim, box, page_tokens; and value_dim, where
    it is another.
    """

    def __init__(self, fields: dict[str, int], arrays: dict[str, Any]) -> None: ...
    def check(self) -> None:
        """Raises ValueError for pages with members that are not tokens of their segment."""

def coarse_build(
    blocks: Blocks, pages: CoarsePages, clusters: int, iterations: int, far: float, nearest: Any | None = None
) -> None:
    """Fills the arrays of `pages`. clusters: the number of clusters of each segment, where pages are clusters. iterations: rounds
    of k-means, where the share `far` of the centroids starts at the keys farthest from the others. nearest: uint16 [segments,
    kv_heads, tokens], the clusters of the tokens if they are known already; k-means is skipped then."""

def coarse_search(
    blocks: Blocks,
    pages: list[CoarsePages],
    queries: Queries,
    retrieval: int,
    parameter: float,
    scale: float,
    margin: float,
    exact: bool,
    outside: Any,
    tail: bool,
    tight: bool,
    give_up: bool,
) -> SearchFields:
    """retrieval: 0 for everything, 1 for the range `parameter` below the maximum, 2 for the `parameter` largest, 3 for the share
    `parameter` of the mass. margin: the share of its reach that a page is given. exact: whether a page is never given less,
    however much is read.
    """

def coarse_searcher(
    blocks: Blocks,
    pages: list[CoarsePages],
    retrieval: int,
    parameter: float,
    scale: float,
    margin: float,
    exact: bool,
    tail: bool,
) -> Any:
    """`coarse_search` with give_up, and not tight, as a capsule that `kvdb._native.Step` takes. It keeps pages and table
    alive."""

def coarse_verify(blocks: Blocks, pages: CoarsePages) -> bool:
    """Whether the arrays of `pages` equal those computed anew from the blocks."""

def isa() -> str:
    """The instruction set in use: KVDB_ISA from the environment, or the best of `isas()`."""

def isas() -> list[str]:
    """The instruction sets that this machine can run, among amx, avx512_bf16, avx512, avx2, neon and portable; best first."""

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
    """The number of threads that one call may use: KVDB_THREADS from the environment, or the number of CPUs of this process."""

def set_threads(n: int) -> None:
    """Sets the number of threads, 1 to 1024, for the whole process. Raises ValueError."""

def spin_us() -> int:
    """Microseconds that a thread without work spins before it sleeps."""

def set_spin_us(microseconds: int) -> None:
    """Sets the microseconds of spinning, 0 to 1,000,000, for the whole process. Raises ValueError."""

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

def work_in_background() -> None:
    """Makes calls from this thread use the background pool, whose threads have the priority of the thread that first calls so."""

class Graph:
    """A graph over the keys of each KV head. codes: uint8 [kv_heads, capacity, head_dim rounded up to 64]; residual: float32
    [kv_heads, capacity]; links: uint32 [kv_heads, capacity, degree], where a list ends at the first entry that is not a token;
    low, step: float32 [kv_heads, head_dim], a key is about low + step * code. The arrays belong to the caller, and are written
    only by the functions that say so."""

    def __init__(self, codes: Any, residual: Any, links: Any, low: Any, step: Any, tokens: int) -> None: ...

def graph_encode(graph: Graph, blocks: Blocks, kv_head: int, begin: int) -> None:
    """Writes codes and residual of the tokens from `begin` on."""

def graph_insert(graph: Graph, blocks: Blocks, begin: int, width: int, parents: Any) -> None:
    """Writes links of the tokens from `begin` on, and links back to them; `width` candidates are considered for each. parents:
    the parents that `graph_repair` wrote for earlier tokens; those of the new tokens are added."""

def graph_connect(graph: Graph, blocks: Blocks, kv_head: int, pivots: Any, offsets: Any, candidates: Any) -> None:
    """Links pivot i of int32 [count] to those of candidates[offsets[i] : offsets[i + 1]] that are closer to it than to its other
    links."""

def graph_choose_links(
    graph: Graph, blocks: Blocks, kv_head: int, begin: int, offsets: Any, candidates: Any, chosen: Any
) -> None:
    """Writes chosen, uint32 [count, most]: for each token begin + i, the candidates[offsets[i] : offsets[i + 1]] that HNSW's rule
    keeps, or all of them where there are at most `most`; the nearest stands last."""

def graph_repair(graph: Graph, parents: Any) -> int:
    """Adds links so that every token can be reached from token 0; returns how many tokens could not be, over all heads. Writes
    parents, uint32 [kv_heads, capacity]: for each token, the token before it on a path from token 0."""

def graph_search(
    graph: Graph,
    blocks: Blocks,
    queries: Queries,
    probes: Any,
    probe_codes: Any,
    random: int,
    outliers: Any,
    outlier_codes: Any,
    outlier_residual: Any,
    radius: Any,
    *,
    beta: float,
    k: int,
    scale: float,
    listed: bool,
    share: bool,
    give_up: bool,
    patience: int,
    least: int,
    slack: float,
    dense_share: float,
    budget: float,
) -> SearchFields:
    """The tokens within beta of the largest q.k, or the k best where k > 0.

    probes: int32 [kv_heads, count], where searches begin, the first `random` of them drawn at random; probe_codes: uint8
    [kv_heads, count, stride]. outliers: int32 [kv_heads, any], tokens that their codes describe
    badly, -1 for none; outlier_codes, outlier_residual: their codes and the lengths of what these leave. radius: float32
    [kv_heads], the largest residual. The rest are those of `indexes.hnsw.settings.Settings`.
    """

def graph_searcher(
    graph: Graph,
    blocks: Blocks,
    probes: Any,
    probe_codes: Any,
    random: int,
    outliers: Any,
    outlier_codes: Any,
    outlier_residual: Any,
    radius: Any,
    *,
    beta: float,
    k: int,
    scale: float,
    patience: int,
    least: int,
    slack: float,
    dense_share: float,
    budget: float,
) -> Any:
    """`graph_search` with give_up and share, as a capsule that `kvdb._native.Step` takes. It keeps all arrays alive."""

def graph_bound(graph: Graph, blocks: Blocks, queries: Queries, scale: float, offsets: Any, ids: Any, bound: Any) -> None:
    """bound float32 [q_heads, n]: the log of the sum of exp(scale * q.k) over visible tokens not found, at most. Reads all."""

def graph_verify(graph: Graph, kv_head: int) -> int:
    """The number of tokens that cannot be reached from token 0."""

def python_searcher(blocks: Blocks, index: int, asked: Sequence[float], search: Any) -> Any:
    """A searcher that calls `search` with q, begin, end, floor, outside, hidden and active_heads, as `Queries` has them; the
    fields of a `SearchResult` that it returns are checked. index: a number that no other index has. asked: numbers that say what
    for, the same for the same."""
