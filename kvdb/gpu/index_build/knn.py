"""Exact nearest neighbours by matrix products, tile by tile. No tile is larger than its budget, whatever the number of keys."""

import math
from collections.abc import Callable

import torch

GROUP = 32
"""Scores in a group. Selection first looks at the largest of each group alone: all of the k largest scores lie in the k groups
with the largest maxima."""
COLUMNS, ROWS = 131_072, 4096
"""The most keys and queries in one tile."""
PIECES = 3
"""Half-precision numbers whose sum holds a float32."""
PIECE_SCALE = 256.0
"""The factor by which a piece is divided to stay below 65,504, the largest float16."""
LENGTH_CHANNELS = 8
"""Channels that operands have beside those of the keys, PIECES of them used: tensor cores like multiples of 8."""

KnnSearch = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Takes queries `[m, width]`, keys `[n, width]` of the same dtype, and k. Returns the k largest q.k of each query, float32
`[m, k]`, largest first, and the numbers of their keys, int64 `[m, k]`."""


def knn_search(queries: torch.Tensor, keys: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A KnnSearch by matrix products, which are float32 on the CPU."""
    return _largest_of(_product(queries, keys), k)


def largest_products(
    keys: torch.Tensor, queries: torch.Tensor, k: int, tile_nbytes: int, tile_search: KnnSearch = knn_search
) -> torch.Tensor:
    """The keys `[n, head_dim]` with the largest q.k for each of the queries `[m, head_dim]`: int32 `[m, min(k, n)]`, largest
    first.

    Keys and queries lie on one device. Products in the same half precision are summed in float32 where the device can; all others
    are computed in float32. tile_nbytes: bytes of scores that may exist at once.
    """
    if keys.dtype != queries.dtype or not _sums_wide(keys):
        keys, queries = keys.float(), queries.float()
    n, k = len(keys), min(k, len(keys))
    out = torch.empty((len(queries), k), dtype=torch.int32, device=keys.device)
    for begin in range(0, len(queries), step := _rows(n, tile_nbytes)):
        best = RunningTopK(k)
        best.search(queries[begin : begin + step], keys, tile_search)
        out[begin : begin + step] = best.tokens
    return out


def nearest_before(keys: torch.Tensor, k: int, tile_nbytes: int, tile_search: KnnSearch = knn_search) -> torch.Tensor:
    """The nearest keys before each of the keys `[n, head_dim]` by L2 distance: int32 `[n, k]`, nearest first, then -1.

    These are the neighbours that insertion one by one sees, at half the cost of all neighbours. The nearest have the largest
    a.b - |b| ** 2 / 2: the lengths go into the product as channels of their own. tile_nbytes: as for `largest_products`.
    """
    n, begin = len(keys), 0
    rows, columns = _with_lengths(keys if _sums_wide(keys) else keys.float())
    out = torch.full((n, k), -1, dtype=torch.int32, device=keys.device)
    while begin < n:
        end = min(begin + _rows_behind(begin, tile_nbytes), n)
        best = RunningTopK(min(k, end))
        best.search(rows[begin:end], columns[:begin], tile_search)
        scores = _product(rows[begin:end], columns[begin:end])
        own = torch.arange(end - begin, device=keys.device)
        scores.masked_fill_(own >= own[:, None], -torch.inf)
        best.merge(*_largest_of(scores, min(k, end - begin)), begin)
        out[begin:end, : best.tokens.shape[1]] = torch.where(best.scores > -torch.inf, best.tokens, -1)
        begin = end
    return out


class RunningTopK:
    """The k largest scores of some rows over the tiles seen so far: scores float32 `[rows, k]`, largest first, and their tokens,
    int32."""

    def __init__(self, k: int) -> None:
        self._k = k
        self.scores = torch.empty(0)
        self.tokens = torch.empty(0, dtype=torch.int32)

    def search(self, rows: torch.Tensor, columns: torch.Tensor, tile_search: KnnSearch) -> None:
        """Search all columns, COLUMNS at a time."""
        for begin in range(0, len(columns), COLUMNS):
            tile = columns[begin : begin + COLUMNS]
            self.merge(*tile_search(rows, tile, min(self._k, len(tile))), begin)

    def merge(self, scores: torch.Tensor, at: torch.Tensor, column: int) -> None:
        """Take in the scores and places that a KnnSearch found in a tile that begins at `column`."""
        tokens = (at + column).to(torch.int32)
        if self.tokens.numel():
            scores, tokens = torch.cat([self.scores, scores], 1), torch.cat([self.tokens, tokens], 1)
            scores, at = scores.topk(min(self._k, scores.shape[1]), dim=1)
            tokens = tokens.gather(1, at)
        self.scores, self.tokens = scores, tokens


def _largest_of(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row, largest first, and their places.

    Selecting among all scores takes several passes over them. Here one pass finds the largest of each group, and the k groups
    with the largest maxima are all that is selected from.
    """
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
    """Operands `[n, head_dim + LENGTH_CHANNELS]` whose products are a.b - |b| ** 2 / 2. In half precision a length is the sum of
    PIECES numbers."""
    lengths = keys.float().square().sum(1) / (-2 * PIECE_SCALE)
    rows, columns = keys.new_zeros((len(keys), LENGTH_CHANNELS)), keys.new_zeros((len(keys), LENGTH_CHANNELS))
    for piece in range(PIECES):
        rows[:, piece] = PIECE_SCALE
        columns[:, piece] = lengths
        lengths = lengths - columns[:, piece].float()
    return torch.cat([keys, rows], 1), torch.cat([keys, columns], 1)


def _product(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Products of all rows with all columns, float32 `[m, n]`."""
    if rows.dtype == torch.float32:
        return torch.mm(rows, columns.T)
    return torch.mm(rows, columns.T, out_dtype=torch.float32)


def _sums_wide(keys: torch.Tensor) -> bool:
    """Whether products of these keys are summed and returned in float32: always for float32, on cards for half precision since
    torch 2.8."""
    if keys.dtype == torch.float32 or keys.device.type == "cpu":
        return keys.dtype == torch.float32
    try:
        small = keys.new_zeros((16, 16))
        torch.mm(small, small, out_dtype=torch.float32)
    except (TypeError, NotImplementedError):
        return False
    return True


def _rows(n: int, tile_nbytes: int) -> int:
    """Rows of a tile that is as wide as n keys."""
    return min(max(tile_nbytes // (4 * max(min(n, COLUMNS), 1)), 1), ROWS)


def _rows_behind(begin: int, tile_nbytes: int) -> int:
    """Rows of a tile that is as wide as the `begin` keys before it and its own rows. They are whole groups, so that the next tile
    begins with one."""
    scores = tile_nbytes // 4
    rows = min(max((math.isqrt(begin * begin + 4 * scores) - begin) // 2, scores // COLUMNS, 1), ROWS)
    return rows - rows % GROUP if rows > GROUP else rows
