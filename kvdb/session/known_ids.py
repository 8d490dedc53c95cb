"""The token ids of a session's tokens."""

from collections.abc import Collection

import numpy as np

import kvdb.validate as validate
from kvdb.catalog.contexts.prefix_tree import common_prefix
from kvdb.errors import InvalidArgument, PositionError
from kvdb.types import Tokens


def ids_of(lengths: Collection[int], known: Tokens, given: Tokens | None) -> Tokens:
    """The ids of everything in a session, int32 `[n]`.

    lengths: the number of tokens in each layer. known: the ids it was opened with. given: all ids according to the caller, or
    None. Raises PositionError for layers of different lengths, and InvalidArgument for ids that are missing, too many, or not
    those that are known.
    """
    if len(lengths) > 1:
        raise PositionError(
            f"the session's layers hold {min(lengths)} to {max(lengths)} tokens; update them all before it is stored"
        )
    (length,) = lengths
    ids = known if given is None else validate.token_ids(given)
    if len(ids) < length or (given is not None and len(ids) != length):
        raise InvalidArgument(
            f"the session holds {length} tokens and {len(ids)} ids are known; pass tokens= with the ids of all {length}"
        )
    if not length:
        raise InvalidArgument("the session holds no tokens; expected at least one to store")
    where = common_prefix(ids, known[:length])
    if where < len(known[:length]):
        raise InvalidArgument(f"tokens[{where}] is {ids[where]}, but the session was opened with {known[where]} there")
    return np.ascontiguousarray(ids[:length])
