"""The leaves of a plan: how the tokens of one part are read."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from indexes.retrieval import Retrieval, retrieval_from_dict, retrieval_to_dict
from query_optimizer.ways import Way

WINDOW = "window"
"""The rule's name on accesses that are read whole because they are the window."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a node is expected to cost. tokens: the number of tokens looked at. nbytes: the number of bytes read."""

    tokens: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Actual:
    """What a node cost when it was carried out.

    tokens: the number of tokens attended, a mean over the queries. scanned: the number of tokens looked at in any form.
    left_heads: how many KV heads were read whole because the search gave up on one of their queries.
    """

    tokens: float
    scanned: float
    nbytes: int
    seconds: float
    left_heads: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rule that was tried before the one that fired, and why it did not fire; or a way of answering that this one passed
    over, and why."""

    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class Access:
    """How tokens [begin, end) of one part are read, and by which rule.

    index: the kind that is searched for what `retrieval` needs, None where all is read. stored: tokens of the part, of which
    `visible` count. heads: the KV heads that are read this way, of kv_heads. estimate_tail: whether what is not retrieved is
    estimated. shift: by how many positions the part was moved. overlaid: how many of its tokens were recomputed and are masked
    here. tier: where the tokens lie. kept_in: the tier that holds a copy. reason: why the rule fired. refusals: the rules that
    were tried before it. format: how the part is quantized, "" where it is not. key_error, value_error: the relative errors
    of its keys and values that quantizing left, over all layers.
    """

    part: str
    begin: int
    end: int
    visible: int
    stored: int
    index: str | None
    retrieval: Retrieval
    heads: tuple[int, ...]
    kv_heads: int
    tier: str
    rule: str
    estimate: Estimate
    reason: str = ""
    refusals: tuple[Refusal, ...] = ()
    estimate_tail: bool = False
    shift: int = 0
    overlaid: int = 0
    kept_in: str | None = None
    format: str = ""
    key_error: float = 0.0
    value_error: float = 0.0
    actual: Actual | None = None

    @property
    def tokens(self) -> int:
        return self.end - self.begin

    @property
    def way(self) -> Way | None:
        """The way in which the heads are answered, None where all is read."""
        return None if self.index is None else Way(self.index, self.retrieval, self.estimate_tail)

    @property
    def all_heads(self) -> bool:
        return len(self.heads) == self.kv_heads

    def to_dict(self) -> dict[str, Any]:
        """The access as plain values, which `from_dict` takes."""
        changed = {"retrieval": retrieval_to_dict(self.retrieval), "heads": list(self.heads)}
        values = asdict(self) | changed
        return values | {"refusals": list(values["refusals"])}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Access":
        """The access that `to_dict` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        given = dict(values)
        given["retrieval"] = retrieval_from_dict(given["retrieval"])
        given["heads"] = tuple(given["heads"])
        given["estimate"] = Estimate(**given["estimate"])
        given["actual"] = Actual(**given["actual"]) if given["actual"] else None
        given["refusals"] = tuple(Refusal(**refusal) for refusal in given["refusals"])
        return cls(**given)
