"""Everything kvdb raises.

KvdbError
├── InvalidArgument          a value is wrong whatever the state
│   ├── ShapeError           an array has the wrong shape
│   ├── DtypeError           an array has the wrong dtype
│   ├── LayerError           a layer number is outside the model
│   ├── NonFiniteError       keys, values or queries hold NaN or infinity, or float32 cannot hold their attention
│   ├── SpecError            a ModelSpec cannot exist
│   └── ConfigError          a configuration cannot exist
├── PositionError            tokens do not follow what is stored
├── SpecMismatch             KV of one model was offered to, or asked of, another's
├── SessionClosed            the session was closed, here or by the server
├── ForkedProcess            what a parent process has open was used in its child
├── NotFound                 no context or session of that name
├── AlreadyExists            the context's name is taken
├── CapacityError            a budget is spent
│   ├── MessageTooLarge      a message is over the server's limit
│   └── QuotaExceeded        a tenant has as much as it may
├── Unauthenticated          the server wants another token
├── PermissionDenied         a tenant asked for what is not its own to do
├── Unsupported              kvdb cannot do this, and says what it can do
├── Unavailable              the server does not answer
│   └── DeadlineExceeded     it does not answer in time
├── Cancelled                nobody waits for the answer any more
├── GpuLost                  the GPU failed; what was in its memory is gone
├── IntegrityError           stored bytes are not what was written
└── InternalError            a bug of kvdb's own, met behind the RPC edge

A message says what was wrong, the value given, what was expected and what to do. `kvdb.rpc.status` maps each class
to its gRPC status. `assert` is kept for our own bugs.
"""

import indexes.errors as root

KvdbError = root.KvdbError
InvalidArgument = root.InvalidArgument
"""These two are defined in `indexes`, because retrievals and indexes refuse values too."""


class ShapeError(InvalidArgument):
    """An array has the wrong shape."""


class DtypeError(InvalidArgument):
    """An array has the wrong dtype."""


class LayerError(InvalidArgument):
    """A layer number is outside the model."""


class NonFiniteError(InvalidArgument):
    """Keys, values or queries hold NaN or infinity, or float32 cannot hold a score or a sum of their attention."""


class SpecError(InvalidArgument):
    """A ModelSpec cannot exist."""


class ConfigError(InvalidArgument):
    """A configuration cannot exist."""


class PositionError(KvdbError):
    """Tokens do not follow what is stored."""


class SpecMismatch(KvdbError):
    """KV of one model was mixed with that of another."""


class SessionClosed(KvdbError):
    """The session was closed, by its owner or by the server."""


class ForkedProcess(KvdbError):
    """What one process has open was used in another, which is a fork of it; the message names both."""


class NotFound(KvdbError, LookupError):
    """No context or session of that name."""


class AlreadyExists(KvdbError):
    """The context's name is taken."""


class CapacityError(KvdbError):
    """A budget is spent; drop something or raise the budget."""


class MessageTooLarge(CapacityError):
    """A message is over the server's limit."""


class QuotaExceeded(CapacityError):
    """A tenant of a server has as much as it may."""


class Unauthenticated(KvdbError):
    """The server wants another token."""


class PermissionDenied(KvdbError):
    """A tenant of a server asked for what concerns all of them."""


class Unsupported(KvdbError):
    """kvdb cannot do this; the message says what it can do."""


class Unavailable(KvdbError, ConnectionError):
    """The server does not answer; the call may or may not have had its effect."""


class DeadlineExceeded(Unavailable, TimeoutError):
    """The call took longer than it may; it may or may not have had its effect."""


class Cancelled(KvdbError):
    """The call was broken off because nobody waits for its answer any more; it had no effect."""


class GpuLost(KvdbError):
    """The GPU failed, and what was in its memory is gone. Blocks in main memory are not: ask again, and the CPU answers."""


class IntegrityError(KvdbError):
    """Stored bytes are not what was written."""


class InternalError(KvdbError):
    """A bug of kvdb's own, met behind the RPC edge."""
