"""Seeded wrong input: random protobufs of a type, damaged bytes, and JSON that is nearly right."""

from __future__ import annotations

import json
import random
import string
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_EDGES = [0, 1, 2, 15, 16, 255, 4096, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63)]
_FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan")]
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def message(self, kind: type[Message], depth: int = 0) -> Any:
        """A valid encoding of senseless values."""
        made = kind()
        for descriptor in kind.DESCRIPTOR.fields:
            if self.random.random() < 0.4 and depth < 5:
                self._fill(made, descriptor, depth)
        return made

    def _fill(self, made: Any, descriptor: Any, depth: int) -> None:
        name = descriptor.name
        if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
            for _ in range(self.random.randint(0, 3)):
                values = descriptor.message_type.fields_by_name
                getattr(made, name)[self._scalar(values["key"])] = self._scalar(values["value"])
            return
        if descriptor.message_type is not None:
            kind = descriptor.message_type._concrete_class
            if descriptor.is_repeated:
                getattr(made, name).extend(self.message(kind, depth + 1) for _ in range(self.random.randint(0, 3)))
            else:
                getattr(made, name).CopyFrom(self.message(kind, depth + 1))
        elif descriptor.is_repeated:
            getattr(made, name).extend(self._scalar(descriptor) for _ in range(self.random.choice([0, 1, 5, 40])))
        else:
            setattr(made, name, self._scalar(descriptor))

    def _scalar(self, descriptor: Any) -> Any:
        kind = descriptor.cpp_type
        if kind in _RANGES:
            low, high = _RANGES[kind]
            small = self.random.randint(0, 100)
            return small if self.random.random() < 0.5 else min(max(self.random.choice(_EDGES), low), high)
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return self.random.randint(0, 9)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self.random.random() < 0.5
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return self.random.choice(_FLOATS)
        if descriptor.type == FieldDescriptor.TYPE_BYTES:
            return self.bytes()
        return self.text()

    def text(self) -> str:
        letters = string.printable + "é👋\u0000\u202e"
        return "".join(self.random.choices(letters, k=self.random.choice([0, 1, 7, 300])))

    def bytes(self) -> bytes:
        return self.random.randbytes(self.random.choice([0, 1, 7, 64, 2000]))

    def damage(self, data: bytes) -> bytes:
        """Some bytes changed, cut off or put in."""
        found = bytearray(data or b"x")
        for _ in range(self.random.randint(1, 5)):
            place = self.random.randrange(len(found) + 1)
            found[place : place + self.random.randint(0, 3)] = self.random.randbytes(self.random.randint(0, 3))
        return bytes(found)

    def json(self, right: dict[str, Any]) -> bytes:
        """A body with some wrong values, or damaged text."""
        body = dict(right)
        for _ in range(self.random.randint(1, 3)):
            name = self.random.choice(
                [*body, "no_such_field", "temperature", "n", "stop", "response_format", "max_tokens"]
            )
            body[name] = self.value()
        data = json.dumps(body).encode()
        return self.damage(data) if self.random.random() < 0.3 else data

    def value(self, depth: int = 0) -> Any:
        choice = self.random.randrange(9 if depth < 4 else 6)
        if choice == 6:
            return [self.value(depth + 1) for _ in range(self.random.randint(0, 4))]
        if choice >= 7:
            return {self.text(): self.value(depth + 1) for _ in range(self.random.randint(0, 4))}
        plain = [None, True, self.random.choice(_EDGES), self.random.choice(_FLOATS[:6]), self.text(), "auto"]
        return plain[choice]
