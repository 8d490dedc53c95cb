"""The contexts of one model as an engine finds them: by their tokens alone, under names that follow from these."""

import hashlib
from contextlib import suppress
from typing import Any

import numpy as np

import kvdb
from kvdb.errors import AlreadyExists


class ModelContexts:
    """What an engine with a cache of its own has from kvdb: prefixes of its prompts. Thread-safe, as the client is.

    db: an open database, which the caller closes. spec: the meaning of the engine's KV. folder: what the names of its contexts
    begin with, for people; engines of other folders find them too.
    """

    def __init__(self, db: kvdb.Client, spec: kvdb.ModelSpec, folder: str) -> None:
        self.db = db
        self.spec = spec
        self._folder = folder

    def find(self, tokens: Any, salt: str = "") -> int:
        """How many leading tokens of a prompt are stored. salt: whom they belong to, as in `kvdb.Client.import_context`. Raises
        what `kvdb.Client.match` raises."""
        return self.db.match(self.spec, tokens, salt=salt).tokens

    def open(self, tokens: Any, salt: str = "", **rest: Any) -> kvdb.Session:
        """A `SequenceKv` over the longest stored prefix of the tokens. salt, rest: as in `kvdb.Client.create_session`, whose
        errors it raises."""
        return self.db.create_session(self.spec, tokens, salt=salt, **rest)

    def keep(self, session: kvdb.Session, tokens: Any, salt: str = "") -> str:
        """Store everything in a session, so that others find it. Returns the context's name, also where the same tokens were
        stored before.

        tokens: the ids of all of it. salt: what the session was opened with. Raises what `kvdb.Client.store` raises, but
        AlreadyExists.
        """
        name = self.name_of(tokens, salt)
        with suppress(AlreadyExists):
            self.db.store(session, name=name, tokens=tokens)
        return name

    def name_of(self, tokens: Any, salt: str = "") -> str:
        """The name under which these tokens are kept: the same of the same model, tokens and salt only."""
        digest = hashlib.sha256(f"{self.spec!r} {len(salt)} {salt} ".encode())
        digest.update(np.ascontiguousarray(tokens, np.int32).tobytes())
        return f"{self._folder}/{digest.hexdigest()[:32]}"
