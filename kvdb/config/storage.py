"""The settings of blocks and of where they are kept."""

import re
from dataclasses import dataclass

import kvdb.codecs.registry as codecs
import kvdb.selectors.registry as selectors
from kvdb.config.checks import check_types
from kvdb.errors import ConfigError
from kvdb.types.contexts import DURABILITIES

MIB = 1 << 20
BLOCK_SIZE_MAX = 1024
GPU_DEVICE = re.compile("cuda(:[0-9]{1,3})?|interpreter")
GPU_FORMATS = ("", "float8", "int8")
EVICTIONS = ("reuse", "lru", "none")
"""What decides which contexts go where room is short; none: nothing goes by itself."""
_STORAGE_BYTES_MIN = {"cpu_bytes_max": 1, "disk_bytes_max": 1, "arena_bytes": MIB, "gpu_bytes_max": 0, "gpu_slab_bytes": 0}


@dataclass(frozen=True)
class StorageConfig:
    """Where blocks are kept, and how much of it there may be.

    block_size: tokens of one block. format: how segments that are stored from now on hold keys and values, the name of a codec
    (`kvdb.codecs`); the tokens of open sessions are held as they came. format_cold: that in which segments are written anew when
    no context over them was used for cold_after_seconds, by `Client.compact`, and with a store in the background too; "" for
    none. What rounding changes then is told (`ContextInfo.key_error`), and answers are proven anew. selector: what gives each
    token that is stored from now on a score, one of `kvdb.selectors`, "" for none. selector_share: of a layer that does not fit
    into main memory beside others, the share of blocks with the best scores, which stay there before all others; answers do not
    depend on it. cpu_bytes_max: bytes of main memory for blocks and what is kept beside them, None for no limit. arena_bytes: the
    most that is asked of the system at a time. path: the folder of a durable store, which keeps every context, "" for a database
    that keeps nothing. disk_path: a folder for segments that are offloaded, where there is no store, "" for none; several
    databases may share it. durability: what a context in a store outlives where the caller does not say; see
    `kvdb.types.DURABILITIES`. disk_bytes_max: bytes that this database may keep there, None for no limit. overwrite_freed:
    whether blocks are overwritten with zeros before their room is given to others; a server with tenants always does that.
    eviction: which contexts make room where a limit is reached, one of EVICTIONS: from main memory they go to disk, and from the
    last place that there is they are dropped, unless they are pinned or in use; "none" refuses what finds no room instead.
    gpu_bytes_max: bytes of the GPU's memory for copies of blocks, 0 for no GPU; block tables and results need some more.
    gpu_device: "cuda", "cuda:1", or "interpreter" for tests without a GPU. gpu_format: "" for the model's dtype, "float8" or
    "int8". gpu_slab_bytes: how much of gpu_bytes_max the blocks of one shape may take, 0 for all that is left when the first of
    them is copied.
    """

    block_size: int = 64
    format: str = ""
    format_cold: str = ""
    cold_after_seconds: float = 86400.0
    selector: str = ""
    selector_share: float = 0.25
    cpu_bytes_max: int | None = None
    arena_bytes: int = 64 * MIB
    path: str = ""
    disk_path: str = ""
    durability: str = "durable"
    disk_bytes_max: int | None = None
    overwrite_freed: bool = False
    eviction: str = "reuse"
    gpu_bytes_max: int = 0
    gpu_device: str = "cuda"
    gpu_format: str = ""
    gpu_slab_bytes: int = 0

    def __post_init__(self) -> None:
        check_types(self, "storage")
        if not 1 <= self.block_size <= BLOCK_SIZE_MAX:
            raise ConfigError(f"storage.block_size is {self.block_size}; expected 1 to {BLOCK_SIZE_MAX} tokens")
        for name in ("format", "format_cold"):
            self._check_format(name, getattr(self, name))
        if not self.cold_after_seconds >= 0:
            raise ConfigError(f"storage.cold_after_seconds is {self.cold_after_seconds}; expected 0 or more seconds")
        self._check_selector()
        if self.path and self.disk_path:
            raise ConfigError("storage.path and storage.disk_path are both set; expected one: a store holds what is offloaded")
        for name, known in (("durability", DURABILITIES), ("eviction", EVICTIONS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"storage.{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")
        for name, least in _STORAGE_BYTES_MIN.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"storage.{name} is {value}; expected at least {least} bytes")
        if not GPU_DEVICE.fullmatch(self.gpu_device):
            raise ConfigError(f"storage.gpu_device is {self.gpu_device!r}; expected cuda, cuda:0 and so on, or interpreter")
        if self.gpu_format not in GPU_FORMATS:
            raise ConfigError(f'storage.gpu_format is {self.gpu_format!r}; expected float8, int8, or "" for the model\'s dtype')

    def _check_selector(self) -> None:
        if self.selector and self.selector not in selectors.SELECTORS:
            raise ConfigError(f'storage.selector is {self.selector!r}; expected one of {selectors.names()}, or "" for none')
        if not 0 <= self.selector_share <= 1:
            raise ConfigError(f"storage.selector_share is {self.selector_share}; expected 0 to 1")

    def _check_format(self, name: str, value: str) -> None:
        if value not in codecs.CODECS:
            raise ConfigError(f"storage.{name} is {value!r}; expected one of {codecs.names()}")
        multiple = codecs.CODECS[value].block_tokens
        if self.block_size % multiple:
            raise ConfigError(
                f"storage.block_size is {self.block_size}; with storage.{name}={value!r} expected a multiple of {multiple} tokens"
            )
