"""Exact neighbours by matrix products, tile by tile: no tile is larger than its budget, whatever the number of keys."""

import math
from collections.abc import Callable

import torch

GROUP = 32
"""Scores of which first only the largest is looked at: every one of the k largest is in one of the k groups with the largest."""
COLUMNS, ROWS = 131_072, 4096
"""Keys and queries of one tile, at most."""
PIECES = 3
"""Of half precision, that hold a float32."""
PIECE_SCALE = 256.0
"""What a piece stands for, times as much; float16 ends at 65,504."""
EXTRA = 8
"""Channels of an operand beside those of the keys: tensor cores like multiples of 8."""

Search = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Of queries `[m, width]` and keys `[n, width]` of one dtype: float32 and int64 `[m, k]`, the k largest q.k, largest first, and
of which keys."""


def search(queries: torch.Tensor, keys: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See Search. On the CPU, in float32."""
    return _largest_of(_product(queries, keys), k)


def largest(keys: torch.Tensor, queries: torch.Tensor, k: int, tile_nbytes: int, of_tile: Search = search) -> torch.Tensor:
    """int32 `[m, min(k, n)]`: of `queries`, `[m, head_dim]`, the rows of `keys`, `[n, head_dim]`, with the largest q.k, largest
    first. Both on one device; products of one half precision are summed in float32 there, others are taken in float32.

    tile_nbytes: of scores, at once.
    """
    if keys.dtype != queries.dtype or not _sums_wide(keys):
        keys, queries = keys.float(), queries.float()
    n, k = len(keys), min(k, len(keys))
    out = torch.empty((len(queries), k), dtype=torch.int32, device=keys.device)
    for begin in range(0, len(queries), step := _rows(n, tile_nbytes)):
        best = Best(k)
        best.search(queries[begin : begin + step], keys, of_tile)
        out[begin : begin + step] = best.tokens
    return out


def nearest_before(keys: torch.Tensor, k: int, tile_nbytes: int, of_tile: Search = search) -> torch.Tensor:
    """int32 `[n, k]`: of each of `keys`, `[n, head_dim]`, the nearest of those before it, by L2 distance, nearest first, -1
    behind the last. As an insertion one by one sees them, and for half of the work that all neighbours take.

    The nearest have the largest a.b - |b| ** 2 / 2: the lengths go into the product as channels of their own.
    """
    n, begin = len(keys), 0
    rows, columns = _with_lengths(keys if _sums_wide(keys) else keys.float())
    out = torch.full((n, k), -1, dtype=torch.int32, device=keys.device)
    while begin < n:
        end = min(begin + _rows_behind(begin, tile_nbytes), n)
        best = Best(min(k, end))
        best.search(rows[begin:end], columns[:begin], of_tile)
        scores = _product(rows[begin:end], columns[begin:end])
        own = torch.arange(end - begin, device=keys.device)
        scores.masked_fill_(own >= own[:, None], -torch.inf)
        best.take(*_largest_of(scores, min(k, end - begin)), begin)
        out[begin:end, : best.tokens.shape[1]] = torch.where(best.scores > -torch.inf, best.tokens, -1)
        begin = end
    return out


class Best:
    """The k largest of the tiles of some rows so far, largest first. scores: float32 `[rows, k]`; tokens: int32, theirs."""

    def __init__(self, k: int) -> None:
        self._k = k
        self.scores = torch.empty(0)
        self.tokens = torch.empty(0, dtype=torch.int32)

    def search(self, rows: torch.Tensor, columns: torch.Tensor, of_tile: Search) -> None:
        """Take all columns, COLUMNS at a time."""
        for begin in range(0, len(columns), COLUMNS):
            tile = columns[begin : begin + COLUMNS]
            self.take(*of_tile(rows, tile, min(self._k, len(tile))), begin)

    def take(self, scores: torch.Tensor, at: torch.Tensor, column: int) -> None:
        """Those of a tile that begins at `column`, as a Search gives them."""
        tokens = (at + column).to(torch.int32)
        if self.tokens.numel():
            scores, tokens = torch.cat([self.scores, scores], 1), torch.cat([self.tokens, tokens], 1)
            scores, at = scores.topk(min(self._k, scores.shape[1]), dim=1)
            tokens = tokens.gather(1, at)
        self.scores, self.tokens = scores, tokens


def _largest_of(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row, largest first, and where they are. Selecting among all takes several passes over them; here one
    pass finds the largest of each group, and the groups of the k largest of these are all that is selected from."""
    rows, n = scores.shape
    groups = n // GROUP
    if groups <= 2 * k:
        values, at = scores.topk(k, dim=1)
        return values, at
    whole = groups * GROUP
    grouped = scores[:, :whole].unflatten(1, (groups, GROUP))
    chosen = grouped.amax(2).topk(k, dim=1, sorted=False).indices
    within = grouped.gather(1, chosen[:, :, None].expand(rows, k, GROUP)).flatten(1)
    places = (chosen[:, :, None] * GROUP + torch.arange(GROUP, device=scores.device)).flatten(1)
    if whole < n:
        within = torch.cat([within, scores[:, whole:]], 1)
        places = torch.cat([places, torch.arange(whole, n, device=scores.device).expand(rows, n - whole)], 1)
    values, at = within.topk(k, dim=1)
    return values, places.gather(1, at)


def _with_lengths(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands `[n, head_dim + EXTRA]` whose products are a.b - |b| ** 2 / 2. In half precision a length is a sum of PIECES."""
    lengths = keys.float().square().sum(1) / (-2 * PIECE_SCALE)
    rows, columns = keys.new_zeros((len(keys), EXTRA)), keys.new_zeros((len(keys), EXTRA))
    for piece in range(PIECES):
        rows[:, piece] = PIECE_SCALE
        columns[:, piece] = lengths
        lengths = lengths - columns[:, piece].float()
    return torch.cat([keys, rows], 1), torch.cat([keys, columns], 1)


def _product(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`[m, n]`, in float32."""
    if rows.dtype == torch.float32:
        return torch.mm(rows, columns.T)
    return torch.mm(rows, columns.T, out_dtype=torch.float32)


def _sums_wide(keys: torch.Tensor) -> bool:
    """Whether products in the keys' precision are summed and come out in float32: those of half precision on cards, since torch
    2.8, and those of float32."""
    if keys.dtype == torch.float32 or keys.device.type == "cpu":
        return keys.dtype == torch.float32
    try:
        small = keys.new_zeros((16, 16))
        torch.mm(small, small, out_dtype=torch.float32)
    except (TypeError, NotImplementedError):
        return False
    return True


def _rows(n: int, tile_nbytes: int) -> int:
    """Of a tile that is as wide as n keys."""
    return min(max(tile_nbytes // (4 * max(min(n, COLUMNS), 1)), 1), ROWS)


def _rows_behind(begin: int, tile_nbytes: int) -> int:
    """Of a tile that is as wide as the `begin` keys before it and its own; whole groups, so that the next begins at one."""
    scores = tile_nbytes // 4
    rows = min(max((math.isqrt(begin * begin + 4 * scores) - begin) // 2, scores // COLUMNS, 1), ROWS)
    return rows - rows % GROUP if rows > GROUP else rows
