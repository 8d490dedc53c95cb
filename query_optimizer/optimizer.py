"""From facts to a plan, by the first rule that fires."""

from collections.abc import Sequence

from query_optimizer.facts import Facts
from query_optimizer.plan import Access, Plan, Refusal
from query_optimizer.rules import Asked, Fired, NoIndex, Rule, ShortContext


class UnknownRule(ValueError):
    """A rule was named that does not exist."""


def base_rules(short_context_tokens: int) -> tuple[Rule, ...]:
    """The rules in their order."""
    return (Asked(), ShortContext(short_context_tokens), NoIndex())


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
    accesses = tuple(
        Access(part.name, "Exact scan", part.tier, part.visible, part.stored, part.visible * facts.token_nbytes)
        for part in facts.parts
    )
    return Plan(facts.layer, fired.retrieval, rule, accesses, refusals, fired.tokens_min, fired.tokens_end)
