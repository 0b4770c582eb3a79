"""A reader of the one kind of pickle that CIFAR-10's python version holds. Nothing is executed.

A pickle is a program. `pickletools` takes it apart without running it, and the few instructions
that such a file needs are followed here, on plain values: dictionaries, lists, tuples, texts,
numbers, and arrays of bytes written in numpy's usual way. The four names of numpy that this way
uses are compared as texts and never looked up. Anything else is refused.
"""

import math
import pickletools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from evenhand.data.files import shown
from evenhand.errors import UserError


class _Name(NamedTuple):
    """The name of something in a module, which is only ever compared with those below."""

    module: str
    name: str


NDARRAY, DTYPE = _Name("numpy", "ndarray"), _Name("numpy", "dtype")
RECONSTRUCT = {
    _Name("numpy.core.multiarray", "_reconstruct"),
    _Name("numpy._core.multiarray", "_reconstruct"),  # since numpy 2
}
MAX_DIMENSIONS = 8  # of an array; the product of thousands of lengths would take minutes
BYTE_TYPES = {"u1", "|u1"}


class _ByteType:
    """Numpy's type of a byte, whose remaining settings (its BUILD) are of no matter."""


class _Array:
    """An array of which the instruction BUILD has yet to bring the content."""

    content: np.ndarray[Any, np.dtype[np.uint8]] | None = None


class _Refused(Exception):  # noqa: N818  (a message on its way to `plain_values`)
    pass


_MARK = object()


def plain_values(data: bytes, *, source: str) -> dict[str, Any]:
    """The dictionary that a pickle describes, or a `UserError` that names source and instruction.

    Texts of Python 2 are bytes; the keys are texts in any case. Arrays are (...) uint8.
    """
    reader = _Reader()
    opcode_name, position = "the first", 0
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes in texts, which are refused
            for opcode, argument, place in pickletools.genops(data):
                opcode_name, position = opcode.name, place or 0
                reader.follow(opcode_name, argument)
        value = reader.result()
    except (_Refused, ValueError, IndexError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{source} is not a batch of CIFAR-10: at byte {position}, instruction {opcode_name}: "
            f"{error or type(error).__name__}; nothing of it was executed; fetch the file again, "
            f"or use the binary version"
        ) from error
    return value


