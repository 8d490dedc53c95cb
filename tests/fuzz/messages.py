"""Random messages of any type, made from its descriptor: at times right, mostly wrong somewhere."""

import json
import random
from collections.abc import Callable
from math import inf, nan
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.types import ModelSpec

DEPTH_MAX = 5
ITEMS_MAX = 3
INTEGERS = [0, 0, 0, 1, 1, 2, 3, 7, 16, 100, (1 << 31) - 1, 1 << 32, (1 << 63) - 1]
DOUBLES = [0.0, -0.0, 0.5, 1.0, 1e-300, 1e300, -1.0, inf, -inf, nan]
TEXTS = ["", "x", "flat", "int8", "durable", "{}", "[]", '{"a": 1}', "{", "a/b", "../x", "\0", "é\u202e", "x" * 5000, "float32"]
DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "complex64", "object", "", "V16"]
STATES = ["conv", "recurrent", "k", ""]
LAYERS = json.dumps(
    [
        {"kind": "attention", "q_heads": 4, "kv_heads": 2, "key_dim": 8, "window": 4, "sinks": True},
        {"kind": "state", "arrays": [["conv", [2, None], "float32"]]},
        {"kind": "attention", "q_heads": 4, "kv_heads": 1, "key_dim": 16, "value_dim": 8, "values": "keys"},
        {"kind": "shares", "layer": 0},
    ]
)
"""What a spec says of layers that differ."""
SHAPE_SIZES = [0, 1, 2, 4, 16, 17, 1 << 32, (1 << 64) - 1]
CHANCES_RIGHT = [0.5, 0.98]
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
}


class Messages:
    """A source of messages.

    names, session_ids: what fields that name contexts and sessions are filled with beside nonsense; they may grow. tokens: ids
    that are stored. spec: the model that most messages are about.
    """

    def __init__(self, rng: random.Random, spec: ModelSpec, tokens: bytes, names: list[str], session_ids: list[str]) -> None:
        self.rng = rng
        self.spec = spec
        self.tokens = tokens
        self.names = names
        self.session_ids = session_ids
        self._begin()

    def raw(self, kind: Descriptor) -> bytes:
        """The bytes of a request of this type: a message, one with wrong bytes or unknown fields, or none at all."""
        self._begin()
        chance = self.rng.random()
        if chance < 0.04:
            return self.rng.randbytes(self.rng.choice([0, 1, 9, 300]))
        data = self.message(kind).SerializeToString()
        if chance < 0.1 and data:
            wrong = bytearray(data)
            for _ in range(self.rng.randint(1, 4)):
                wrong[self.rng.randrange(min(len(wrong), 100))] = self.rng.randrange(256)
            return bytes(wrong)
        if chance < 0.15:
            return data + b"\xca\x3e\x03abc"  # a field that no message has
        return data[: self.rng.randrange(len(data) + 1)] if chance < 0.18 else data

    def message(self, kind: Descriptor, depth: int = 0) -> Message:
        """A message of this type."""
        if kind is pb.ModelSpec.DESCRIPTOR and self._right():
            return codec.to_spec(self.spec)
        made = GetMessageClass(kind)()
        chosen = {self.rng.choice(one.fields).name for one in kind.oneofs}
        for field in kind.fields:
            if self._wanted(field, chosen, depth):
                self._fill(made, field, depth)
        return made

    def _wanted(self, field: FieldDescriptor, chosen: set[str], depth: int) -> bool:
        """Whether a field is set at all. chosen: those of oneofs that are."""
        one, kind = field.containing_oneof, field.message_type
        if one is not None and (field.name not in chosen or (len(one.fields) == 1 and self.rng.random() < 0.7)):
            return False  # a oneof of one field is how protobuf says that it may be absent
        return kind is None or (depth < DEPTH_MAX and (one is not None or self._right() or self.rng.random() > 0.3))

    def _begin(self) -> None:
        """Choose what the parts of one message share."""
        self._chance = self.rng.choice(CHANCES_RIGHT)
        self._n = self.rng.choice([1, 1, 1, 2, 5])

    def _fill(self, made: Any, field: FieldDescriptor, depth: int) -> None:
        if field.name in {"options", "retention", "start", "starts"} and self._right():
            return
        if field.is_repeated:
            count = 1 if self._right() else self.rng.randint(0, ITEMS_MAX)
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                for name in self.rng.sample(STATES, min(count, len(STATES))):
                    getattr(made, field.name)[name].CopyFrom(self.array(name))
                return
            items = [self._value(made, field, depth) for _ in range(count)]
            getattr(made, field.name).extend(items)
        elif field.message_type is not None:
            getattr(made, field.name).CopyFrom(self._value(made, field, depth))
        else:
            setattr(made, field.name, self._value(made, field, depth))

    def _value(self, made: Message, field: FieldDescriptor, depth: int) -> Any:
        kind = field.message_type
        if kind is pb.Array.DESCRIPTOR:
            return self.array(field.name, made.DESCRIPTOR.name)
        if kind is not None:
            return self.message(kind, depth + 1)
        return self._scalar(field)

    def _scalar(self, field: FieldDescriptor) -> Any:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._bytes()
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
                return self.rng.choice(DOUBLES)
            case FieldDescriptor.CPPTYPE_BOOL:
                return self.rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_STRING:
                return self._text(field.name)
        return self._integer(field)

    def array(self, name: str, owner: str = "") -> pb.Array:
        """An array: mostly what a field of that name holds, for one token."""
        if not self._right():
            shape = [self.rng.choice(SHAPE_SIZES) for _ in range(self.rng.choice([0, 1, 3, 3, 4, 9]))]
            data = self.rng.randbytes(self.rng.choice([0, 1, 64, 128, 256]))
            return pb.Array(dtype=self.rng.choice(DTYPES), shape=shape, data=data)
        heads = self.spec.q_heads if name == "q" else self.spec.kv_heads
        shape = [heads, self._n, self.spec.head_dim]
        if "Together" in owner or "Sessions" in owner:
            shape = [1, *shape]
        values = np.random.default_rng(self.rng.randrange(1 << 30)).standard_normal(shape).astype(np.float32)
        if self.rng.random() < 0.1:
            values.flat[0] = self.rng.choice([nan, inf, 3e38, -3e38])
        return codec.to_array(values)

    def _text(self, name: str) -> str:
        known: list[str] = self.names
        if "session_id" in name:
            known = self.session_ids
        elif name == "descriptions":
            known = ["", "", "", LAYERS]
        elif name in {"metadata", "kind", "folder", "dtype", "format", "durability", "layout", "scaling", "salt", "score"}:
            known = ["", "", "flat"]
        return self.rng.choice(known) if known and self.rng.random() < 0.8 else self.rng.choice(TEXTS)

    def _bytes(self) -> bytes:
        choices: list[Callable[[], bytes]] = [
            lambda: self.tokens,
            lambda: self.tokens[: 4 * self.rng.randint(0, 40)],
            lambda: b"\1\0\0\0",
            lambda: self.rng.randbytes(self.rng.choice([0, 3, 4, 8, 64])),
            lambda: b"\0" * 8,
        ]
        return self.rng.choice(choices)()

    def _integer(self, field: FieldDescriptor) -> int:
        least, most = _RANGES[field.cpp_type]
        if field.name == "layer" and self._right():
            return self.rng.randrange(self.spec.layers)
        return min(most, max(least, self.rng.choice([*INTEGERS, -1, least, most])))

    def _right(self) -> bool:
        return self.rng.random() < self._chance
