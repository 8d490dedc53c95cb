"""The root of the errors that this distribution raises on purpose; `kvdb.errors` has the whole tree."""


class KvdbError(Exception):
    """Base of everything that kvdb raises on purpose."""


class InvalidArgument(KvdbError, ValueError):
    """A value is wrong whatever the state; correct the call."""
