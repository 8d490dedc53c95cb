"""The table of docs/families.md, from the small models of all families.

`python -m tests.engine_adapter.families_table` writes it.
"""

from pathlib import Path

import kvdb
from engine_adapter.transformers import spec_of
from engine_adapter.transformers.answerable import refused
from engine_adapter.transformers.described import kept_model
from tests.engine_adapter.families import FAMILIES, family

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- made by tests/engine_adapter/families_table.py -->", "<!-- end -->"
HEAD = "| family | its layers keep | a prefix is gone on with | padded batches | attention, and the selection | why not by kvdb |"


def table():
    """The rows of all families, as Markdown."""
    rows = [row(name) for name in FAMILIES]
    return "\n".join([HEAD, "|" + 6 * " --- |", *rows])


def row(name):
    model = family(name)
    why = refused(model)
    spec = spec_of(model)
    kept = None if why is None else kept_model(model)
    descriptions = [group.description for group in spec.groups]
    cells = [
        f"`{name}`",
        "; ".join(dict.fromkeys(map(described, descriptions))),
        "at a state" if spec.has_states else "anywhere",
        "handed back" if kept is None or kept.padded else "computed anew",
        "kvdb, exact and searched" if why is None else selection(descriptions),
        "" if why is None else str(why).split(";")[0].replace("|", "\\|"),
    ]
    return f"| {' | '.join(cells)} |"


def described(layer):
    """What a layer keeps, without its sizes, which are those of a test."""
    if isinstance(layer, kvdb.Shares):
        return "nothing: reads an earlier layer"
    if isinstance(layer, kvdb.State):
        names = dict.fromkeys(name.split(".")[0].replace("_", " ") for name, *_ in layer.arrays)
        return f"states ({', '.join(names)})"
    if layer.values == "own":
        what = "keys and values"
    else:
        what = "latents" if layer.value_dim < layer.key_dim else "keys that are values"
    extras = [
        "of a window" if layer.window else "",
        "with sinks" if layer.sinks else "",
        "and keys of an indexer" if layer.indexer else "",
    ]
    return " ".join([what, *filter(None, extras)])


def selection(descriptions):
    indexed = any(isinstance(layer, kvdb.Attention) and layer.indexer for layer in descriptions)
    return "the model, which selects" if indexed else "the model"


def page(text, made):
    """The page's text with this table in it."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), table()))
