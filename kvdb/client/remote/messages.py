"""Requests made of values, for whatever sends them."""

from collections.abc import Sequence

import kvdb.validate as validate
from kvdb.errors import PositionError
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.query_options import put_query_options
from kvdb.types import Array, ModelSpec, Retention, Tokens
from query_optimizer.query_options import QueryOptions

START_MAX = (1 << 63) - 1


def create_session(
    spec: ModelSpec,
    ids: Tokens | None,
    error_max: float | None,
    salt: str,
    *,
    share: bool = False,
    label: str = "",
    expected_tokens: int | None = None,
) -> pb.CreateSessionRequest:
    """ids: int32 `[n]`, None for a session of parts. Raises InvalidArgument."""
    return pb.CreateSessionRequest(
        spec=codec.to_spec(spec),
        tokens=None if ids is None else codec.to_tokens(ids),
        error_max=error_max,
        salt=validate.salt(salt),
        share=share,
        label=label,
        expected_tokens=expected_tokens,
    )


def import_begin(spec: ModelSpec, tokens: Tokens, name: str, base: int | None, retention: Retention, salt: str) -> pb.ImportBegin:
    """Raises ShapeError, DtypeError or InvalidArgument."""
    ids = codec.to_tokens(validate.token_ids(tokens))
    first = None if base is None else validate.base(base)
    kept = codec.to_retention(validate.retention(retention))
    begin = pb.ImportBegin(spec=codec.to_spec(spec), tokens=ids, base=first, retention=kept)
    begin.name, begin.salt = validate.name(name), validate.salt(salt)
    return begin


def attend_together(
    ids: Sequence[str], layer: int, arrays: tuple[Array, Array, Array], options: QueryOptions, starts: Sequence[int] | None
) -> pb.AttendTogetherRequest:
    """arrays: q, k and v."""
    request = pb.AttendTogetherRequest(session_ids=ids, layer=layer, starts=starts)
    for message, array in zip((request.q, request.k, request.v), arrays, strict=True):
        codec.put_array(message, array)
    put_query_options(request, options)
    return request


def attention_together(ids: Sequence[str], layer: int, q: Array, options: QueryOptions) -> pb.AttentionTogetherRequest:
    request = pb.AttentionTogetherRequest(session_ids=ids, layer=layer)
    codec.put_array(request.q, q)
    put_query_options(request, options)
    return request


def put_update(request: pb.UpdateRequest, session: str, layer: int, arrays: Sequence[Array], start: int | None) -> None:
    """arrays: k and v, or an indexer's keys."""
    _put_session(request, session, layer, start)
    for message, array in zip((request.k, request.v), arrays, strict=False):
        codec.put_array(message, array)


def put_attention(request: pb.AttentionRequest, session: str, layer: int, q: Array, options: QueryOptions) -> None:
    request.session_id, request.layer = session, layer
    codec.put_array(request.q, q)
    put_query_options(request, options)


def put_attend(
    request: pb.AttendRequest,
    session: str,
    layer: int,
    arrays: Sequence[Array],
    options: QueryOptions,
    start: int | None,
) -> None:
    """arrays: q, k and v."""
    _put_session(request, session, layer, start)
    for message, array in zip((request.q, request.k, request.v), arrays, strict=True):
        codec.put_array(message, array)
    put_query_options(request, options)


def store(session: str, name: str, tokens: Tokens | None, chunk: bool, retention: Retention) -> pb.StoreRequest:
    """Raises ShapeError, DtypeError or InvalidArgument."""
    ids = None if tokens is None else codec.to_tokens(validate.token_ids(tokens))
    kept, checked = codec.to_retention(validate.retention(retention)), validate.name(name)
    return pb.StoreRequest(session_id=session, name=checked, tokens=ids, chunk=bool(chunk), retention=kept)


def checked_start(start: int | None) -> int | None:
    """A position as the wire carries it. Raises PositionError for what cannot be one."""
    if start is not None and (not validate.is_whole(start) or not -START_MAX <= start <= START_MAX):
        raise PositionError(f"start is {start!r}; expected the number of tokens that the layer holds")
    return start


def _put_session(request: pb.UpdateRequest | pb.AttendRequest, session: str, layer: int, start: int | None) -> None:
    request.session_id, request.layer = session, layer
    if start is not None:
        request.start = start
