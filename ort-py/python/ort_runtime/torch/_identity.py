"""Code objects and values by names that mean the same in another process.

A name is only used if it leads back to what was named, so that a patched, moved or edited function
is noticed. Code is compared by a digest of its bytecode; its lines may move.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CodeName", "Value", "code_names", "digest_of", "value_of"]

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type(...))
_LOCALS = "<locals>"
#: What compiled modules have, which changes with their versions alone.
_NATIVE = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.GetSetDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType,
)  # fmt: skip
#: How many wrappers, closures and properties are followed to a function.
_MOST_STEPS = 64


def digest_of(code: types.CodeType) -> str:
    """Returns a digest of what a code object does."""
    found = hashlib.sha256()
    parts: tuple[Any, ...] = (
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags,
        code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
        code.co_exceptiontable,
    )  # fmt: skip
    found.update(repr(parts).encode())
    for constant in code.co_consts:
        found.update(_text_of(constant).encode() + b"\0")
    return found.hexdigest()


def _text_of(constant: Any) -> str:
    if isinstance(constant, types.CodeType):
        return digest_of(constant)
    if isinstance(constant, frozenset):
        # The order of a set differs between processes.
        return f"frozenset {sorted(map(_text_of, constant))}"
    if isinstance(constant, tuple):
        return f"tuple {[_text_of(one) for one in constant]}"
    return f"{type(constant).__name__} {constant!r}"


def _at(module: str, path: str) -> Any:
    """Returns what a module has at a path. Raises LookupError if that is nothing."""
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in path.split("."):
            found = inspect.getattr_static(found, part)
    except (ImportError, AttributeError, ValueError) as problem:
        raise LookupError(f"{module} has no {path}") from problem
    return found


def _codes_in(value: Any) -> Iterator[types.CodeType]:
    """Yields the code of a function, and of those that its decorators hide."""
    waiting: list[Any] = [value]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_STEPS:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, types.CodeType):
            yield one
            waiting += [const for const in one.co_consts if isinstance(const, types.CodeType)]
        elif isinstance(one, types.FunctionType):
            waiting += [one.__code__, getattr(one, "__wrapped__", None), *_contents(one)]
        elif isinstance(one, property):
            waiting += [one.fget, one.fset, one.fdel]
        elif isinstance(one, functools.partial | functools.cached_property):
            waiting.append(one.func)
        elif isinstance(one, staticmethod | classmethod | types.MethodType):
            waiting.append(one.__func__)


def _contents(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            # A variable that nothing was assigned to yet.
            continue


@dataclass(frozen=True)
class CodeName:
    """Where a code object is found, and what it does."""

    module: str
    path: str
    name: str
    digest: str

    def is_current(self) -> bool:
        """Whether that code is still found there."""
        try:
            found = _at(self.module, self.path)
        except LookupError:
            return False
        return any(
            code.co_qualname == self.name and digest_of(code) == self.digest
            for code in _codes_in(found)
        )


def code_names(codes: Iterable[types.CodeType], classes: Iterable[type]) -> list[CodeName]:
    """Names code objects.

    Args:
        codes: the code objects.
        classes: where generated methods, as those of dataclasses, may be found.

    Raises:
        LookupError: one of them has no name.
    """
    files = {
        path: name
        for name, module in list(sys.modules.items())
        if isinstance(path := getattr(module, "__file__", None), str)
    }
    found: dict[CodeName, None] = {}
    for code in dict.fromkeys(codes):
        path = code.co_qualname.split(f".{_LOCALS}")[0]
        name = CodeName(files.get(code.co_filename, ""), path, code.co_qualname, digest_of(code))
        if not name.module or not name.is_current():
            name = _generated(code, classes)
        found[name] = None
    return list(found)


def _generated(code: types.CodeType, classes: Iterable[type]) -> CodeName:
    for owner in {base for one in classes for base in one.__mro__}:
        for attribute, value in list(vars(owner).items()):
            if code in _codes_in(value):
                path = f"{owner.__qualname__}.{attribute}"
                name = CodeName(owner.__module__, path, code.co_qualname, digest_of(code))
                if name.is_current():
                    return name
    raise LookupError(f"{code.co_qualname} in {code.co_filename} cannot be found by a name")


@dataclass(frozen=True)
class Value:
    """A value by what it is, equal to that of the same value in another process.

    Attributes:
        kind: the sort of its name.
        name: the name, or the constant itself.
        digest: of a function, what it does.
    """

    kind: str
    name: Any
    digest: str = ""


def value_of(value: Any, code_alone: bool = False) -> Value:
    """Names a value.

    Args:
        value: a constant, or what a module has.
        code_alone: a function stands for its code. What it closes over is compared elsewhere.

    Raises:
        LookupError: it has no name.
    """
    if isinstance(value, _CONSTANTS):
        return Value("constant", (type(value).__name__, value))
    if isinstance(value, types.CodeType):
        return Value("code", value.co_qualname, digest_of(value))
    if isinstance(value, enum.Enum):
        kind = value_of(type(value))
        return Value("member", (kind.name, value.name))
    if isinstance(value, types.UnionType | types.GenericAlias) or _is_annotation(value):
        return Value("annotation", repr(value))
    if isinstance(value, tuple):
        return Value("tuple", tuple(value_of(one) for one in value))
    if isinstance(value, types.ModuleType):
        if sys.modules.get(value.__name__) is not value:
            raise LookupError(f"{value.__name__} is not the module of that name")
        return Value("module", value.__name__)
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format | torch.device):
        return Value("constant", str(value))
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return Value("operator", str(value))
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(value, _NATIVE):
        owner = getattr(value, "__objclass__", None)
        return Value("native", (module, path, getattr(owner, "__name__", "")))
    if isinstance(value, types.FunctionType):
        digest = digest_of(value.__code__)
        if code_alone:
            return Value("code", path, digest)
    else:
        digest = ""
    if not isinstance(module, str) or not isinstance(path, str):
        raise LookupError(f"a {type(value).__name__} has no name")
    found = _at(module, path)
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if found is not value:
        raise LookupError(f"{module}.{path} is something else")
    return Value("object", (module, path), digest)


def _is_annotation(value: Any) -> bool:
    return type(value).__module__ == "typing"
