"""`KvdbStorage`: HiCache's storage backend over kvdb, loaded by SGLang by this module's path.

    --enable-hierarchical-cache --page-size 64 --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "kvdb", "module_path": "engine_adapter.sglang.storage", "class_name": "KvdbStorage",
        "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
        "target": "kvdb://127.0.0.1:7700", "spec": "spec.json"}'

target: what `kvdb.connect` takes. spec: the fields of the model's `kvdb.ModelSpec`, or the file that holds them, as
`ModelSpec.to_dict` gives them: it identifies the weights, which SGLang does not.
"""

import json
import logging
from collections.abc import Callable
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo
from torch import Tensor

import kvdb
from engine_adapter.contexts import ModelContexts
from engine_adapter.sglang.host_pages import HostPages
from engine_adapter.sglang.keys import chain, check_page_size
from engine_adapter.sglang.page_store import PageStore
from engine_adapter.sglang.sharing import SALT
from kvdb.errors import InvalidArgument, KvdbError, SpecMismatch, Unsupported

Given = TypeVar("Given")

LOG = logging.getLogger("kvdb.sglang")
FOLDER = SALT
ALONE = "page"
"""The salt of pages that were handed over without the keys before them."""


class KvdbStorage(HiCacheStorage):  # type: ignore[misc]  # without sglang its base is not known
    """Pages of KV in kvdb. A page that cannot be kept or found is one that SGLang computes again: failures of the database are
    said in a line of the log, and are never raised.

    Methods of the v1 interface know the keys before theirs, and keep whole prefixes. Those that take single keys keep each page
    by itself, as a context of its own: right, and slower.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        """kwargs: what SGLang's factory adds, which is nothing so far. Raises Unsupported for a model whose KV kvdb does not
        hold, and InvalidArgument for a configuration without a target or a spec."""
        if storage_config.is_mla_model:
            raise Unsupported("the model keeps latents in place of keys and values of heads, which kvdb does not hold")
        given = storage_config.extra_config or {}
        missing = [name for name in ("target", "spec") if name not in given]
        if missing:
            raise InvalidArgument(f"the backend's extra config lacks {' and '.join(missing)}; see {__name__}")
        self._salt = _share_of(storage_config)
        self._spec = _spec(given["spec"])
        self._folder = f"{FOLDER}/{self._spec.digest[:16]}"
        self._db = _or(None, lambda: kvdb.connect(given["target"]))
        self._chains: PageStore | None = None
        self._single: PageStore | None = None
        self._pages: HostPages | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Raises Unsupported for a pool whose layout is not known, and SpecMismatch for one of another model."""
        super().register_mem_pool_host(mem_pool_host)
        check_page_size(mem_pool_host.page_size)
        self._pages = pages = HostPages.of(mem_pool_host)
        held = (pages.layers, pages.kv_heads, pages.head_dim, str(pages.buffer.dtype).removeprefix("torch."))
        meant = (self._spec.layers, self._spec.kv_heads, self._spec.head_dim, self._spec.dtype)
        if held != meant:
            raise SpecMismatch(f"the host pool's layers, KV heads, head_dim and dtype are {held}; those of the spec are {meant}")
        if self._db is not None:
            contexts = ModelContexts(self._db, self._spec, self._folder)
            self._chains = PageStore(contexts, self._salt, pages)
            self._single = PageStore(contexts, f"{self._salt}/{ALONE}", pages)

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        before = _before(extra_info)
        if self._chains is None:
            return 0
        if before is None:
            return next((page for page, key in enumerate(keys) if not self.exists(key)), len(keys))
        store = self._chains
        return max(0, _or(0, lambda: store.count(chain(before, keys))) - len(before))

    def batch_get_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        before, store = _before(extra_info), self._chains
        if store is None:
            return [False] * len(keys)
        if before is None:
            return self._each(keys, host_indices, lambda single, key, indices: single.read([key], 0, indices) == 1)
        found = _or(0, lambda: store.read(chain(before, keys), len(before), host_indices))
        return [page < found for page in range(len(keys))]

    def batch_set_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        before, store = _before(extra_info), self._chains
        if store is None:
            return [False] * len(keys)
        if before is None:
            return self._each(keys, host_indices, lambda single, key, indices: single.write([key], 0, indices))
        return [_or(False, lambda: store.write(chain(before, keys), len(before), host_indices))] * len(keys)

    def get(self, key: str, target_location: Tensor | None = None, target_sizes: Any = None) -> Tensor | None:
        """The page of a key, flat, in the pool's layout: `target_location`, or a new tensor. None for one that is not stored."""
        if self._single is None or self._pages is None:
            return None
        store, pages = self._single, self._pages
        if target_location is None:
            numbers = 2 * pages.layers * pages.page_size * pages.kv_heads * pages.head_dim
            target_location = torch.empty(numbers, dtype=pages.buffer.dtype)
        page = target_location
        return page if _or(0, lambda: store.of(page).read([key], 0, torch.arange(pages.page_size))) else None

    def batch_get(
        self, keys: list[str], target_locations: list[Tensor] | None = None, target_sizes: Any = None
    ) -> list[Tensor | None]:
        return [self.get(key, target) for key, target in zip(keys, target_locations or repeat(None, len(keys)), strict=True)]

    def set(self, key: str, value: Tensor | None = None, target_location: Tensor | None = None, target_sizes: Any = None) -> bool:
        """Keep a flat page in the pool's layout, `value` or `target_location`. Returns whether it is stored now."""
        page = target_location if value is None else value
        if self._single is None or self._pages is None or page is None:
            return False
        store, tokens = self._single, torch.arange(self._pages.page_size)
        return _or(False, lambda: store.of(page).write([key], 0, tokens))

    def batch_set(
        self,
        keys: list[str],
        values: list[Tensor] | None = None,
        target_locations: list[Tensor] | None = None,
        target_sizes: Any = None,
    ) -> bool:
        pages = target_locations if values is None else values
        return pages is not None and all(self.set(key, page) for key, page in zip(keys, pages, strict=True))

    def exists(self, key: str) -> bool:
        store = self._single
        return store is not None and _or(0, lambda: store.count([key])) == 1

    def clear(self) -> None:
        """Drop every page of this model, of all ranks."""
        db = self._db
        if db is not None:
            _or(None, lambda: db.drop_all(f"{self._folder}/"))

    def close(self) -> None:
        """Let go of the database; whatever is asked after it is a miss."""
        db, self._db, self._chains, self._single = self._db, None, None, None
        if db is not None:
            db.close()

    def _each(self, keys: list[str], indices: Tensor, act: Callable[[PageStore, str, Tensor], bool]) -> list[bool]:
        store, pages = self._single, self._pages
        if store is None or pages is None:
            return [False] * len(keys)
        size = pages.page_size
        spans = [indices[i * size : (i + 1) * size] for i in range(len(keys))]
        return [_or(False, partial(act, store, key, span)) for key, span in zip(keys, spans, strict=True)]


