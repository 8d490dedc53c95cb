"""`kvdb explain`: the plans of a query behind a context on a server."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from kvdb.commands.arguments import Subparsers, add_command, add_context, add_index, add_retrieval, open_server, retrieval_of
from kvdb.commands.output import table as in_columns
from kvdb.errors import InvalidArgument
from kvdb.types import SessionInfo
from query_optimizer.plan import Plan
from query_optimizer.query_options import Hints, QueryOptions

TEXTS = {"retrieval", "way", "rule"}
"""The columns that are aligned to the left."""


def add(commands: Subparsers) -> None:
    """Add `explain` to the `kvdb` command."""
    what = "say how a query over a context, or of an open session, is answered, and by which rule"
    parser = add_command(commands, "explain", what, _explain)
    add_context(parser, without="see --session")
    parser.add_argument(
        "--session",
        metavar="LABEL",
        nargs="?",
        const="",
        help="explain the next query of the open session with this label, such as a request's id; without it list them",
    )
    parser.add_argument("--layer", type=int, help="the plan of this layer (default: a line for each)")
    parser.add_argument(
        "--analyze", action="store_true", help="carry the plan out, for queries that were kept when the context was stored"
    )
    parser.add_argument("--verbose", action="store_true", help="show the rules that were tried before, and why they did not fire")
    add_retrieval(parser, "the optimizer decides")
    parser.add_argument("--max-missed-mass", type=float, help="read on until at most this share of the mass can be missing")
    parser.add_argument("--estimate-tail", action="store_true", help="add an estimate of what is not retrieved")
    parser.add_argument("--error-max", type=float, help="error that the answer may have, 0 to 1 (default: the server's)")
    add_index(parser, "--index", "kind of index to search (default: any)", None)
    parser.add_argument("--rules-off", metavar="A,B", default="", help="names of rules that are passed over")
    parser.add_argument("--memory-budget", type=int, metavar="BYTES", help="for the window and the indexes of one layer")
    parser.add_argument("--json", action="store_true", help="plans as JSON objects, one a line")


def _explain(given: argparse.Namespace) -> int:
    options = QueryOptions(retrieval_of(given), given.max_missed_mass, given.estimate_tail, _hints(given), given.error_max)
    if (given.name is None) == (given.session is None):
        raise InvalidArgument("kvdb explain takes the name of a context or --session; expected one of the two")
    with open_server(given) as db:
        if given.session == "":
            print(sessions(db.sessions(), as_json=given.json))
            return 0
        explain, name = (db.explain, given.name) if given.session is None else (db.explain_session, given.session)
        plans = explain(name, given.layer, analyze=given.analyze, options=options)
    if given.json:
        print("\n".join(json.dumps(plan.to_dict()) for plan in plans))
    elif given.layer is None and not given.verbose:
        print(table(plans))
    else:
        print("\n\n".join(plan.explain(given.verbose) for plan in plans))
    return 0


def sessions(told: Sequence[SessionInfo], *, as_json: bool) -> str:
    """A line for each open session, or a JSON object."""
    if as_json:
        return "\n".join(json.dumps(asdict(session)) for session in told)
    lines = [f"{one.tokens:,} tokens, {one.reused:,} of them stored, {one.queries:,} queries  {one.label}" for one in told]
    return "\n".join(lines) or "no open session has a label"


def _hints(given: argparse.Namespace) -> Hints:
    """Raises InvalidArgument."""
    rules = tuple(name.strip() for name in given.rules_off.split(",") if name.strip())
    return Hints(given.index, rules, given.memory_budget)


def table(plans: Sequence[Plan]) -> str:
    """A line for each plan, and one for all of them.

    way: how most of the tokens are read, with the number of KV heads where heads differ. scanned: the share of all tokens that
    was looked at in any form. read: the share of all tokens that was attended. A retrieval that all plans share stands above the
    table.
    """
    analyzed = all(plan.actual is not None and plan.outcome is not None for plan in plans)
    retrievals = {str(plan.retrieval) for plan in plans}
    rows = [_names(plan, len(retrievals) > 1) | _figures([plan], analyzed) for plan in plans]
    rows.append({"layer": "all"} | _figures(plans, analyzed))
    columns = list(rows[0])
    cells = [columns, *([row.get(name, "") for name in columns] for row in rows)]
    tokens = plans[0].estimate.tokens
    head = f"{tokens:,} tokens, {plans[0].accesses[0].kv_heads if plans[0].accesses else 0} KV heads"
    if len(retrievals) == 1:
        head += f", {retrievals.pop()} {'asked for' if plans[0].retrieval_given else 'chosen by the optimizer'}"
    return f"{head}\n{in_columns(cells, TEXTS)}"


def _names(plan: Plan, names_retrieval: bool) -> dict[str, str]:
    retrieval = {"retrieval": str(plan.retrieval)} if names_retrieval else {}
    return {"layer": str(plan.layer), **retrieval, "way": _way(plan), "rule": plan.rule}


def _figures(plans: Sequence[Plan], analyzed: bool) -> dict[str, str]:
    """The figures of one plan or several: the sum of times and bytes, the mean of shares, the largest bound."""
    row = {"cost ms": f"{1e3 * sum(plan.estimate.seconds for plan in plans):,.2f}"}
    if not analyzed:
        return row | {"bytes MiB": f"{sum(plan.estimate.nbytes for plan in plans) / (1 << 20):,.1f}"}
    actuals = [plan.actual for plan in plans if plan.actual is not None]
    outcomes = [plan.outcome for plan in plans if plan.outcome is not None]
    tokens = max(sum(plan.estimate.tokens for plan in plans), 1)
    return row | {
        "actual": f"{1e3 * sum(actual.seconds for actual in actuals):,.2f}",
        "scanned": f"{sum(actual.scanned for actual in actuals) / tokens:.1%}",
        "read": f"{sum(actual.tokens for actual in actuals) / tokens:.1%}",
        "missed": f"{sum(outcome.missed_true for outcome in outcomes) / len(outcomes):.2%}",
        "bound": f"{max(outcome.missed_bound for outcome in outcomes):.2%}",
        "error": f"{sum(outcome.output_error for outcome in outcomes) / len(outcomes):.2%}",
    }


def _way(plan: Plan) -> str:
    """How most tokens of each KV head are read, with counts where heads differ."""
    if not plan.accesses:
        return "nothing"
    heads = range(plan.accesses[0].kv_heads)
    end = ", gave up" if plan.gave_up else ""
    most = [max((one for one in plan.accesses if head in one.heads), key=lambda access: access.tokens) for head in heads]
    ways = Counter("exact" if access.index is None else access.index for access in most)
    if len(ways) == 1:
        return next(iter(ways)) + end
    return ", ".join(f"{name} {count}" for name, count in ways.most_common()) + end
