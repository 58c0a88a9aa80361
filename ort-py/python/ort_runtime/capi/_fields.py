"""Typed attributes: converters and properties for the option classes.

Each converter takes a value and the name that messages call it by, and returns the value as its
type or raises TypeError. They accept what onnxruntime's setters accept: an int may be a numpy int,
a bool may be 0 or 1, a str may be bytes.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, NoReturn, TypeVar

from ._errors import InvalidArgument, status

Member = TypeVar("Member", bound=IntEnum)

_INT32 = range(-(2**31), 2**31)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)


def refuse(name: str, expected: str, value: object) -> NoReturn:
    """Raises the TypeError for a value of the wrong type."""
    raise TypeError(f"{name} must be {expected}, not {type(value).__name__}: {value!r:.80}")


def to_int(value: Any, name: str) -> int:
    """Returns an int of 32 bits. Floats and strings are refused."""
    try:
        number = operator.index(value)
    except TypeError:
        refuse(name, "an int", value)
    if number not in _INT32:
        refuse(name, "an int of 32 bits", value)
    return number


def to_int64(value: Any, name: str) -> int:
    """Returns an int of any size. Floats and strings are refused."""
    try:
        return operator.index(value)
    except TypeError:
        refuse(name, "an int", value)


def to_unsigned(value: Any, name: str) -> int:
    """Returns an int of any size that is not negative."""
    number = to_int64(value, name)
    if number < 0:
        refuse(name, "an int that is not negative", value)
    return number


def to_count(value: Any, name: str) -> int:
    """Returns an int that is not negative."""
    number = to_int(value, name)
    if number < 0:
        raise status(InvalidArgument, f"{name} must not be negative, got {number}")
    return number


def to_sizes(value: Any, name: str) -> list[int]:
    """Returns the sizes of a tensor, from any sequence of ints. Raises TypeError."""
    if isinstance(value, str | bytes | Mapping):
        refuse(name, "a sequence of ints", value)
    try:
        sizes = [operator.index(size) for size in value]
    except TypeError:
        refuse(name, "a sequence of ints", value)
    if any(abs(size) >= 2**63 for size in sizes):
        refuse(name, "a sequence of ints of 64 bits", value)
    return sizes


def to_bool(value: Any, name: str) -> bool:
    """Returns a bool. Numbers count, and None is False; strings and containers are refused."""
    if not hasattr(type(value), "__bool__"):
        refuse(name, "a bool", value)
    return bool(value)


def to_str(value: Any, name: str) -> str:
    """Returns a str; bytes are decoded as UTF-8."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return value.decode()
    refuse(name, "a str", value)


def to_path(value: Any, name: str) -> str:
    """Returns the text of a path: a str, bytes or an `os.PathLike`."""
    if isinstance(value, str | bytes | os.PathLike):
        return os.fsdecode(value)
    refuse(name, "a path", value)


def to_size(value: Any, name: str) -> int | None:
    """Returns a number of bytes: an int, or text such as "512 MiB" or "2GB". None is no limit.

    Units are binary: "1 KB" is 1024 bytes.
    """
    if value is None:
        return None
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            raise status(
                InvalidArgument, f"{name} must be a size such as 4096 or '2GiB', not {value!r}"
            )
        return int(float(match[1]) * _UNITS[match[2].upper()])
    number = to_int64(value, name)
    if number < 0:
        raise status(InvalidArgument, f"{name} must not be negative, got {number}")
    return number


def to_enum(kind: type[Member]) -> Callable[[Any, str], Member]:
    """Returns the converter to members of `kind`, which also accepts their numbers."""

    def convert(value: Any, name: str) -> Member:
        if isinstance(value, kind):
            return value
        if isinstance(value, IntEnum) or not hasattr(type(value), "__index__"):
            refuse(name, kind.__name__, value)
        return kind(operator.index(value))

    return convert


def to_choice(*choices: str) -> Callable[[Any, str], str]:
    """Returns the converter to one of some strings."""

    def convert(value: Any, name: str) -> str:
        text = to_str(value, name)
        if text not in choices:
            raise status(
                InvalidArgument, f"{name} must be one of {', '.join(choices)}, not {text!r}"
            )
        return text

    return convert


def str_dict(options: Any, name: str) -> dict[str, str]:
    """Returns a copy of a mapping whose keys and values are strings, in its order."""
    try:
        items = list(options.items())
    except AttributeError:
        refuse(name, "a dict", options)
    return {
        to_str(key, f"a key of {name}"): to_str(value, f"{name}[{key!r}]") for key, value in items
    }


def same_length(name: str, *lists: Iterable[Any]) -> tuple[list[Any], ...]:
    """Returns the iterables as lists, or raises RuntimeError if their lengths differ."""
    listed = tuple(list(entries) for entries in lists)
    if len({len(entries) for entries in listed}) > 1:
        lengths = ", ".join(str(len(entries)) for entries in listed)
        raise RuntimeError(f"{name}: Expecting lists of equal length, got {lengths}")
    return listed


def typed(name: str, convert: Callable[[Any, str], Any], doc: str) -> property:
    """Returns a property that keeps its converted value in the slot `_<name>`."""
    slot = f"_{name}"

    def get(self: Any) -> Any:
        return getattr(self, slot)

    def assign(self: Any, value: Any) -> None:
        setattr(self, slot, convert(value, f"{type(self).__name__}.{name}"))

    return property(get, assign, doc=doc)


def read_only(name: str, doc: str) -> property:
    """Returns a property for the slot `_<name>` that cannot be set."""
    return property(operator.attrgetter(f"_{name}"), doc=doc)


def put_entry(entries: dict[str, str], key: Any, value: Any, owner: str) -> None:
    """Sets a configuration entry; entries keep the order in which their keys were first set.

    An empty or overlong key is a RuntimeError, another type a TypeError.
    """
    key = to_str(key, f"the key of a {owner} entry")
    value = to_str(value, f"the value of {owner} entry {key!r}")
    if not key or len(key) > 1024:
        raise RuntimeError("Config key is empty or longer than maximum length 1024")
    entries[key] = value


def find_entry(entries: dict[str, str], key: Any, owner: str) -> str:
    """Returns a configuration entry, or raises RuntimeError."""
    key = to_str(key, f"the key of a {owner} entry")
    try:
        return entries[key]
    except KeyError:
        raise RuntimeError(f"{owner} does not have configuration with key: {key}") from None


class Slotted:
    """Base of the option classes: copying and pickling of all slots.

    A copy has containers of its own and shares what they hold.
    """

    __slots__ = ("__weakref__",)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for kind in type(self).__mro__:
            for slot in getattr(kind, "__slots__", ()):
                if slot.startswith("_") and not slot.startswith("__") and hasattr(self, slot):
                    value = getattr(self, slot)
                    state[slot] = value.copy() if isinstance(value, dict | list) else value
        return state | getattr(self, "__dict__", {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        for slot, value in state.items():
            setattr(self, slot, value)

    def __copy__(self) -> Any:
        copy = type(self).__new__(type(self))
        copy.__setstate__(self.__getstate__())
        return copy
