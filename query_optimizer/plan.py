"""A plan: a frozen tree, one merge over the access paths of all parts. `str(plan)` is EXPLAIN."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from indexes.errors import InvalidArgument
from indexes.retrieval import Retrieval, retrieval_from_dict, retrieval_to_dict
from query_optimizer.access import WINDOW, Access, Actual, Estimate
from query_optimizer.explain import costs, milliseconds, nodes, passed_over, tiers, wished


@dataclass(frozen=True, slots=True)
class Outcome:
    """How much a plan missed when it was carried out.

    missed: the estimated share of the softmax mass that was left out. missed_bound: an upper bound of that share. missed_true:
    the true share, from exact attention. output_error: relative to exact attention, the mean over the heads.
    """

    missed: float
    missed_bound: float
    missed_true: float
    output_error: float
    planning_seconds: float

    def lines(self, estimated: bool) -> list[str]:
        """The lines of EXPLAIN ANALYZE. estimated: whether what was not read was estimated from pages."""
        missed = f"{self.missed_true:.2%} of the softmax mass (estimated {self.missed:.2%}, bound {self.missed_bound:.2%})"
        return [
            f"Missed: {missed}" + (", for which pages stood in" if estimated else ""),
            f"Output Error: {self.output_error:.2%}, relative to exact attention",
            f"Planning Time: {milliseconds(self.planning_seconds)}",
        ]


@dataclass(frozen=True, slots=True)
class Plan:
    """How the queries of one layer are answered: every part by its access paths, and one merge over all of them.

    retrieval_given: whether the caller named the retrieval. tokens_min, tokens_end: the plan is good for contexts of [tokens_min,
    tokens_end) tokens. wishes: pairs of a part's name and a kind of index that would be used if it were built. notes: lines that
    the session adds to EXPLAIN. actual, outcome: what carrying the plan out took and missed, after EXPLAIN ANALYZE. settled:
    whether nothing that may still be learned of these tokens would change it.
    """

    layer: int
    retrieval: Retrieval
    retrieval_given: bool
    accesses: tuple[Access, ...]
    estimate: Estimate
    tokens_min: int
    tokens_end: int
    wishes: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    actual: Actual | None = None
    outcome: Outcome | None = None
    settled: bool = False
    _rule: str = field(init=False, repr=False, compare=False)  # found once, because every query counts it

    def __post_init__(self) -> None:
        chosen = max(self.accesses, key=lambda access: access.tokens * len(access.heads), default=None)
        object.__setattr__(self, "_rule", WINDOW if chosen is None else chosen.rule)

    @property
    def rule(self) -> str:
        """The name of the rule that decided on the most tokens and heads."""
        return self._rule

    @property
    def searches(self) -> bool:
        """Whether any index is searched."""
        return any(access.index is not None for access in self.accesses)

    @property
    def gave_up(self) -> bool:
        """Whether every search gave up, so that everything was read."""
        return self.searches and self.actual is not None and self.actual.tokens >= self.estimate.tokens

    def holds_for(self, tokens: int) -> bool:
        """Whether the context's length is still in the range that the plan was made for."""
        return self.tokens_min <= tokens < self.tokens_end

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values for machines, which `from_dict` takes."""
        values = asdict(replace(self, accesses=()))
        del values["_rule"]
        return values | {
            "retrieval": retrieval_to_dict(self.retrieval),
            "rule": self.rule,
            "accesses": [access.to_dict() for access in self.accesses],
            "wishes": [list(wish) for wish in self.wishes],
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Plan":
        """The plan that `to_dict` wrote. Raises InvalidArgument for anything else."""
        try:
            given = {name: value for name, value in values.items() if name != "rule"}
            given["accesses"] = tuple(Access.from_dict(access) for access in given["accesses"])
            given["retrieval"] = retrieval_from_dict(given["retrieval"])
            given["estimate"] = Estimate(**given["estimate"])
            given["wishes"] = tuple((part, kind) for part, kind in given["wishes"])
            given["notes"] = tuple(given["notes"])
            given["actual"] = Actual(**given["actual"]) if given["actual"] else None
            given["outcome"] = Outcome(**given["outcome"]) if given["outcome"] else None
            return cls(**given)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InvalidArgument(f"these are not a plan's values ({error}); expected what Plan.to_dict returns") from None

    def explain(self, verbose: bool = False) -> str:
        """EXPLAIN: the tree as PostgreSQL draws one. Where many nodes are alike they are one line.

        verbose: show every node and, behind the tree, the rules that were tried before those that fired, and why they did not.
        """
        who = "asked for" if self.retrieval_given else "chosen by the optimizer"
        lines = [f"Merge on layer {self.layer}  {costs(self.estimate, self.actual)}", f"  Retrieve: {self.retrieval}, {who}"]
        lines += [f"  {line}" for line in (*tiers(self.accesses), *self.notes)]
        if self.gave_up:
            lines.append("  Gave Up: so much was wanted that everything was read")
        lines += nodes(self.accesses, self.retrieval, fold=not verbose)
        lines += wished(self.wishes)
        if self.outcome is not None:
            lines += self.outcome.lines(any(access.estimate_tail for access in self.accesses))
        if self.actual is not None:
            lines.append(f"Execution Time: {milliseconds(self.actual.seconds)}")
        if verbose:
            lines += passed_over(self.accesses)
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()