def _or(otherwise: Given, act: Callable[[], Given]) -> Given:
    """What `act` returns, or `otherwise` where the database fails, which the log says."""
    try:
        return act()
    except KvdbError as error:
        LOG.warning("kvdb steps aside: %s", error)
        return otherwise


def _before(extra: HiCacheStorageExtraInfo | None) -> list[str] | None:
    """The keys before those of a call, None where SGLang does not pass them."""
    return None if extra is None else extra.prefix_keys


def _share_of(config: HiCacheStorageConfig) -> str:
    """The salt: which part of the model's KV this rank holds."""
    parts = [
        f"{name}{rank}of{size}"
        for name, rank, size in (
            ("tp", config.tp_rank, config.tp_size),
            ("pp", config.pp_rank, config.pp_size),
            ("cp", config.attn_cp_rank, config.attn_cp_size),
        )
        if size > 1
    ]
    return "/".join([FOLDER, *parts])


def _spec(given: Any) -> kvdb.ModelSpec:
    try:
        fields = given if isinstance(given, dict) else json.loads(Path(given).read_text())
        return kvdb.ModelSpec.from_dict(fields)
    except (OSError, TypeError, ValueError, KeyError) as error:
        raise InvalidArgument(
            f"spec is {given!r:.200}: {error}; expected the fields of a kvdb.ModelSpec, or a file of them"
        ) from None
