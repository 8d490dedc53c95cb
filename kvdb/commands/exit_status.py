"""What the exit status of `kvdb` says."""

from kvdb.errors import (
    CapacityError,
    IntegrityError,
    InvalidArgument,
    KvdbError,
    MessageTooLarge,
    NotFound,
    Unauthenticated,
    Unavailable,
)

OK = 0
FAILED = 1
USAGE = 2
DAMAGED = 7
INTERRUPTED = 130
"""SIGINT, by the custom of shells: 128 and the number of the signal."""
BY_ERROR: tuple[tuple[type[KvdbError], int], ...] = (
    (MessageTooLarge, FAILED),
    (InvalidArgument, USAGE),
    (NotFound, 3),
    (Unavailable, 4),
    (Unauthenticated, 5),
    (CapacityError, 6),
    (IntegrityError, DAMAGED),
)
"""The first class that an error is of decides."""
MEANINGS = (
    (OK, "done"),
    (FAILED, "failed, for a reason that none of the following is"),
    (USAGE, "a wrong argument, flag or setting"),
    (3, "not found: a context, a session, the folder of a store"),
    (4, "unavailable: the server does not answer, or not in time"),
    (5, "refused: the server wants another credential"),
    (6, "no room: a budget or a quota is spent"),
    (DAMAGED, "damaged: stored bytes are not what was written"),
    (INTERRUPTED, "interrupted by Ctrl-C"),
)
"""Every status, with its meaning, as `kvdb --help` and docs/operations.md list them."""


def status_of(error: KvdbError) -> int:
    """The exit status for an error."""
    return next((status for kind, status in BY_ERROR if isinstance(error, kind)), FAILED)


def table() -> str:
    """The statuses in lines."""
    return "\n".join(["exit status:", *(f"  {status:>3}  {meaning}" for status, meaning in MEANINGS)])
