"""docs/observability.md lists every metric and every event, with its type, its labels and its level."""

import logging
import re
from pathlib import Path

from kvdb.events import Kind
from kvdb.server.log import LEVELS
from kvdb.server.serve import Server

DOCUMENT = (Path(__file__).parents[4] / "docs" / "observability.md").read_text()


def families(server: Server):
    return {family.name: family for family in server.registry.collect() if family.name.startswith("kvdb_")}


def test_every_metric_is_documented_and_no_other(serve):
    listed = re.findall(r"^\| `(kvdb_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", DOCUMENT, re.MULTILINE)
    found = {
        (name + ("_total" if family.type == "counter" else ""), family.type, family.documentation)
        for name, family in families(serve()).items()
    }
    assert {(name, kind, told) for name, kind, _, told in listed} == found


def test_the_documented_labels_are_those_of_the_samples(serve):
    server = serve()
    labels = {}
    for family in families(server).values():
        for sample in family.samples:
            labels.setdefault(family.name, set()).update(set(sample.labels) - {"le"})
    for name, listed in re.findall(r"^\| `(kvdb_\w+)` \| \w+ \| (.*?) \|", DOCUMENT, re.MULTILINE):
        found = labels.get(name.removesuffix("_total"))
        assert not found or found == set(filter(None, listed.split(", "))), name


def test_every_event_is_documented_with_its_level():
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (debug|info|warning|error) \|$", DOCUMENT, re.MULTILINE)
    listed = {name: level for names, level in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed == {kind: logging.getLevelName(LEVELS.get(kind, logging.INFO)).lower() for kind in Kind}
