from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("version", "message_bytes_max", "request_bytes_max", "stream_idle_seconds", "local_socket", "local_server")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    STREAM_IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SOCKET_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SERVER_FIELD_NUMBER: _ClassVar[int]
    version: str
    message_bytes_max: int
    request_bytes_max: int
    stream_idle_seconds: float
    local_socket: str
    local_server: bytes
    def __init__(self, version: _Optional[str] = ..., message_bytes_max: _Optional[int] = ..., request_bytes_max: _Optional[int] = ..., stream_idle_seconds: _Optional[float] = ..., local_socket: _Optional[str] = ..., local_server: _Optional[bytes] = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("name", "layers", "q_heads", "kv_heads", "head_dim", "dtype", "rope", "fingerprint", "scale", "descriptions")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    Q_HEADS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    rope: Rope
    fingerprint: str
    scale: float
    descriptions: str
    def __init__(self, name: _Optional[str] = ..., layers: _Optional[int] = ..., q_heads: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., rope: _Optional[_Union[Rope, _Mapping]] = ..., fingerprint: _Optional[str] = ..., scale: _Optional[float] = ..., descriptions: _Optional[str] = ...) -> None: ...

class Rope(_message.Message):
    __slots__ = ("theta", "rotary_dims", "layout", "scaling")
    THETA_FIELD_NUMBER: _ClassVar[int]
    ROTARY_DIMS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    theta: float
    rotary_dims: int
    layout: str
    scaling: str
    def __init__(self, theta: _Optional[float] = ..., rotary_dims: _Optional[int] = ..., layout: _Optional[str] = ..., scaling: _Optional[str] = ...) -> None: ...

class Array(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Retrieval(_message.Message):
    __slots__ = ("exact", "dipr", "top_k", "top_p")
    class Exact(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Dipr(_message.Message):
        __slots__ = ("alpha",)
        ALPHA_FIELD_NUMBER: _ClassVar[int]
        alpha: float
        def __init__(self, alpha: _Optional[float] = ...) -> None: ...
    class TopK(_message.Message):
        __slots__ = ("k",)
        K_FIELD_NUMBER: _ClassVar[int]
        k: int
        def __init__(self, k: _Optional[int] = ...) -> None: ...
    class TopP(_message.Message):
        __slots__ = ("p",)
        P_FIELD_NUMBER: _ClassVar[int]
        p: float
        def __init__(self, p: _Optional[float] = ...) -> None: ...
    EXACT_FIELD_NUMBER: _ClassVar[int]
    DIPR_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    exact: Retrieval.Exact
    dipr: Retrieval.Dipr
    top_k: Retrieval.TopK
    top_p: Retrieval.TopP
    def __init__(self, exact: _Optional[_Union[Retrieval.Exact, _Mapping]] = ..., dipr: _Optional[_Union[Retrieval.Dipr, _Mapping]] = ..., top_k: _Optional[_Union[Retrieval.TopK, _Mapping]] = ..., top_p: _Optional[_Union[Retrieval.TopP, _Mapping]] = ...) -> None: ...

class Hints(_message.Message):
    __slots__ = ("index", "rules_off", "memory_budget")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RULES_OFF_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BUDGET_FIELD_NUMBER: _ClassVar[int]
    index: str
    rules_off: _containers.RepeatedScalarFieldContainer[str]
    memory_budget: int
    def __init__(self, index: _Optional[str] = ..., rules_off: _Optional[_Iterable[str]] = ..., memory_budget: _Optional[int] = ...) -> None: ...

class QueryOptions(_message.Message):
    __slots__ = ("retrieval", "max_missed_mass", "estimate_tail", "hints", "error_max")
    RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    MAX_MISSED_MASS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_TAIL_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_MAX_FIELD_NUMBER: _ClassVar[int]
    retrieval: Retrieval
    max_missed_mass: float
    estimate_tail: bool
    hints: Hints
    error_max: float
    def __init__(self, retrieval: _Optional[_Union[Retrieval, _Mapping]] = ..., max_missed_mass: _Optional[float] = ..., estimate_tail: _Optional[bool] = ..., hints: _Optional[_Union[Hints, _Mapping]] = ..., error_max: _Optional[float] = ...) -> None: ...

class ContextInfo(_message.Message):
    __slots__ = ("name", "spec", "tokens", "segments", "nbytes", "chunk", "blended", "salt", "exact", "pinned", "expires", "metadata", "created", "used", "uses", "format", "key_error", "value_error", "resident", "shared_with")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    BLENDED_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    KEY_ERROR_FIELD_NUMBER: _ClassVar[int]
    VALUE_ERROR_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    SHARED_WITH_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec: ModelSpec
    tokens: int
    segments: int
    nbytes: int
    chunk: bool
    blended: bool
    salt: str
    exact: bool
    pinned: bool
    expires: float
    metadata: str
    created: float
    used: float
    uses: int
    format: str
    key_error: float
    value_error: float
    resident: bool
    shared_with: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., spec: _Optional[_Union[ModelSpec, _Mapping]] = ..., tokens: _Optional[int] = ..., segments: _Optional[int] = ..., nbytes: _Optional[int] = ..., chunk: _Optional[bool] = ..., blended: _Optional[bool] = ..., salt: _Optional[str] = ..., exact: _Optional[bool] = ..., pinned: _Optional[bool] = ..., expires: _Optional[float] = ..., metadata: _Optional[str] = ..., created: _Optional[float] = ..., used: _Optional[float] = ..., uses: _Optional[int] = ..., format: _Optional[str] = ..., key_error: _Optional[float] = ..., value_error: _Optional[float] = ..., resident: _Optional[bool] = ..., shared_with: _Optional[_Iterable[str]] = ...) -> None: ...

class IndexInfo(_message.Message):
    __slots__ = ("segment", "tokens", "kind", "layers", "layers_total", "nbytes", "state", "progress", "seconds", "seconds_expected", "error")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    segment: int
    tokens: int
    kind: str
    layers: int
    layers_total: int
    nbytes: int
    state: str
    progress: float
    seconds: float
    seconds_expected: float
    error: str
    def __init__(self, segment: _Optional[int] = ..., tokens: _Optional[int] = ..., kind: _Optional[str] = ..., layers: _Optional[int] = ..., layers_total: _Optional[int] = ..., nbytes: _Optional[int] = ..., state: _Optional[str] = ..., progress: _Optional[float] = ..., seconds: _Optional[float] = ..., seconds_expected: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...

class RequestPart(_message.Message):
    __slots__ = ("nbytes", "data")
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    nbytes: int
    data: bytes
    def __init__(self, nbytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ImportRequest(_message.Message):
    __slots__ = ("begin", "chunk", "commit", "sample", "part", "state", "data")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    begin: ImportBegin
    chunk: KvChunk
    commit: ImportCommit
    sample: ImportSample
    part: RequestPart
    state: LayerState
    data: bytes
    def __init__(self, begin: _Optional[_Union[ImportBegin, _Mapping]] = ..., chunk: _Optional[_Union[KvChunk, _Mapping]] = ..., commit: _Optional[_Union[ImportCommit, _Mapping]] = ..., sample: _Optional[_Union[ImportSample, _Mapping]] = ..., part: _Optional[_Union[RequestPart, _Mapping]] = ..., state: _Optional[_Union[LayerState, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ImportBegin(_message.Message):
    __slots__ = ("spec", "tokens", "name", "base", "retention", "salt")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    spec: ModelSpec
    tokens: bytes
    name: str
    base: int
    retention: Retention
    salt: str
    def __init__(self, spec: _Optional[_Union[ModelSpec, _Mapping]] = ..., tokens: _Optional[bytes] = ..., name: _Optional[str] = ..., base: _Optional[int] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ..., salt: _Optional[str] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("durability", "ttl", "metadata", "pinned", "format")
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    durability: str
    ttl: float
    metadata: str
    pinned: bool
    format: str
    def __init__(self, durability: _Optional[str] = ..., ttl: _Optional[float] = ..., metadata: _Optional[str] = ..., pinned: _Optional[bool] = ..., format: _Optional[str] = ...) -> None: ...

class KvChunk(_message.Message):
    __slots__ = ("layer", "dtype", "shape", "value_dim", "indexer", "start")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    INDEXER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    layer: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    value_dim: int
    indexer: bool
    start: int
    def __init__(self, layer: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., value_dim: _Optional[int] = ..., indexer: _Optional[bool] = ..., start: _Optional[int] = ...) -> None: ...

class LayerState(_message.Message):
    __slots__ = ("layer", "arrays", "position")
    class ArraysEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Array
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...
    LAYER_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    layer: int
    arrays: _containers.MessageMap[str, Array]
    position: int
    def __init__(self, layer: _Optional[int] = ..., arrays: _Optional[_Mapping[str, Array]] = ..., position: _Optional[int] = ...) -> None: ...

class ImportSample(_message.Message):
    __slots__ = ("layer", "q")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    layer: int
    q: Array
    def __init__(self, layer: _Optional[int] = ..., q: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class ImportCommit(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ImportReply(_message.Message):
    __slots__ = ("begun", "committed")
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    begun: ImportBegun
    committed: ContextInfo
    def __init__(self, begun: _Optional[_Union[ImportBegun, _Mapping]] = ..., committed: _Optional[_Union[ContextInfo, _Mapping]] = ...) -> None: ...

class ImportBegun(_message.Message):
    __slots__ = ("start",)
    START_FIELD_NUMBER: _ClassVar[int]
    start: int
    def __init__(self, start: _Optional[int] = ...) -> None: ...

class ListContextsRequest(_message.Message):
    __slots__ = ("prefix", "after", "limit", "metadata")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    after: str
    limit: int
    metadata: str
    def __init__(self, prefix: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ..., metadata: _Optional[str] = ...) -> None: ...

class ListContextsReply(_message.Message):
    __slots__ = ("contexts",)
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    contexts: _containers.RepeatedCompositeFieldContainer[ContextInfo]
    def __init__(self, contexts: _Optional[_Iterable[_Union[ContextInfo, _Mapping]]] = ...) -> None: ...

class GetContextRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ContextTokensRequest(_message.Message):
    __slots__ = ("name", "start")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    name: str
    start: int
    def __init__(self, name: _Optional[str] = ..., start: _Optional[int] = ...) -> None: ...

class ContextTokensReply(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    def __init__(self, tokens: _Optional[bytes] = ...) -> None: ...

class MatchPrefixRequest(_message.Message):
    __slots__ = ("spec", "tokens", "salt")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    spec: ModelSpec
    tokens: bytes
    salt: str
    def __init__(self, spec: _Optional[_Union[ModelSpec, _Mapping]] = ..., tokens: _Optional[bytes] = ..., salt: _Optional[str] = ...) -> None: ...

class MatchPrefixReply(_message.Message):
    __slots__ = ("tokens", "resident")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    resident: int
    def __init__(self, tokens: _Optional[int] = ..., resident: _Optional[int] = ...) -> None: ...

class UpdateContextRequest(_message.Message):
    __slots__ = ("name", "pinned", "ttl", "metadata", "new_name", "shared_with")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    NEW_NAME_FIELD_NUMBER: _ClassVar[int]
    SHARED_WITH_FIELD_NUMBER: _ClassVar[int]
    name: str
    pinned: bool
    ttl: float
    metadata: str
    new_name: str
    shared_with: Names
    def __init__(self, name: _Optional[str] = ..., pinned: _Optional[bool] = ..., ttl: _Optional[float] = ..., metadata: _Optional[str] = ..., new_name: _Optional[str] = ..., shared_with: _Optional[_Union[Names, _Mapping]] = ...) -> None: ...

class DropContextsRequest(_message.Message):
    __slots__ = ("names", "matching")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    MATCHING_FIELD_NUMBER: _ClassVar[int]
    names: Names
    matching: Matching
    def __init__(self, names: _Optional[_Union[Names, _Mapping]] = ..., matching: _Optional[_Union[Matching, _Mapping]] = ...) -> None: ...

class Names(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class Matching(_message.Message):
    __slots__ = ("prefix", "metadata")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    metadata: str
    def __init__(self, prefix: _Optional[str] = ..., metadata: _Optional[str] = ...) -> None: ...

class DropContextsReply(_message.Message):
    __slots__ = ("dropped", "in_use")
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    dropped: _containers.RepeatedScalarFieldContainer[str]
    in_use: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, dropped: _Optional[_Iterable[str]] = ..., in_use: _Optional[_Iterable[str]] = ...) -> None: ...

class ReadContextRequest(_message.Message):
    __slots__ = ("context", "session_id", "layers", "start", "stop", "indexer")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INDEXER_FIELD_NUMBER: _ClassVar[int]
    context: str
    session_id: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    start: int
    stop: int
    indexer: bool
    def __init__(self, context: _Optional[str] = ..., session_id: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., indexer: _Optional[bool] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("chunk", "data")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    chunk: KvChunk
    data: bytes
    def __init__(self, chunk: _Optional[_Union[KvChunk, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class OffloadContextRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class OffloadContextReply(_message.Message):
    __slots__ = ("nbytes",)
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    nbytes: int
    def __init__(self, nbytes: _Optional[int] = ...) -> None: ...

class BuildIndexRequest(_message.Message):
    __slots__ = ("name", "kind", "wait")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    wait: bool
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., wait: _Optional[bool] = ...) -> None: ...

class ListIndexesRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class IndexesReply(_message.Message):
    __slots__ = ("indexes",)
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    indexes: _containers.RepeatedCompositeFieldContainer[IndexInfo]
    def __init__(self, indexes: _Optional[_Iterable[_Union[IndexInfo, _Mapping]]] = ...) -> None: ...

class VerifyIndexesRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class VerifyIndexesReply(_message.Message):
    __slots__ = ("indexes",)
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    indexes: int
    def __init__(self, indexes: _Optional[int] = ...) -> None: ...

class CheckContextRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class CheckContextReply(_message.Message):
    __slots__ = ("blocks", "nbytes", "indexes")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    nbytes: int
    indexes: int
    def __init__(self, blocks: _Optional[int] = ..., nbytes: _Optional[int] = ..., indexes: _Optional[int] = ...) -> None: ...

class CheckStoreRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckStoreReply(_message.Message):
    __slots__ = ("damaged",)
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    damaged: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, damaged: _Optional[_Iterable[str]] = ...) -> None: ...

class UnknownFilesRequest(_message.Message):
    __slots__ = ("remove",)
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    remove: bool
    def __init__(self, remove: _Optional[bool] = ...) -> None: ...

class UnknownFile(_message.Message):
    __slots__ = ("name", "nbytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    nbytes: int
    def __init__(self, name: _Optional[str] = ..., nbytes: _Optional[int] = ...) -> None: ...

class UnknownFilesReply(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[UnknownFile]
    def __init__(self, files: _Optional[_Iterable[_Union[UnknownFile, _Mapping]]] = ...) -> None: ...

class BackupRequest(_message.Message):
    __slots__ = ("folder", "link")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    folder: str
    link: bool
    def __init__(self, folder: _Optional[str] = ..., link: _Optional[bool] = ...) -> None: ...

class BackupReply(_message.Message):
    __slots__ = ("contexts", "copied", "reflinked", "linked", "nbytes", "same_file_system")
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    REFLINKED_FIELD_NUMBER: _ClassVar[int]
    LINKED_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    SAME_FILE_SYSTEM_FIELD_NUMBER: _ClassVar[int]
    contexts: int
    copied: int
    reflinked: int
    linked: int
    nbytes: int
    same_file_system: bool
    def __init__(self, contexts: _Optional[int] = ..., copied: _Optional[int] = ..., reflinked: _Optional[int] = ..., linked: _Optional[int] = ..., nbytes: _Optional[int] = ..., same_file_system: _Optional[bool] = ...) -> None: ...

class CompactRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CompactReply(_message.Message):
    __slots__ = ("nbytes",)
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    nbytes: int
    def __init__(self, nbytes: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "uptime_seconds", "contexts", "sessions", "indexes", "building", "calls", "calls_max", "calls_waiting")
    class IndexesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    BUILDING_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    CALLS_MAX_FIELD_NUMBER: _ClassVar[int]
    CALLS_WAITING_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_seconds: float
    contexts: int
    sessions: int
    indexes: _containers.ScalarMap[str, int]
    building: int
    calls: int
    calls_max: int
    calls_waiting: int
    def __init__(self, version: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., contexts: _Optional[int] = ..., sessions: _Optional[int] = ..., indexes: _Optional[_Mapping[str, int]] = ..., building: _Optional[int] = ..., calls: _Optional[int] = ..., calls_max: _Optional[int] = ..., calls_waiting: _Optional[int] = ...) -> None: ...

class SpaceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SpaceReply(_message.Message):
    __slots__ = ("held", "reachable")
    HELD_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    held: int
    reachable: int
    def __init__(self, held: _Optional[int] = ..., reachable: _Optional[int] = ...) -> None: ...

class ListTiersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTiersReply(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("name", "blocks_used", "blocks_total", "block_nbytes", "nbytes", "huge", "pinned_nbytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NBYTES_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    HUGE_FIELD_NUMBER: _ClassVar[int]
    PINNED_NBYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    blocks_used: int
    blocks_total: int
    block_nbytes: int
    nbytes: int
    huge: bool
    pinned_nbytes: int
    def __init__(self, name: _Optional[str] = ..., blocks_used: _Optional[int] = ..., blocks_total: _Optional[int] = ..., block_nbytes: _Optional[int] = ..., nbytes: _Optional[int] = ..., huge: _Optional[bool] = ..., pinned_nbytes: _Optional[int] = ...) -> None: ...

class ContextStatisticsRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ContextStatisticsReply(_message.Message):
    __slots__ = ("segments",)
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[SegmentStatistics]
    def __init__(self, segments: _Optional[_Iterable[_Union[SegmentStatistics, _Mapping]]] = ...) -> None: ...

class SegmentStatistics(_message.Message):
    __slots__ = ("segment", "tokens", "queries", "retrieved", "dense", "sharpness", "window_hits", "audits", "error")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    RETRIEVED_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    SHARPNESS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_HITS_FIELD_NUMBER: _ClassVar[int]
    AUDITS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    segment: int
    tokens: int
    queries: Array
    retrieved: Array
    dense: Array
    sharpness: Array
    window_hits: Array
    audits: Array
    error: Array
    def __init__(self, segment: _Optional[int] = ..., tokens: _Optional[int] = ..., queries: _Optional[_Union[Array, _Mapping]] = ..., retrieved: _Optional[_Union[Array, _Mapping]] = ..., dense: _Optional[_Union[Array, _Mapping]] = ..., sharpness: _Optional[_Union[Array, _Mapping]] = ..., window_hits: _Optional[_Union[Array, _Mapping]] = ..., audits: _Optional[_Union[Array, _Mapping]] = ..., error: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class CreateSessionRequest(_message.Message):
    __slots__ = ("spec", "tokens", "parts", "error_max", "salt", "share", "label", "expected_tokens")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_MAX_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    spec: ModelSpec
    tokens: bytes
    parts: Parts
    error_max: float
    salt: str
    share: bool
    label: str
    expected_tokens: int
    def __init__(self, spec: _Optional[_Union[ModelSpec, _Mapping]] = ..., tokens: _Optional[bytes] = ..., parts: _Optional[_Union[Parts, _Mapping]] = ..., error_max: _Optional[float] = ..., salt: _Optional[str] = ..., share: _Optional[bool] = ..., label: _Optional[str] = ..., expected_tokens: _Optional[int] = ...) -> None: ...

class Parts(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("context", "tokens", "visible", "at")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VISIBLE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    context: str
    tokens: bytes
    visible: int
    at: int
    def __init__(self, context: _Optional[str] = ..., tokens: _Optional[bytes] = ..., visible: _Optional[int] = ..., at: _Optional[int] = ...) -> None: ...

class Placed(_message.Message):
    __slots__ = ("begin", "end", "kind")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    kind: str
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ..., kind: _Optional[str] = ...) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("session_id", "reused", "start", "layout", "tokens", "error_max")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REUSED_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_MAX_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    reused: int
    start: int
    layout: _containers.RepeatedCompositeFieldContainer[Placed]
    tokens: bytes
    error_max: float
    def __init__(self, session_id: _Optional[str] = ..., reused: _Optional[int] = ..., start: _Optional[int] = ..., layout: _Optional[_Iterable[_Union[Placed, _Mapping]]] = ..., tokens: _Optional[bytes] = ..., error_max: _Optional[float] = ...) -> None: ...

class UpdateRequest(_message.Message):
    __slots__ = ("session_id", "layer", "k", "v", "start", "indexer")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    INDEXER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    layer: int
    k: Array
    v: Array
    start: int
    indexer: bool
    def __init__(self, session_id: _Optional[str] = ..., layer: _Optional[int] = ..., k: _Optional[_Union[Array, _Mapping]] = ..., v: _Optional[_Union[Array, _Mapping]] = ..., start: _Optional[int] = ..., indexer: _Optional[bool] = ...) -> None: ...

class UpdateReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttentionRequest(_message.Message):
    __slots__ = ("session_id", "layer", "q", "options")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    layer: int
    q: Array
    options: QueryOptions
    def __init__(self, session_id: _Optional[str] = ..., layer: _Optional[int] = ..., q: _Optional[_Union[Array, _Mapping]] = ..., options: _Optional[_Union[QueryOptions, _Mapping]] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("session_id", "layer", "q", "k", "v", "start", "options")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    layer: int
    q: Array
    k: Array
    v: Array
    start: int
    options: QueryOptions
    def __init__(self, session_id: _Optional[str] = ..., layer: _Optional[int] = ..., q: _Optional[_Union[Array, _Mapping]] = ..., k: _Optional[_Union[Array, _Mapping]] = ..., v: _Optional[_Union[Array, _Mapping]] = ..., start: _Optional[int] = ..., options: _Optional[_Union[QueryOptions, _Mapping]] = ...) -> None: ...

class AttentionReply(_message.Message):
    __slots__ = ("out",)
    OUT_FIELD_NUMBER: _ClassVar[int]
    out: Array
    def __init__(self, out: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class AttendSelectedRequest(_message.Message):
    __slots__ = ("session_id", "layer", "q", "k", "v", "index_q", "index_weights", "start")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    INDEX_Q_FIELD_NUMBER: _ClassVar[int]
    INDEX_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    layer: int
    q: Array
    k: Array
    v: Array
    index_q: Array
    index_weights: Array
    start: int
    def __init__(self, session_id: _Optional[str] = ..., layer: _Optional[int] = ..., q: _Optional[_Union[Array, _Mapping]] = ..., k: _Optional[_Union[Array, _Mapping]] = ..., v: _Optional[_Union[Array, _Mapping]] = ..., index_q: _Optional[_Union[Array, _Mapping]] = ..., index_weights: _Optional[_Union[Array, _Mapping]] = ..., start: _Optional[int] = ...) -> None: ...

class AttentionTogetherRequest(_message.Message):
    __slots__ = ("session_ids", "layer", "q", "options")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    layer: int
    q: Array
    options: QueryOptions
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ..., layer: _Optional[int] = ..., q: _Optional[_Union[Array, _Mapping]] = ..., options: _Optional[_Union[QueryOptions, _Mapping]] = ...) -> None: ...

class AttendTogetherRequest(_message.Message):
    __slots__ = ("session_ids", "layer", "q", "k", "v", "starts", "options")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    layer: int
    q: Array
    k: Array
    v: Array
    starts: _containers.RepeatedScalarFieldContainer[int]
    options: QueryOptions
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ..., layer: _Optional[int] = ..., q: _Optional[_Union[Array, _Mapping]] = ..., k: _Optional[_Union[Array, _Mapping]] = ..., v: _Optional[_Union[Array, _Mapping]] = ..., starts: _Optional[_Iterable[int]] = ..., options: _Optional[_Union[QueryOptions, _Mapping]] = ...) -> None: ...

class OverlayRequest(_message.Message):
    __slots__ = ("session_id", "layer", "positions", "k", "v")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    layer: int
    positions: bytes
    k: Array
    v: Array
    def __init__(self, session_id: _Optional[str] = ..., layer: _Optional[int] = ..., positions: _Optional[bytes] = ..., k: _Optional[_Union[Array, _Mapping]] = ..., v: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class AttentionAtRequest(_message.Message):
    __slots__ = ("session_id", "layer", "positions", "q")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    layer: int
    positions: bytes
    q: Array
    def __init__(self, session_id: _Optional[str] = ..., layer: _Optional[int] = ..., positions: _Optional[bytes] = ..., q: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class DeviationRequest(_message.Message):
    __slots__ = ("session_id", "layer", "positions", "k", "v", "score")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    layer: int
    positions: bytes
    k: Array
    v: Array
    score: str
    def __init__(self, session_id: _Optional[str] = ..., layer: _Optional[int] = ..., positions: _Optional[bytes] = ..., k: _Optional[_Union[Array, _Mapping]] = ..., v: _Optional[_Union[Array, _Mapping]] = ..., score: _Optional[str] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("update", "attention", "attend", "overlay", "attention_at", "deviation", "part")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    ATTEND_FIELD_NUMBER: _ClassVar[int]
    OVERLAY_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_AT_FIELD_NUMBER: _ClassVar[int]
    DEVIATION_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    update: UpdateRequest
    attention: AttentionRequest
    attend: AttendRequest
    overlay: OverlayRequest
    attention_at: AttentionAtRequest
    deviation: DeviationRequest
    part: RequestPart
    def __init__(self, update: _Optional[_Union[UpdateRequest, _Mapping]] = ..., attention: _Optional[_Union[AttentionRequest, _Mapping]] = ..., attend: _Optional[_Union[AttendRequest, _Mapping]] = ..., overlay: _Optional[_Union[OverlayRequest, _Mapping]] = ..., attention_at: _Optional[_Union[AttentionAtRequest, _Mapping]] = ..., deviation: _Optional[_Union[DeviationRequest, _Mapping]] = ..., part: _Optional[_Union[RequestPart, _Mapping]] = ...) -> None: ...

class DecodeReply(_message.Message):
    __slots__ = ("out", "queue_us", "engine_us", "kernel_us")
    OUT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    ENGINE_US_FIELD_NUMBER: _ClassVar[int]
    KERNEL_US_FIELD_NUMBER: _ClassVar[int]
    out: Array
    queue_us: float
    engine_us: float
    kernel_us: float
    def __init__(self, out: _Optional[_Union[Array, _Mapping]] = ..., queue_us: _Optional[float] = ..., engine_us: _Optional[float] = ..., kernel_us: _Optional[float] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class TruncateRequest(_message.Message):
    __slots__ = ("session_id", "tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tokens: int
    def __init__(self, session_id: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class TruncateReply(_message.Message):
    __slots__ = ("reused", "start", "layout")
    REUSED_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    reused: int
    start: int
    layout: _containers.RepeatedCompositeFieldContainer[Placed]
    def __init__(self, reused: _Optional[int] = ..., start: _Optional[int] = ..., layout: _Optional[_Iterable[_Union[Placed, _Mapping]]] = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("session_id", "name", "tokens", "chunk", "retention")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    name: str
    tokens: bytes
    chunk: bool
    retention: Retention
    def __init__(self, session_id: _Optional[str] = ..., name: _Optional[str] = ..., tokens: _Optional[bytes] = ..., chunk: _Optional[bool] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("session_id", "layer", "options", "analyze")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    ANALYZE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    layer: int
    options: QueryOptions
    analyze: bool
    def __init__(self, session_id: _Optional[str] = ..., layer: _Optional[int] = ..., options: _Optional[_Union[QueryOptions, _Mapping]] = ..., analyze: _Optional[bool] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: str
    def __init__(self, plan: _Optional[str] = ...) -> None: ...

class PutStateRequest(_message.Message):
    __slots__ = ("session_id", "layer", "arrays", "position")
    class ArraysEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Array
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    layer: int
    arrays: _containers.MessageMap[str, Array]
    position: int
    def __init__(self, session_id: _Optional[str] = ..., layer: _Optional[int] = ..., arrays: _Optional[_Mapping[str, Array]] = ..., position: _Optional[int] = ...) -> None: ...

class PutStateReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PutSinksRequest(_message.Message):
    __slots__ = ("session_id", "layer", "sinks")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    layer: int
    sinks: Array
    def __init__(self, session_id: _Optional[str] = ..., layer: _Optional[int] = ..., sinks: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class PutSinksReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("session_id", "layer", "position")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    layer: int
    position: int
    def __init__(self, session_id: _Optional[str] = ..., layer: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class StateReply(_message.Message):
    __slots__ = ("arrays",)
    class ArraysEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Array
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    arrays: _containers.MessageMap[str, Array]
    def __init__(self, arrays: _Optional[_Mapping[str, Array]] = ...) -> None: ...

class PlanRecomputeRequest(_message.Message):
    __slots__ = ("session_id", "seconds", "floor", "ratio")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    seconds: float
    floor: float
    ratio: float
    def __init__(self, session_id: _Optional[str] = ..., seconds: _Optional[float] = ..., floor: _Optional[float] = ..., ratio: _Optional[float] = ...) -> None: ...

class PlanRecomputeReply(_message.Message):
    __slots__ = ("choice",)
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    choice: str
    def __init__(self, choice: _Optional[str] = ...) -> None: ...

class ExplainContextRequest(_message.Message):
    __slots__ = ("name", "layer", "options", "analyze")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    ANALYZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    layer: int
    options: QueryOptions
    analyze: bool
    def __init__(self, name: _Optional[str] = ..., layer: _Optional[int] = ..., options: _Optional[_Union[QueryOptions, _Mapping]] = ..., analyze: _Optional[bool] = ...) -> None: ...

class ExplainContextReply(_message.Message):
    __slots__ = ("plans",)
    PLANS_FIELD_NUMBER: _ClassVar[int]
    plans: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, plans: _Optional[_Iterable[str]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSessionsReply(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("label", "tokens", "reused", "queries")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    label: str
    tokens: int
    reused: int
    queries: int
    def __init__(self, label: _Optional[str] = ..., tokens: _Optional[int] = ..., reused: _Optional[int] = ..., queries: _Optional[int] = ...) -> None: ...

class ExplainSessionRequest(_message.Message):
    __slots__ = ("label", "layer", "options", "analyze")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    ANALYZE_FIELD_NUMBER: _ClassVar[int]
    label: str
    layer: int
    options: QueryOptions
    analyze: bool
    def __init__(self, label: _Optional[str] = ..., layer: _Optional[int] = ..., options: _Optional[_Union[QueryOptions, _Mapping]] = ..., analyze: _Optional[bool] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("tokens", "reused", "tail_tokens", "tail_nbytes", "queries", "tokens_scanned", "bytes_read", "kernel_seconds", "rules", "tokens_retrieved", "missed_mass", "missed_mass_bound", "missed_mass_bound_max", "error_audits", "error_median", "error_p95", "error_max_seen", "ways")
    class RulesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class WaysEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_FIELD_NUMBER: _ClassVar[int]
    TAIL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAIL_NBYTES_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SCANNED_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    KERNEL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_RETRIEVED_FIELD_NUMBER: _ClassVar[int]
    MISSED_MASS_FIELD_NUMBER: _ClassVar[int]
    MISSED_MASS_BOUND_FIELD_NUMBER: _ClassVar[int]
    MISSED_MASS_BOUND_MAX_FIELD_NUMBER: _ClassVar[int]
    ERROR_AUDITS_FIELD_NUMBER: _ClassVar[int]
    ERROR_MEDIAN_FIELD_NUMBER: _ClassVar[int]
    ERROR_P95_FIELD_NUMBER: _ClassVar[int]
    ERROR_MAX_SEEN_FIELD_NUMBER: _ClassVar[int]
    WAYS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    reused: int
    tail_tokens: int
    tail_nbytes: int
    queries: int
    tokens_scanned: int
    bytes_read: int
    kernel_seconds: float
    rules: _containers.ScalarMap[str, int]
    tokens_retrieved: int
    missed_mass: float
    missed_mass_bound: float
    missed_mass_bound_max: float
    error_audits: int
    error_median: float
    error_p95: float
    error_max_seen: float
    ways: _containers.ScalarMap[str, int]
    def __init__(self, tokens: _Optional[int] = ..., reused: _Optional[int] = ..., tail_tokens: _Optional[int] = ..., tail_nbytes: _Optional[int] = ..., queries: _Optional[int] = ..., tokens_scanned: _Optional[int] = ..., bytes_read: _Optional[int] = ..., kernel_seconds: _Optional[float] = ..., rules: _Optional[_Mapping[str, int]] = ..., tokens_retrieved: _Optional[int] = ..., missed_mass: _Optional[float] = ..., missed_mass_bound: _Optional[float] = ..., missed_mass_bound_max: _Optional[float] = ..., error_audits: _Optional[int] = ..., error_median: _Optional[float] = ..., error_p95: _Optional[float] = ..., error_max_seen: _Optional[float] = ..., ways: _Optional[_Mapping[str, int]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ItemStatus(_message.Message):
    __slots__ = ("error", "text")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    error: str
    text: str
    def __init__(self, error: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class CreateSessionsRequest(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[CreateSessionRequest]
    def __init__(self, sessions: _Optional[_Iterable[_Union[CreateSessionRequest, _Mapping]]] = ...) -> None: ...

class CreateSessionsReply(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionReply]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionReply, _Mapping]]] = ...) -> None: ...

class UpdateSessionsRequest(_message.Message):
    __slots__ = ("session_ids", "layer", "k", "v", "starts")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    layer: int
    k: Array
    v: Array
    starts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ..., layer: _Optional[int] = ..., k: _Optional[_Union[Array, _Mapping]] = ..., v: _Optional[_Union[Array, _Mapping]] = ..., starts: _Optional[_Iterable[int]] = ...) -> None: ...

class UpdateSessionsReply(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[ItemStatus]
    def __init__(self, statuses: _Optional[_Iterable[_Union[ItemStatus, _Mapping]]] = ...) -> None: ...

class TruncateSessionsRequest(_message.Message):
    __slots__ = ("session_ids", "tokens")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class TruncateSessionsReply(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[TruncatedSession]
    def __init__(self, sessions: _Optional[_Iterable[_Union[TruncatedSession, _Mapping]]] = ...) -> None: ...

class TruncatedSession(_message.Message):
    __slots__ = ("status", "session")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    status: ItemStatus
    session: TruncateReply
    def __init__(self, status: _Optional[_Union[ItemStatus, _Mapping]] = ..., session: _Optional[_Union[TruncateReply, _Mapping]] = ...) -> None: ...

class CloseSessionsRequest(_message.Message):
    __slots__ = ("session_ids",)
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CloseSessionsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
