"""`kvdb stats`: how a server is used and what it holds, or statistics of the queries over a context, also as a heat map."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import kvdb.commands.heat_map as heat_map
import kvdb.validate as validate
from kvdb.commands.arguments import Subparsers, add_command, add_context, open_server
from kvdb.commands.measures import DRAWN, text_map
from kvdb.commands.stats_table import audited, heads_of_layer, space_taken, summary, tiers, used
from kvdb.errors import InvalidArgument
from kvdb.types import ERROR, ContextInfo, ContextStatistics, SegmentStatistics
from kvdb.types.measures import is_known, overall

LEGEND = """\
retrieved: the share of the searched tokens that a query needs. sharpness: the softmax weight of its
largest token. window hits: queries whose largest token lies in the window. dense: queries for which
reading everything costs less than searching, so that the search gave up; heads where it gave up on
at least half."""


def add(commands: Subparsers) -> None:
    """Add `stats` to the `kvdb` command."""
    what = "show how a server is used and what memory holds, or statistics of the queries over a context by layer and head"
    parser = add_command(commands, "stats", what, _run)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--by", choices=("layer", "head"), default="layer", help="what each row of the table stands for (default layer)"
    )
    shown.add_argument("--layer", type=int, metavar="N", help="show each head of this layer instead")
    parser.add_argument("--measure", choices=DRAWN, help="show a map of this measure instead, layers down and heads across")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the measure, or all of them, as a heat map")
    parser.add_argument("--json", action="store_true", help="print what is shown without a name as one JSON object, for machines")
    add_context(parser, without="how the server is used, and what each tier of memory holds")


def _run(given: argparse.Namespace) -> int:
    if given.name is None:
        if given.png or given.measure or given.layer is not None:
            raise InvalidArgument("--png, --measure and --layer show a context; expected its name")
        with open_server(given) as db:
            now, held, space = db.status(), db.tiers(), db.space()
        if given.json:
            print(json.dumps({**asdict(now), "tiers": [asdict(tier) for tier in held], **asdict(space)}))
        else:
            print(f"{used(now)}\n\n{tiers(held)}\n\n{space_taken(space)}")
        return 0
    if given.json:
        raise InvalidArgument("--json is of what memory holds; expected no name of a context")
    with open_server(given) as db:
        info, statistics = db.get(given.name).info, db.statistics(given.name)
    if given.layer is not None:
        validate.place(info.spec, given.layer)
    measures = [given.measure] if given.measure else [measure for measure in DRAWN if is_known(statistics, measure)]
    if not measures or not is_known(statistics, measures[0]):
        unseen = f"query of one token has searched an index of {given.name!r}"
        if given.measure == ERROR:
            unseen = f"answer over {given.name!r} was compared with an exact one"
        print(f"no {unseen} yet: kvdb indexes shows which indexes there are, kvdb explain why queries read everything")
        return 1 if given.png else 0
    if given.measure:
        print(f"{_head(info)}\n\n{text_map(given.measure, overall(statistics, given.measure))}")
    else:
        print(_text(info, statistics, given.by, given.layer))
    if given.png:
        heat_map.draw(info, statistics, measures, given.png)
        print(f"\nheat map: {given.png}")
    return 0


def _head(info: ContextInfo) -> str:
    spec = info.spec
    shape = f"{spec.q_heads} query heads on {spec.kv_heads} KV heads" if spec.uniform else spec.shapes
    return f"{info.name}: {info.tokens:,} tokens, {spec.layers} layers, {shape}"


def _heads(info: ContextInfo, segment: SegmentStatistics, layer: int) -> str:
    shape = info.spec.shape(validate.place(info.spec, layer))
    return heads_of_layer(segment, layer, shape.kv_heads, shape.q_heads)


def _text(info: ContextInfo, statistics: ContextStatistics, by: str, layer: int | None) -> str:
    segments = [segment for segment in statistics.segments if segment.queries.any()]
    texts = [_head(info)]
    for segment in segments:
        where = f"segment {segment.segment}, {segment.tokens:,} tokens"
        if layer is None:
            texts.append(f"{where}\n{summary(segment, by)}")
        else:
            texts.append(f"{where}, layer {layer}\n{_heads(info, segment, layer)}")
    if len(segments) < len(statistics.segments):
        texts.append(f"segments of which no search was observed: {len(statistics.segments) - len(segments)}")
    if is_known(statistics, ERROR):
        texts.append(audited(overall(statistics, ERROR)))
    return "\n\n".join([*texts, LEGEND])
