"""From facts to a plan: every part goes through the rules until one has fired for each of its KV heads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from indexes.retrieval import Exact, Retrieval
from query_optimizer.access import WINDOW, Access, Estimate, Refusal
from query_optimizer.facts import Facts, PartFacts
from query_optimizer.plan import Plan
from query_optimizer.rule import DEFAULT, Fired, Heads, Rule, Wish, strided

LENGTHS = 1.25
"""A plan is made anew when the context has grown, or is shorter, by this factor."""
ROOM = 64
"""And not before it has grown by so many tokens."""


class UnknownRule(ValueError):
    """A rule was named that does not exist, or that cannot be switched off."""


_Said = tuple[str, Fired, Heads, tuple[Refusal, ...]]
"""A rule, what it said, for which KV heads, and the rules before it that did not fire."""


@dataclass
class _Chosen:
    """What the rules came to. alike: what they said of parts that cannot be searched, by all that rules go by."""

    accesses: list[Access] = field(default_factory=list)
    wishes: list[tuple[str, str]] = field(default_factory=list)
    alike: dict[PartFacts, list["_Said"]] = field(default_factory=dict)


class Optimizer:
    """Applies an ordered list of rules, of which the last always fires. rules_off: names of rules that are passed over.

    by_name: whether a rule may go by what a part is called or how far it was moved, so that each has to be asked of. Raises
    UnknownRule for a name that no rule has. The last rule, which always finds a way, cannot be switched off.
    """

    def __init__(self, rules: Sequence[Rule], rules_off: Sequence[str] = (), *, by_name: bool = False) -> None:
        self._rules = tuple(rules)
        self._by_name = by_name
        self._off = self.check(rules_off)

    def check(self, rules_off: Sequence[str]) -> frozenset[str]:
        """Names of rules that can be switched off. Raises UnknownRule for any other."""
        optional = [rule.name for rule in self._rules[:-1]]
        for name in rules_off:
            if name not in optional:
                raise UnknownRule(f"no rule that can be switched off is named {name!r}; expected one of {', '.join(optional)}")
        return frozenset(rules_off)

    def plan(self, facts: Facts) -> Plan:
        """The plan that the rules come to. Raises UnknownRule for a hint that names no rule."""
        off = self._off | self.check(facts.hints.rules_off) if facts.hints.rules_off else self._off
        chosen = _Chosen()
        for part in facts.parts:
            self._choose(facts, part, off, chosen)
        accesses = tuple(chosen.accesses)
        asked = facts.retrieval is not None
        retrieval = facts.retrieval if facts.retrieval is not None else _retrieval(accesses)
        tokens = facts.tokens
        return Plan(
            layer=facts.layer,
            retrieval=retrieval,
            asked=asked,
            accesses=accesses,
            estimate=_total(facts, accesses),
            tokens_min=int(tokens / LENGTHS),
            tokens_end=max(int(tokens * LENGTHS), tokens + ROOM),
            wishes=tuple(dict.fromkeys(chosen.wishes)),
        )

    def _choose(self, facts: Facts, part: PartFacts, off: frozenset[str], chosen: _Chosen) -> None:
        key = None
        if not part.searchable and not self._by_name:  # hundreds of chunks of one length are one case
            key = replace(part, name="", shift=0, sessions=1)
            if key in chosen.alike:
                chosen.accesses += _accesses(facts, part, chosen.alike[key])
                return
        heads: Heads = tuple(range(facts.kv_heads))
        refusals: list[Refusal] = []
        wishes = len(chosen.wishes)
        found: list[_Said] = []
        for rule in self._rules:
            verdict = "switched off" if rule.name in off else rule.when(facts, part, heads)
            if isinstance(verdict, Fired):
                taken = heads if verdict.heads is None else verdict.heads
                found.append((rule.name, verdict, taken, tuple(refusals)))
                if verdict.wish:
                    chosen.wishes.append((part.name, verdict.wish))
                heads = tuple(head for head in heads if head not in taken)
                if not heads:
                    break
                refusals.append(Refusal(rule.name, f"these {len(heads)} KV heads are not among those it took"))
            elif isinstance(verdict, Wish):
                chosen.wishes.append((part.name, verdict.kind))
                refusals.append(Refusal(rule.name, verdict.reason))
            else:
                refusals.append(Refusal(rule.name, verdict))
        assert not heads, "the last rule must fire"
        if key is not None and len(chosen.wishes) == wishes:
            chosen.alike[key] = found
        chosen.accesses += _accesses(facts, part, found)


def _accesses(facts: Facts, part: PartFacts, found: list[_Said]) -> Iterator[Access]:
    """The ways into one part. What is read whole for all heads is one scan; otherwise the window is one, and goes first."""

    def access(begin: int, end: int, heads: Heads, fired: Fired, rule: str, refusals: tuple[Refusal, ...]) -> Access:
        return Access(
            part=part.name,
            begin=begin,
            end=end,
            visible=part.visible,
            stored=part.stored,
            index=fired.index,
            retrieval=_wanted(facts, fired),
            heads=heads,
            kv_heads=facts.kv_heads,
            tier=part.tier,
            rule=rule,
            estimate=_estimate(facts, part, fired, end - begin, heads),
            reason=fired.reason,
            refusals=refusals,
            estimate_tail=fired.estimate_tail,
            shift=part.shift,
            overlaid=part.overlaid,
            kept_in=fired.kept_in,
        )

    everyone = tuple(range(facts.kv_heads))
    if all(fired.index is None for _, fired, _, _ in found):
        rule, fired, _, refusals = found[0]
        yield access(0, part.visible, everyone, fired, rule, refusals)
        return
    if part.begin:
        yield access(0, part.begin, everyone, Fired(), WINDOW, ())
    for rule, fired, heads, refusals in found:
        yield access(part.begin, part.end, heads, fired, rule, refusals)
    if part.end < part.visible:
        yield access(part.end, part.visible, everyone, Fired(), WINDOW, ())


def _wanted(facts: Facts, fired: Fired) -> Retrieval:
    if fired.index is None:
        return Exact()
    if facts.retrieval is not None:
        return facts.retrieval
    return DEFAULT if fired.retrieval is None else fired.retrieval


def _retrieval(accesses: tuple[Access, ...]) -> Retrieval:
    """What most searched tokens are retrieved by; exact where none are."""
    searched = [access for access in accesses if access.index is not None]
    if not searched:
        return Exact()
    return max(searched, key=lambda access: access.tokens * len(access.heads)).retrieval


def _estimate(facts: Facts, part: PartFacts, fired: Fired, tokens: int, heads: Heads) -> Estimate:
    share = len(heads) / facts.kv_heads
    if fired.index is None:
        seconds = part.seconds * tokens / max(part.visible, 1) * strided(share)
        return Estimate(tokens, round(tokens * facts.token_nbytes * share), seconds)
    index = next(index for index in part.indexes if index.kind == fired.index)
    estimated = fired.estimate_tail and index.tail_seconds is not None
    seconds = index.tail_seconds if estimated and index.tail_seconds is not None else index.seconds
    return Estimate(tokens, round(index.nbytes * share), seconds * share)


def _total(facts: Facts, accesses: tuple[Access, ...]) -> Estimate:
    searched = any(access.index is not None for access in accesses)
    fixed = facts.step_seconds if searched else facts.call_seconds
    sides = [0.0, 0.0]  # what lies in fast memory is read at the same time as the rest
    for access in accesses:
        sides[facts.fast is not None and access.tier == facts.fast.tier] += access.estimate.seconds
    seconds = fixed + max(sides)
    return Estimate(facts.tokens, sum(access.estimate.nbytes for access in accesses), seconds)
