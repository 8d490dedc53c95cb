"""What `kv_connector_extra_config` says of attention under "attention": which requests kvdb answers, and how."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import kvdb
from indexes.retrieval import Retrieval
from kvdb.errors import InvalidArgument
from query_optimizer.query_options import QueryOptions

RETRIEVALS: dict[str, type[kvdb.Dipr] | type[kvdb.TopK] | type[kvdb.TopP]] = {
    "dipr": kvdb.Dipr,
    "top_k": kvdb.TopK,
    "top_p": kvdb.TopP,
}
EXACT = "exact"


@dataclass(frozen=True)
class AttentionOptions:
    """from_tokens: how many tokens a request has at least that kvdb answers; shorter ones stay with vLLM's own kernel. query:
    what each query asks for."""

    from_tokens: int
    query: QueryOptions

    @classmethod
    def parse(cls, given: Any) -> "AttentionOptions | None":
        """Read what a configuration names: `from_tokens`, `retrieval` ("exact", `{"dipr": alpha}`, `{"top_k": k}`, `{"top_p":
        p}`, or null for the optimizer's choice), and fields of `kvdb.QueryOptions` but hints. None where nothing is given. Raises
        InvalidArgument."""
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise InvalidArgument(f'attention is {given!r}; expected an object such as {{"from_tokens": 4096}}')
        rest = dict(given)
        from_tokens = rest.pop("from_tokens", None)
        if type(from_tokens) is not int or from_tokens < 1:
            raise InvalidArgument(f"attention.from_tokens is {from_tokens!r}; expected a number of tokens, at least 1")
        retrieval = _retrieval(rest.pop("retrieval", None))
        known = {field.name for field in fields(QueryOptions)} - {"retrieval", "hints"}
        if unknown := sorted(set(rest) - known):
            raise InvalidArgument(
                f"attention names {', '.join(unknown)}; expected from_tokens, retrieval, {', '.join(sorted(known))}"
            )
        return cls(from_tokens, QueryOptions(retrieval, **rest))


def _retrieval(given: Any) -> Retrieval | None:
    if given is None:
        return None
    if given == EXACT:
        return kvdb.Exact()
    if isinstance(given, Mapping) and len(given) == 1:
        ((name, value),) = given.items()
        if name in RETRIEVALS:
            return RETRIEVALS[name](value)
    raise InvalidArgument(
        f'attention.retrieval is {given!r}; expected "exact", {{"dipr": alpha}}, {{"top_k": k}} or {{"top_p": p}}'
    )
