"""A process that makes a few calls of a store, and says which were acknowledged and which refused.

python -m tests.fault.few_calls FOLDER
"""

import sys

import numpy as np

from kvdb.errors import KvdbError
from tests.stores import connect, put

KEPT = np.arange(200) % 50
"""The tokens of a context that stands in the store before; it is dropped in the end."""
CONTEXTS = {"first": np.r_[KEPT[:150], 60, 61], "second": np.arange(90) % 31}


def say(*words):
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


def attempt(action, name, call):
    try:
        call()
    except KvdbError as error:
        say("refused", action, name, type(error).__name__)
    else:
        say("did", action, name)


def main():
    try:
        db = connect(sys.argv[1])
    except KvdbError as error:
        say("refused", "open", "store", type(error).__name__)
        return
    with db:
        for name, tokens in CONTEXTS.items():
            attempt("put", name, lambda tokens=tokens, name=name: put(db, tokens, name))
        attempt("drop", "kept", lambda: db.drop("kept"))


if __name__ == "__main__":
    main()
