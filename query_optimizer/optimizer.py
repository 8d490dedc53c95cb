"""From facts to a plan, by the first rule that fires."""

from collections.abc import Iterator, Sequence

from indexes.retrieval import Exact, Retrieval
from query_optimizer.facts import Facts, PartFacts
from query_optimizer.plan import Access, Plan, Refusal
from query_optimizer.rules import Asked, Fired, Indexed, NoIndex, Rule, ShortContext


class UnknownRule(ValueError):
    """A rule was named that does not exist."""


def base_rules(short_context_tokens: int) -> tuple[Rule, ...]:
    """The rules in their order."""
    return (Asked(), ShortContext(short_context_tokens), Indexed(), NoIndex())


class Optimizer:
    """Applies an ordered list of rules. rules_off: names of rules that are passed over.

    Raises UnknownRule for a name that no rule has. The last rule, which always finds a way, cannot be switched off.
    """

    def __init__(self, rules: Sequence[Rule], rules_off: Sequence[str] = ()) -> None:
        optional = [rule.name for rule in rules[:-1]]
        for name in rules_off:
            if name not in optional:
                raise UnknownRule(f"no rule that can be switched off is named {name!r}; expected one of {', '.join(optional)}")
        self._rules = tuple(rules)
        self._off = frozenset(rules_off)

    def plan(self, facts: Facts) -> Plan:
        """The plan of the first rule that fires, with the reasons of those before it."""
        refusals: list[Refusal] = []
        for rule in self._rules:
            verdict = "switched off" if rule.name in self._off else rule.when(facts)
            if isinstance(verdict, Fired):
                return _plan(facts, rule.name, verdict, tuple(refusals))
            refusals.append(Refusal(rule.name, verdict))
        raise AssertionError("the last rule must fire")


def _plan(facts: Facts, rule: str, fired: Fired, refusals: tuple[Refusal, ...]) -> Plan:
    accesses = tuple(access for part in facts.parts for access in _accesses(part, facts.token_nbytes, fired.retrieval))
    return Plan(facts.layer, fired.retrieval, rule, accesses, refusals, fired.tokens_min, fired.tokens_end)


def _accesses(part: PartFacts, token_nbytes: int, retrieval: Retrieval) -> Iterator[Access]:
    """The ways into one part: the index that reads least, and the tokens that are read whole."""
    searched = 0
    if part.indexes and not isinstance(retrieval, Exact):
        index = min(part.indexes, key=lambda index: index.nbytes)
        searched = part.searchable
        path = f"Index search ({index.kind})"
        yield Access(part.name, path, part.tier, searched, part.stored, round(index.nbytes), index.kind)
    rest = part.visible - searched
    if rest:
        name = f"{part.name}, window" if searched else part.name
        yield Access(name, "Exact scan", part.tier, rest, part.stored if not searched else rest, rest * token_nbytes)
