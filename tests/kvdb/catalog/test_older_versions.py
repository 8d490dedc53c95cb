"""A store that an older version of the format wrote is opened, and made one of this version, for ever after."""

import json
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import kvdb
from kvdb.errors import IntegrityError
from tests.kvdb.catalog.older_versions import BEHIND, CHUNK, CONFIG, DOC, LONGER, SPEC, kv_of
from tests.reference import attention, relative_error


@pytest.fixture(params=[1, 2, 3])
def store(request, tmp_path):
    """The folder of a store of an older version with the contexts `doc`, `longer`, `chunk` and `behind`, and, from version 2
    on, the blend `blend`."""
    with tarfile.open(Path(__file__).with_name(f"store_version_{request.param}.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    assert versions(tmp_path) == (request.param, request.param)
    return tmp_path


def versions(folder):
    """What the label and the catalogue say of their version."""
    with closing(sqlite3.connect(folder / "catalog.db")) as catalog:
        (found,) = catalog.execute("PRAGMA user_version").fetchone()
    return json.loads((folder / "store.json").read_bytes())["version"], found


def check_contents(folder):
    """Everything is there, and what is asked of it is answered by its keys and values."""
    with kvdb.connect(folder, config=CONFIG) as db:
        stored = {context.name: context.tokens for context in db.contexts()}
        blended = stored.pop("blend", None)
        assert stored == {"behind": len(BEHIND), "chunk": len(CHUNK), "doc": len(DOC), "longer": len(LONGER)}
        query = kv_of([3])[0][0].repeat(SPEC.q_heads, axis=0)
        for tokens, computed in ((DOC, DOC), (LONGER, LONGER), (CHUNK, CHUNK)):
            with db.create_session(SPEC, tokens) as session:
                assert session.reused == len(tokens)
                for layer, (k, v) in enumerate(kv_of(computed)):
                    want = attention(query, k, v, SPEC.softmax_scale)[0]
                    assert relative_error(session.attention(layer, query), want) < 1e-5
        if blended:
            with db.create_session(SPEC, parts=["blend"]) as session:
                for layer, (stored, new) in enumerate(zip(kv_of(DOC), kv_of(CHUNK), strict=True)):
                    k, v = (np.concatenate([new[side], stored[side][:, len(CHUNK) :]], axis=1) for side in range(2))
                    got = session.attention(layer, query, positions=[len(DOC) - 1])
                    assert relative_error(got, attention(query, k, v, SPEC.softmax_scale)[0]) < 1e-5


@pytest.mark.needs_folder
def test_an_older_store_is_upgraded_and_answers(store):
    for _ in range(2):
        check_contents(store)
        assert versions(store) == (4, 4)


@pytest.mark.needs_folder
def test_an_upgrade_that_was_cut_short_goes_on(store, tmp_path):
    label = (store / "store.json").read_bytes()
    check_contents(store)
    (store / "store.json").write_bytes(label)  # as if the process had died before its last step
    check_contents(store)
    assert versions(store) == (4, 4)


def test_what_was_damaged_before_the_upgrade_stays_so(store):
    with closing(sqlite3.connect(store / "catalog.db")) as catalog:
        catalog.execute("UPDATE context SET length = length + 1 WHERE name = 'doc'")
        catalog.commit()
    for _ in range(2):
        with kvdb.connect(store, config=CONFIG) as db:
            assert "doc" not in [context.name for context in db.contexts()]
            with pytest.raises(IntegrityError):
                db.get("doc")


@pytest.mark.needs_folder
def test_a_context_whose_life_was_damaged_is_kept_and_pinned(store, caplog):
    check_contents(store)
    with closing(sqlite3.connect(store / "catalog.db")) as catalog:
        catalog.execute("UPDATE life SET pinned = 7 WHERE name = 'doc'")
        catalog.execute("DELETE FROM life WHERE name = 'longer'")
        catalog.commit()
    check_contents(store)
    assert "'doc' was damaged" in caplog.text
    assert "'longer' was damaged" in caplog.text
