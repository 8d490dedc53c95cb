"""K-means of many segments at once, with the same steps as `indexes/native/coarse/build.cpp` takes for one segment."""

import torch

from indexes.accelerate import KMeans


def cluster(keys: torch.Tensor, how: KMeans, tile_nbytes: int) -> torch.Tensor:
    """The clusters of keys `[segments, tokens, head_dim]` of any float dtype: int32 `[segments, tokens]`.

    Sums are products with the matrix that says which token is in which cluster. Unlike scattered additions they come out the same
    every time, so that equal keys give equal clusters. tile_nbytes: bytes of scores that may exist at once.
    """
    segments = len(keys)
    out = torch.empty(keys.shape[:2], dtype=torch.int32, device=keys.device)
    step = max(tile_nbytes // (4 * how.tokens * how.count), 1)
    for begin in range(0, segments, step):
        some = keys[begin : begin + step].float()
        out[begin : begin + step] = _Lloyd(some - some.mean(1, keepdim=True), how).run()
    return out


class _Lloyd:
    """Lloyd's algorithm on `keys`, float32 `[segments, tokens, head_dim]`."""

    def __init__(self, keys: torch.Tensor, how: KMeans) -> None:
        self._keys = keys
        self._how = how
        self._centers = keys[:, torch.from_numpy(how.seeds).to(keys.device)]
        self._nearest = torch.empty(0, dtype=torch.int64)
        self._scores = torch.empty(0)

    def run(self) -> torch.Tensor:
        """The cluster of every token: int64 `[segments, tokens]`."""
        far = self._how.count - self._centers.shape[1]
        for iteration in range(self._how.iterations):
            half_distances = self._assign()
            self._update()
            if iteration == 0 and far:
                self._start_far(half_distances, far)
        self._assign()
        return self._nearest

    def _assign(self) -> torch.Tensor:
        """Assign every token to its nearest centroid. Returns (distance ** 2 - length of the key ** 2) / 2, float32
        `[segments, tokens]`."""
        halves = self._centers.square().sum(2) / 2
        self._scores = torch.baddbmm(halves[:, None, :], self._keys, self._centers.transpose(1, 2), alpha=-1)
        least, self._nearest = self._scores.min(2)
        return least

    def _update(self) -> None:
        """Make centroids the means of their tokens; a centroid without tokens stays."""
        belongs = self._scores.zero_().scatter_(2, self._nearest[:, :, None], 1.0)
        counts = torch.zeros(self._centers.shape[:2], device=belongs.device)
        counts.scatter_add_(1, self._nearest, torch.ones_like(self._nearest, dtype=counts.dtype))
        means = torch.bmm(belongs.transpose(1, 2), self._keys) / counts.clamp(min=1)[:, :, None]
        self._centers = torch.where(counts[:, :, None] > 0, means, self._centers)

    def _start_far(self, half_distances: torch.Tensor, count: int) -> None:
        """Add `count` centroids at the tokens that are farthest from their own."""
        farthest = (self._keys.square().sum(2) + 2 * half_distances).topk(count, dim=1).indices
        more = self._keys.gather(1, farthest[:, :, None].expand(-1, -1, self._keys.shape[2]))
        self._centers = torch.cat([self._centers, more], 1)
