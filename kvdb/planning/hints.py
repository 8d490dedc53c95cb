"""Checks whether the hints of a caller can be followed."""

import indexes.registry as registry
import kvdb.validate as validate
from indexes.retrieval import Exact
from kvdb.config import Config
from kvdb.errors import InvalidArgument, Unsupported
from kvdb.planning.parts import Part
from kvdb.types import LayerShape
from query_optimizer.optimizer import Optimizer, UnknownRule
from query_optimizer.query_options import QueryOptions
from query_optimizer.rules import Hinted


def check_hints(config: Config, optimizer: Optimizer, shape: LayerShape, parts: list[Part], options: QueryOptions) -> None:
    """Raises InvalidArgument for hints that name no rule or kind of index, contradict what is asked for or leave no room for the
    window, and Unsupported for a kind whose library is missing. parts: the parts of the queried layer."""
    hints = options.hints
    try:
        optimizer.check(hints.rules_off)
    except UnknownRule as error:
        raise InvalidArgument(f"Hints.rules_off: {error}") from None
    tokens = config.window.sink_tokens + config.window.recent_tokens
    least = tokens * shape.token_nbytes
    if hints.memory_budget is not None and hints.memory_budget < least:
        raise InvalidArgument(
            f"Hints.memory_budget is {hints.memory_budget:,} bytes, below the window: its {tokens:,} tokens take {least:,} "
            f"bytes in a layer; expected at least that, or None for no limit"
        )
    if hints.index is not None and Hinted.name in hints.rules_off:
        raise InvalidArgument(
            f"Hints.index is {hints.index!r} and Hints.rules_off names {Hinted.name!r}, which follows it; expected one of the two"
        )
    if hints.index is not None:
        _check_index(config, parts, validate.kind(hints.index), options)


def _check_index(config: Config, parts: list[Part], kind: str, options: QueryOptions) -> None:
    if options.error_max == 0:
        raise InvalidArgument(
            f"Hints.index is {kind!r}, but with an error_max of 0 attention is exact, which reads everything; "
            "expected index=None, or another error_max"
        )
    if isinstance(options.retrieval, Exact):
        raise InvalidArgument(
            f"Hints.index is {kind!r}, but exact attention reads everything; expected index=None, or another retrieval"
        )
    if not any(part.span.tokens for part in parts):
        least = config.indexes.segment_tokens_min
        held = ", ".join(f"{part.name} of {part.visible:,} tokens" for part in parts) or "nothing"
        raise InvalidArgument(
            f"Hints.index is {kind!r}, but no part of the layer can have an index ({held}, and outside of the "
            f"window at least {least:,} tokens are needed); expected index=None"
        )
    if not any(kind in part.kinds for part in parts):
        missing = registry.missing_library(kind)
        if missing is not None:
            raise Unsupported(
                f"Hints.index is {kind!r}, which needs {missing}, which is not installed; pip install 'kvdb[hnsw]', or "
                f"choose one of {', '.join(name for name in registry.KINDS if registry.missing_library(name) is None)}"
            )
