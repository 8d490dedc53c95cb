"""What the database says of contexts and sessions: what they hold, and where it stands."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvdb.types.model_spec import ModelSpec

DURABILITIES = ("memory", "os", "durable")
"""What a context in a store outlives: an orderly end of the database alone, the end of the process however it comes, or the loss
of the machine's power too. Each takes longer than the one before."""


@dataclass(frozen=True)
class ContextInfo:
    """What is known of a stored context. nbytes: of the blocks it names, shared ones counted in full.

    chunk: whether it was computed alone, so that a session may lay it out anywhere. blended: whether it was laid out of chunks;
    then it is reused as a part of a session (`create_session(parts=)`), never found by its tokens. salt: what a lookup has to say
    beside the tokens to find it. exact: whether its KV is that of its tokens at the positions from 0 on; that of a blend is not,
    nor that of a chunk which was computed behind other tokens. pinned: whether it stays whatever room is needed. expires: when it
    is dropped, None for never. metadata: what was noted of it. created: when it was stored. used: when it was last reused, or
    stored. uses: how often it was reused. Times are seconds since the epoch. format: how its segments
    hold keys and values, "" as they came, "int8" and so on, several with + between them. key_error, value_error: the relative
    errors of what quantizing made of them. resident: whether its keys and values are in main memory, or come in there as they are
    read; otherwise a session brings them back from disk. shared_with: the tenants of a server that may read it beside its own."""

    name: str
    spec: ModelSpec
    tokens: int
    segments: int
    nbytes: int
    chunk: bool = False
    blended: bool = False
    salt: str = ""
    exact: bool = True
    pinned: bool = False
    expires: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    created: float = 0.0
    used: float = 0.0
    uses: int = 0
    format: str = ""
    key_error: float = 0.0
    value_error: float = 0.0
    resident: bool = True
    shared_with: tuple[str, ...] = ()


@dataclass(frozen=True)
class ContextUpdate:
    """What is to change of a stored context; None for what stays.

    pinned, metadata, shared_with: see `ContextInfo`. ttl: in how many seconds it is dropped, infinite for never. name: its new
    name."""

    pinned: bool | None = None
    ttl: float | None = None
    metadata: Mapping[str, Any] | None = field(default=None, hash=False)
    name: str | None = None
    shared_with: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Retention:
    """What a new context outlives, how long it is kept, how its new tokens are held, and what is noted of it, from the start on.

    durability: one of DURABILITIES, None for the configuration's. ttl: in how many seconds from then it is dropped, None or
    infinite for never. pinned, metadata: see `ContextInfo`. format: the name of a codec (`kvdb.codecs`), None for the
    configuration's; tokens that are stored already stay as they are."""

    durability: str | None = None
    ttl: float | None = None
    metadata: Mapping[str, Any] | None = field(default=None, hash=False)
    pinned: bool = False
    format: str | None = None


DEFAULT_RETENTION = Retention()


@dataclass(frozen=True)
class Dropped:
    """Contexts that were to be dropped, by their names. in_use: those that are still there, because sessions stand on them."""

    names: tuple[str, ...]
    in_use: tuple[str, ...]


@dataclass(frozen=True)
class PrefixMatch:
    """How many leading tokens of a prompt are stored, and how many of these are in main memory; the others are on disk."""

    tokens: int
    resident: int


@dataclass(frozen=True, eq=False)
class PromptPart:
    """One part of a session that is laid out of several, in their order.

    source: a `Context`, its name, or token ids. visible: how many of its first tokens count, None for all. at: the position at
    which the caller believes that it begins, to be checked."""

    source: Any
    visible: int | None = None
    at: int | None = None


@dataclass(frozen=True)
class Placed:
    """What stands at positions [begin, end) of a session. kind: "prefix", "chunk", or "tokens" of which nothing was stored."""

    begin: int
    end: int
    kind: str

    @property
    def tokens(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Checked:
    """What was read of a context and found as it was written. blocks: of keys and values on disk. nbytes: of all files. indexes:
    how many, on disk or in memory, one for each layer, segment and kind."""

    blocks: int
    nbytes: int
    indexes: int


@dataclass(frozen=True)
class BackedUp:
    """What a backup is. contexts: how many it holds. copied: how many files have bytes of their own. reflinked: how many share
    those of the store on the disk until either is written to. linked: how many are the store's own under a second name. nbytes:
    of all files. same_file_system: whether it is on that of the store."""

    contexts: int
    copied: int
    reflinked: int
    linked: int
    nbytes: int
    same_file_system: bool


@dataclass(frozen=True)
class UnknownFile:
    """A file in a store's folder `segments` that its catalogue does not know. nbytes: its size."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class IndexInfo:
    """One kind of index over one segment of a context. layers: how many have it, of layers_total. nbytes: its size in memory.
    state: "ready", "stored" on disk until a session needs it, "building", "waiting" to be built, or "failed". progress: the share
    of all layers that is done, 0 to 1. seconds: spent on it so far, of seconds_expected in all. error: why it failed, ""
    otherwise."""

    segment: int
    tokens: int
    kind: str
    layers: int
    layers_total: int
    nbytes: int
    state: str = "ready"
    progress: float = 1.0
    seconds: float = 0.0
    seconds_expected: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class ViewInfo:
    """What a context sees of one segment. segment: its number, the same wherever the segment is seen. begin: the position of its
    first token in the context. visible: how many of its `stored` tokens the context sees. shift: by how many positions it was
    moved. nbytes: of all its blocks. format: how it holds keys and values, "" as they came. resident: see `ContextInfo`. holders:
    how many contexts and sessions hold it."""

    segment: int
    begin: int
    visible: int
    stored: int
    shift: int
    nbytes: int
    format: str
    resident: bool
    holders: int
