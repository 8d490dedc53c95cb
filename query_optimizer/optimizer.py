"""The optimizer turns facts into a plan: it takes every part through the rules until one has fired for each of its KV heads."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from indexes.retrieval import Exact, Retrieval
from query_optimizer.access import WINDOW, Access, Estimate, Refusal
from query_optimizer.facts import Facts, PartFacts
from query_optimizer.plan import Plan
from query_optimizer.rule import DEFAULT, Fired, Heads, Rule, Wish, piecewise_cost

LENGTH_FACTOR = 1.25
"""A plan is made anew when the context has grown or shrunk by this factor, unless its rules say that they would fire alike."""
GROWTH_MIN = 64
"""A plan is not made anew before the context has grown by this number of tokens."""


class UnknownRule(ValueError):
    """A rule was named that does not exist, or that cannot be switched off."""


_Decision = tuple[str, Fired, Heads, tuple[Refusal, ...]]
"""The name of a rule that fired, its verdict, the KV heads that it decided on, and the rules before it that did not fire."""


@dataclass
class _Chosen:
    """What the rules have decided so far. alike: their decisions on parts that cannot be searched, by the facts that rules look
    at. tokens_end: of fewer tokens, they would decide the same."""

    accesses: list[Access] = field(default_factory=list)
    wishes: list[tuple[str, str]] = field(default_factory=list)
    alike: dict[PartFacts, list["_Decision"]] = field(default_factory=dict)
    tokens_end: int = sys.maxsize


class Optimizer:
    """Applies an ordered list of rules, of which the last always fires.

    rules_off: names of rules that are switched off; the last rule cannot be. by_name: whether a rule may look at a part's name or
    shift, in which case every part has to be taken through the rules. Raises UnknownRule for a name that no rule has.
    """

    def __init__(self, rules: Sequence[Rule], rules_off: Sequence[str] = (), *, by_name: bool = False) -> None:
        self._rules = tuple(rules)
        self._by_name = by_name
        self._off = self.check(rules_off)

    def check(self, rules_off: Sequence[str]) -> frozenset[str]:
        """The names as a set. Raises UnknownRule for a name that no rule has, and for the name of the last rule."""
        optional = [rule.name for rule in self._rules[:-1]]
        for name in rules_off:
            if name not in optional:
                raise UnknownRule(f"no rule that can be switched off is named {name!r}; expected one of {', '.join(optional)}")
        return frozenset(rules_off)

    def plan(self, facts: Facts) -> Plan:
        """The plan for these facts. Raises UnknownRule for a hint that names no rule."""
        off = self._off | self.check(facts.hints.rules_off) if facts.hints.rules_off else self._off
        chosen = _Chosen()
        for part in facts.parts:
            self._choose(facts, part, off, chosen)
        accesses = tuple(chosen.accesses)
        retrieval_given = facts.retrieval is not None
        retrieval = facts.retrieval if facts.retrieval is not None else _main_retrieval(accesses)
        tokens = facts.tokens
        # What a GPU takes depends on the length, and so may whatever rules of the caller's refuse.
        open_ended = not accesses or self._by_name or facts.fast is not None
        decided_until = 0 if open_ended else chosen.tokens_end
        return Plan(
            layer=facts.layer,
            retrieval=retrieval,
            retrieval_given=retrieval_given,
            accesses=accesses,
            estimate=_total(facts, accesses),
            tokens_min=int(tokens / LENGTH_FACTOR),
            tokens_end=max(int(tokens * LENGTH_FACTOR), tokens + GROWTH_MIN, decided_until),
            wishes=tuple(dict.fromkeys(chosen.wishes)),
            settled=tokens < decided_until,
        )

    def _choose(self, facts: Facts, part: PartFacts, off: frozenset[str], chosen: _Chosen) -> None:
        key = None
        if not part.searchable and not self._by_name:  # hundreds of chunks of one length are one case
            key = replace(part, name="", shift=0, sessions=1, key_error=0.0, value_error=0.0)
            if key in chosen.alike:
                chosen.accesses += _accesses(facts, part, chosen.alike[key])
                return
        heads: Heads = tuple(range(facts.kv_heads))
        refusals: list[Refusal] = []
        wishes = len(chosen.wishes)
        decisions: list[_Decision] = []
        for rule in self._rules:
            verdict = "switched off" if rule.name in off else rule.when(facts, part, heads)
            if isinstance(verdict, Fired | tuple):
                for fired in (verdict,) if isinstance(verdict, Fired) else verdict:
                    taken = heads if fired.heads is None else fired.heads
                    decisions.append((rule.name, fired, taken, (*refusals, *fired.refusals)))
                    chosen.tokens_end = min(chosen.tokens_end, fired.tokens_end)
                    if fired.wish:
                        chosen.wishes.append((part.name, fired.wish))
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
            chosen.alike[key] = decisions
        chosen.accesses += _accesses(facts, part, decisions)


def _accesses(facts: Facts, part: PartFacts, decisions: list[_Decision]) -> Iterator[Access]:
    """The accesses of one part. A part that all heads read whole is one scan; otherwise all heads read the window, and then each
    its own way."""

    def access(begin: int, end: int, heads: Heads, fired: Fired, rule: str, refusals: tuple[Refusal, ...]) -> Access:
        return Access(
            part=part.name,
            begin=begin,
            end=end,
            visible=part.visible,
            stored=part.stored,
            index=fired.index,
            retrieval=_retrieval_of(facts, fired),
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
            format=part.format,
            key_error=part.key_error,
            value_error=part.value_error,
        )

    everyone = tuple(range(facts.kv_heads))
    if all(fired.index is None for _, fired, _, _ in decisions):
        rule, fired, _, refusals = decisions[0]
        yield access(0, part.visible, everyone, fired, rule, refusals)
        return
    if part.begin:
        yield access(0, part.begin, everyone, Fired(), WINDOW, ())
    for rule, fired, heads, refusals in decisions:
        yield access(part.begin, part.end, heads, fired, rule, refusals)
    if part.end < part.visible:
        yield access(part.end, part.visible, everyone, Fired(), WINDOW, ())


def _retrieval_of(facts: Facts, fired: Fired) -> Retrieval:
    if fired.index is None:
        return Exact()
    if facts.retrieval is not None:
        return facts.retrieval
    return DEFAULT if fired.retrieval is None else fired.retrieval


def _main_retrieval(accesses: tuple[Access, ...]) -> Retrieval:
    """The retrieval that searches the most tokens; exact where nothing is searched."""
    searched = [access for access in accesses if access.index is not None]
    if not searched:
        return Exact()
    return max(searched, key=lambda access: access.tokens * len(access.heads)).retrieval


def _estimate(facts: Facts, part: PartFacts, fired: Fired, tokens: int, heads: Heads) -> Estimate:
    share = len(heads) / facts.kv_heads
    if fired.index is None:
        seconds = part.seconds * tokens / max(part.visible, 1) * piecewise_cost(share)
        token_nbytes = facts.token_nbytes if part.token_nbytes is None else part.token_nbytes
        return Estimate(tokens, round(tokens * token_nbytes * share), seconds)
    index = next(index for index in part.indexes if index.kind == fired.index)
    estimated = fired.estimate_tail and index.tail_seconds is not None
    seconds = index.tail_seconds if estimated and index.tail_seconds is not None else index.seconds
    return Estimate(tokens, round(index.nbytes * share), seconds * share)


def _total(facts: Facts, accesses: tuple[Access, ...]) -> Estimate:
    searched = any(access.index is not None for access in accesses)
    fixed = facts.step_seconds if searched else facts.call_seconds
    seconds_by_tier = [0.0, 0.0]  # fast memory is read at the same time as the rest
    for access in accesses:
        seconds_by_tier[facts.fast is not None and access.tier == facts.fast.tier] += access.estimate.seconds
    seconds = fixed + max(seconds_by_tier)
    return Estimate(facts.tokens, sum(access.estimate.nbytes for access in accesses), seconds)
