"""Rules that a caller adds to those of the optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from query_optimizer.facts import Facts, PartFacts
from query_optimizer.rule import Fired, Heads, Rule, Wish


class BadRule(ValueError):
    """A rule cannot be added: it lacks something, its name is taken, or it stands before a rule that does not exist."""


class PlacedRule(Rule, Protocol):
    """A rule that a caller adds. before: the name of the rule that is tried next."""

    @property
    def before(self) -> str: ...


@dataclass(frozen=True)
class CheckedRule:
    """An added rule whose impossible verdicts count as refusals, so that no query fails because of it."""

    rule: Rule

    @property
    def name(self) -> str:
        return self.rule.name

    def when(self, facts: Facts, part: PartFacts, heads: Heads) -> Fired | tuple[Fired, ...] | Wish | str:
        verdict: object = self.rule.when(facts, part, heads)
        if isinstance(verdict, Wish | str):
            return verdict
        left = heads
        for fired in verdict if isinstance(verdict, tuple) and verdict else (verdict,):
            if not isinstance(fired, Fired):
                return f"it answered {verdict!r}, which is no verdict"
            if fired.index is not None and fired.index not in [index.kind for index in facts.affordable(part)]:
                return f"it chose {fired.index}, which may not be searched here"
            if fired.heads is not None and not (fired.heads and set(fired.heads) <= set(left)):
                return f"it chose the KV heads {fired.heads}, of which some are not left"
            left = tuple(head for head in left if fired.heads is not None and head not in fired.heads)
        return verdict if isinstance(verdict, Fired | tuple) else f"it answered {verdict!r}, which is no verdict"


def add_rules(base: Sequence[Rule], added: Sequence[PlacedRule]) -> tuple[Rule, ...]:
    """The rules in their order, with each added rule right before the one that it names. Raises BadRule."""
    rules = list(base)
    for rule in added:
        name, before = getattr(rule, "name", None), getattr(rule, "before", None)
        if not isinstance(name, str) or not name or not callable(getattr(rule, "when", None)):
            raise BadRule(f"{rule!r} is no rule; expected a name, before and when(facts, part, heads)")
        names = [known.name for known in rules]
        if name in names:
            raise BadRule(f"two rules are named {name!r}; expected a name that is none of {', '.join(names)}")
        if before not in names:
            raise BadRule(f"rule {name!r} stands before {before!r}, which is none; expected one of {', '.join(names)}")
        rules.insert(names.index(before), CheckedRule(rule))
    return tuple(rules)
