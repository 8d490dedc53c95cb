"""The keywords by which a caller says what a query asks for, and the one value that they become."""

from typing import Any, TypedDict, Unpack, cast

from indexes.retrieval import Retrieval
from kvdb.client.known_keywords import check_keywords
from kvdb.errors import InvalidArgument
from query_optimizer.query_options import NO_OPTIONS, Hints, QueryOptions


class QueryKeywords(TypedDict, total=False):
    """The keywords that every query takes in place of `options`: the fields of `kvdb.QueryOptions`."""

    retrieval: Retrieval | None
    max_missed_mass: float | None
    estimate_tail: bool
    hints: Hints | None
    error_max: float | None


def query_options(options: QueryOptions | None, **keywords: Unpack[QueryKeywords]) -> QueryOptions:
    """`options`, or what the keywords say. Raises InvalidArgument for both together, for other keywords, and for values
    that cannot be."""
    given: dict[str, Any] = {**keywords}
    if given:
        check_keywords("a query", given, QueryKeywords.__annotations__)
    if options is None:
        return QueryOptions(**given) if given else NO_OPTIONS
    if not isinstance(options, QueryOptions):
        raise InvalidArgument(f"options are {options!r}; expected kvdb.QueryOptions(retrieval, max_missed_mass, ...), or None")
    if given:
        raise InvalidArgument(
            f"a query was given options= and {', '.join(f'{name}=' for name in given)}; expected one value, "
            "so put everything into kvdb.QueryOptions, or leave options= out"
        )
    return options


def keywords_in(given: dict[str, Any]) -> QueryKeywords:
    """Remove the keywords of a query from others, which stay."""
    taken: Any = {name: given.pop(name) for name in QueryKeywords.__annotations__ if name in given}
    return cast(QueryKeywords, taken)