class _Reader:
    """A stack, a memory, and what each allowed instruction does to them."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memory: dict[int, Any] = {}

    def follow(self, opcode: str, argument: Any) -> None:
        if opcode in IGNORED:
            return
        if opcode in TEXTS_OF_PYTHON_2:
            self.stack.append(argument.encode("latin-1"))
        elif opcode in CONSTANTS:
            self.stack.append(argument)
        elif opcode in ACTIONS:
            ACTIONS[opcode](self, argument)
        else:
            raise _Refused("such a file has no need of it")

    def result(self) -> dict[str, Any]:
        if len(self.stack) != 1 or not isinstance(self.stack[0], dict):
            raise _Refused("the file does not hold one dictionary")
        return {
            key: value.content if isinstance(value, _Array) else value
            for key, value in self.stack[0].items()
        }

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise _Refused("a value is missing")
        return value

    def since_mark(self) -> list[Any]:
        start = len(self.stack) - 1
        while self.stack[start] is not _MARK:  # beyond the bottom: IndexError, which is refused
            start -= 1
            if start < 0:
                raise _Refused("a mark is missing")
        values = self.stack[start + 1 :]
        del self.stack[start:]
        return values

    def top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise _Refused(f"expected a {kind.__name__}")
        return self.stack[-1]

    def remember(self, place: int | None) -> None:
        self.memory[len(self.memory) if place is None else place] = self.stack[-1]

    def recall(self, place: int) -> None:
        self.stack.append(self.memory[place])

    def name(self, text: str) -> None:
        module, _, name = text.partition(" ")
        self.push_name(module, name)

    def stack_name(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        self.push_name(module, name)

    def push_name(self, module: Any, name: Any) -> None:
        # To hash a tuple of tuples that are all the same one takes twice as long a level.
        if not isinstance(module, str) or not isinstance(name, str):
            raise _Refused("it asks for something by what is no name")
        found = _Name(module, name)
        if found not in {NDARRAY, DTYPE, *RECONSTRUCT}:
            raise _Refused(f"it asks for {shown(f'{module}.{name}')}")
        self.stack.append(found)

    def make(self, _: Any) -> None:
        """REDUCE: an array without content, or numpy's type of a byte."""
        arguments, name = self.pop(), self.pop()
        if not isinstance(name, _Name) or not isinstance(arguments, tuple) or not arguments:
            raise _Refused("it makes something else than an array of bytes")
        first = arguments[0]
        if name in RECONSTRUCT and isinstance(first, _Name) and first == NDARRAY:
            self.stack.append(_Array())
        elif name == DTYPE and not isinstance(first, _Name) and _text(first) in BYTE_TYPES:
            self.stack.append(_ByteType())
        else:
            raise _Refused("it makes something else than an array of bytes")

    def build(self, _: Any) -> None:
        """BUILD: gives an array its content, which is (version, shape, type, order, bytes)."""
        state = self.pop()
        value = self.stack[-1]
        if isinstance(value, _ByteType):
            return
        is_state = type(state) is tuple and len(state) == 5 and isinstance(state[2], _ByteType)
        if not isinstance(value, _Array) or not is_state:
            raise _Refused("it makes something else than an array of bytes")
        _, shape, _, is_by_column, content = state
        if type(shape) is not tuple or len(shape) > MAX_DIMENSIONS:
            raise _Refused(f"an array of more than {MAX_DIMENSIONS} dimensions")
        if not all(type(length) is int and length >= 0 for length in shape):
            raise _Refused("an array whose shape is not of whole numbers")
        if not isinstance(content, bytes) or math.prod(shape) != len(content):
            raise _Refused(f"an array of shape {shown(str(shape))} with another number of bytes")
        flat = np.frombuffer(content, dtype=np.uint8)
        value.content = flat.reshape(shape, order="F" if is_by_column else "C")

    def tuple_of(self, length: int) -> None:
        values = [self.pop() for _ in range(length)]
        self.stack.append(tuple(reversed(values)))

    def set_items(self, values: list[Any]) -> None:
        target = self.top(dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[_text(key)] = value


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if not isinstance(value, str):
        raise _Refused(f"expected a text, found a {type(value).__name__}")
    return value


IGNORED = {"PROTO", "FRAME", "STOP"}
TEXTS_OF_PYTHON_2 = {"BINSTRING", "SHORT_BINSTRING"}
CONSTANTS = {
    "BINBYTES", "BINBYTES8", "BININT", "BININT1", "BININT2", "BINUNICODE", "SHORT_BINBYTES",
    "SHORT_BINUNICODE",
}  # fmt: skip
ACTIONS: dict[str, Callable[[_Reader, Any], None]] = {
    "NONE": lambda reader, _: reader.stack.append(None),
    "NEWTRUE": lambda reader, _: reader.stack.append(True),
    "NEWFALSE": lambda reader, _: reader.stack.append(False),
    "MARK": lambda reader, _: reader.stack.append(_MARK),
    "EMPTY_DICT": lambda reader, _: reader.stack.append({}),
    "EMPTY_LIST": lambda reader, _: reader.stack.append([]),
    "EMPTY_TUPLE": lambda reader, _: reader.stack.append(()),
    "TUPLE": lambda reader, _: reader.stack.append(tuple(reader.since_mark())),
    "TUPLE1": lambda reader, _: reader.tuple_of(1),
    "TUPLE2": lambda reader, _: reader.tuple_of(2),
    "TUPLE3": lambda reader, _: reader.tuple_of(3),
    "BINPUT": _Reader.remember,
    "LONG_BINPUT": _Reader.remember,
    "MEMOIZE": lambda reader, _: reader.remember(None),
    "BINGET": _Reader.recall,
    "LONG_BINGET": _Reader.recall,
    "GLOBAL": _Reader.name,
    "STACK_GLOBAL": _Reader.stack_name,
    "REDUCE": _Reader.make,
    "BUILD": _Reader.build,
    "APPEND": lambda reader, _: (lambda value: reader.top(list).append(value))(reader.pop()),
    "APPENDS": lambda reader, _: (lambda more: reader.top(list).extend(more))(reader.since_mark()),
    "SETITEM": lambda reader, _: reader.set_items([reader.pop(), reader.pop()][::-1]),
    "SETITEMS": lambda reader, _: reader.set_items(reader.since_mark()),
}
