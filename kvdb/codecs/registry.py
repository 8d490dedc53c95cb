"""The codecs by name."""

from functools import cache

from kvdb.codecs.base import Codec
from kvdb.codecs.int4 import Int4
from kvdb.codecs.int8 import Int8
from kvdb.codecs.int8_int4 import Int8Int4
from kvdb.codecs.plain import Plain

_OWN = Plain(), Int8(), Int8Int4(), Int4()
CODECS: dict[str, Codec] = {codec.name: codec for codec in _OWN}
"""The codecs by name; those of others come last."""


def register(codec: Codec) -> None:
    """Add a codec from outside, for the whole process, before a store is opened that holds segments of it. Raises ValueError
    where another has its name."""
    if CODECS.setdefault(codec.name, codec) is not codec:
        raise ValueError(f"a codec is named {codec.name!r} already; expected a name that is none of {names()}")


def names() -> str:
    """All names, as a message tells them."""
    return ", ".join(map(repr, tuple(CODECS)))


@cache
def of_number(number: int) -> Codec:
    """The codec whose blocks lie as those with this number in their addresses do."""
    return next(codec for codec in _OWN if codec.number == number)
