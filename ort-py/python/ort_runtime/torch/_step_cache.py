"""Capture cache: what Dynamo and AOTAutograd made of a module, on disk for later processes.

An entry is one compiled call of a module: the bytecode and the guards of Dynamo, AOTAutograd's
wrappers, and the models of the sessions. It is used if all of these hold, else the module is traced
as without a cache:

- versions, settings and the kinds and sizes of the arguments are the same: they name the file;
- every code object that was traced does the same, also where it was patched at run time;
- what Dynamo compares by identity (functions, classes, modules) is found under the same names;
- Dynamo's other guards hold, which are checked again before each call.

Graph breaks, hooks of the module itself, and guards that have no names keep a module out of it.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib
import inspect
import itertools
import logging
import marshal
import os
import pickle
import stat
import sys
import tempfile
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import guards as dynamo_guards
from torch._dynamo.output_graph import get_builtins_dict
from torch._dynamo.package import load_guard_manager, load_guards_state
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

import ort_runtime

from ._identity import CodeName, Value, code_names, value_of

__all__ = ["Recorder", "Step", "StepCache"]

logger = logging.getLogger("ort_runtime.torch")

#: Guard types that compare identities, which mean nothing in another process.
_IDENTITIES = frozenset(dynamo_guards.CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)
#: The prefix of names that Dynamo gives to what it puts into the globals of a function.
_MINTED = "__"
_numbers = itertools.count()


class NotCacheable(Exception):
    """What keeps a module out of the cache."""


@dataclass
class Entry:
    """One compiled call, as it is in a file.

    Attributes:
        code: the bytecode that Dynamo made of `forward`.
        guards: Dynamo's guards other than `same`.
        same: what guards compare by identity, by the expression that finds it.
        seen: what guards compare of values that pickle saves by a name, by expression and aspect.
        traced: the code objects that were traced.
        imports: modules that bytecode and guards find in the globals.
        builtins: the name under which they find Python's own names there.
        graph: the name of the compiled graph in the globals.
        result: the compiled graph with the wrappers of AOTAutograd.
        kept_bytes: what the graph keeps for the backward pass.
    """

    code: bytes
    guards: bytes
    same: dict[str, tuple[Value, bool]]
    seen: dict[tuple[str, str], Value | None]
    traced: list[CodeName]
    imports: dict[str, str]
    builtins: str
    graph: str
    result: bytes
    kept_bytes: int | None = None


@dataclass
class Recorder:
    """Takes part in a compilation in the place of torch's CompilePackage, and keeps an entry of it.

    Attributes:
        problem: what keeps the call out of the cache.
    """

    problem: str = ""
    codes: list[types.CodeType] = field(default_factory=list)
    made: list[types.CodeType] = field(default_factory=list)
    imports: dict[str, str] = field(default_factory=dict)
    graphs: list[str] = field(default_factory=list)
    results: dict[str, bytes] = field(default_factory=dict)
    guards: bytes = b""
    same: dict[str, tuple[Value, bool]] = field(default_factory=dict)
    builtins: str = ""
    seen: dict[tuple[str, str], Value | None] = field(default_factory=dict)
    classes: set[type] = field(default_factory=set)
    traced: list[types.CodeType] = field(default_factory=list)
    kept_bytes: int | None = None

    def clear(self) -> None:
        """Forgets what was recorded, before another call."""
        self.__dict__.update(Recorder().__dict__)

    def refuse(self, problem: str) -> None:
        """Keeps the call out of the cache. The first problem counts."""
        self.problem = self.problem or problem

    # What Dynamo calls.

    @contextmanager
    def code_context(self, code: types.CodeType) -> Iterator[None]:
        """Begins the compilation of a frame."""
        self.codes.append(code)
        yield

    def add_import_source(self, alias: str, module_name: str) -> None:
        """Notes a module that is put into the globals."""
        self.imports[alias] = module_name

    def add_resume_function(self, *_: Any) -> None:
        """Notes a graph break."""
        self.refuse("Dynamo breaks its graph")

    def add_backend_id(self, backend_id: str, backend: Any = None) -> None:
        """Notes a compiled graph."""
        self.graphs.append(backend_id)

    def add_guarded_code(self, guards_state: bytes, dynamo_code: types.CodeType) -> None:
        """Notes the result of a compilation."""
        self.guards = guards_state
        self.made.append(dynamo_code)

    def add_inlined_source(self, sources: list[types.CodeType]) -> None:
        """Notes the code that was traced."""
        self.traced += sources

    def update_device_type(self, graph: Any) -> None:
        """Is told the graph, of which nothing is needed."""

    def bypass_current_compile(self) -> None:
        """Is told that torch cannot save the compilation."""
        self.refuse("torch cannot save its guards")

    # What the hooks below call.

    def keep_guards(
        self, check: Any, builder: Any, sorted_guards: list[Any], graph: Any
    ) -> bytes:
        """Serializes guards. Those that compare identities are named instead."""
        others, name = [], ""
        try:
            for guard in sorted_guards:
                name = guard.name
                kinds = {guard.create_fn_name(), *(guard.guard_types or ())}
                value = self._value(builder, guard)
                if isinstance(value, type):
                    self.classes.add(value)
                elif "TYPE_MATCH" in kinds:
                    self.classes.add(type(value))
                if not kinds & _IDENTITIES or kinds & {"TYPE_MATCH", "BUILTIN_MATCH"}:
                    others.append(guard)
                    if _by_reference(builder, guard.originating_source):
                        self.seen[name, _aspect(kinds)] = aspect_of(value, _aspect(kinds))
                    continue
                by_code = "CLOSURE_MATCH" in kinds and isinstance(value, types.FunctionType)
                self.same[guard.name] = (value_of(value, by_code), by_code)
                if evaluated(guard.name, builder.scope["L"], builder.scope["G"]) is not value:
                    raise LookupError("its name does not find it")
            self.builtins = graph.name_of_builtins_dict_key_in_fglobals or ""
            return _serialize_guards(check, builder, others, graph)
        except Exception as problem:  # Anything here only keeps the call out of the cache.
            self.refuse(f"the guard of {name} cannot be saved: {problem}")
            return b""

    @staticmethod
    def _value(builder: Any, guard: Any) -> Any:
        try:
            return builder.get(guard)
        except Exception:
            return None

    def entry(self, forward: Any) -> Entry:
        """Returns what was recorded. Raises NotCacheable if it is not one call of `forward`."""
        if self.problem:
            raise NotCacheable(self.problem)
        if len(self.made) != 1 or self.codes != [forward.__code__] or len(self.graphs) != 1:
            raise NotCacheable("the call is not one graph of its forward method")
        (code,), (graph,) = self.made, self.graphs
        if graph not in self.results:
            raise NotCacheable("its graph runs in torch")
        known = {*self.imports, self.builtins, graph, "__builtins__"}
        for one in dis.get_instructions(code):
            name = str(one.argval)
            if one.opname == "LOAD_GLOBAL" and name.startswith(_MINTED) and name not in known:
                raise NotCacheable(f"its bytecode needs {name}")
        try:
            return Entry(
                marshal.dumps(code), self.guards, self.same, self.seen, code_names(self.traced, self.classes),
                self.imports, self.builtins, graph, self.results[graph], self.kept_bytes,
            )  # fmt: skip
        except (LookupError, ValueError) as problem:
            raise NotCacheable(str(problem)) from problem


#: What a guard looks at. Those of the first kind hold what they compare with in themselves.
_ASPECTS = {
    "itself": ("DICT_CONTAINS", "DICT_NOT_CONTAINS", "DUPLICATE_INPUT", "TENSOR_MATCH", "SHAPE_ENV"),
    "presence": ("HASATTR", "NOT_PRESENT_IN_GENERIC_DICT"),
    "content": ("SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "DICT_CONST_KEYS", "SET_CONTAINS", "EMPTY"),
    "type": ("TYPE_MATCH",),
}
_SHARED = (type, types.FunctionType, types.MethodType, types.ModuleType, types.BuiltinFunctionType)


def _aspect(kinds: set[str]) -> str:
    return next((name for name, known in _ASPECTS.items() if kinds & {*known}), "value")


def aspect_of(value: Any, aspect: str) -> Value | None:
    """Returns what a guard compares of a value. Raises LookupError if it has no name."""
    if aspect == "type":
        return value_of(type(value))
    if aspect == "content":
        parts = [value_of(type(value)), *(value_of(one) for one in value)]
        return Value("content", tuple(parts))
    return value_of(value) if aspect == "value" else None


def _by_reference(builder: Any, source: Any) -> bool:
    """Whether a guard looks into what pickle saves by a name: torch then compares with what that
    name means in the process that loads the guards."""
    while (base := getattr(source, "base", None)) is not None:
        value, member = builder.get(base), getattr(source, "member", None)
        if isinstance(value, _SHARED):
            return True
        if member is not None and not _is_own(value, member):
            return True
        source = base
    return False


def _is_own(value: Any, member: str) -> bool:
    """Whether an attribute is that of an object itself and not of its class."""
    own = getattr(value, "__dict__", {})
    if isinstance(value, torch.nn.Module):
        return any(member in own.get(name, ()) for name in ("_parameters", "_buffers", "_modules")) or (
            member in own or member == "__dict__"
        )
    return member in own or member == "__dict__"


# Torch has no hooks for these two.

_serialize_guards = dynamo_guards.CheckFunctionManager.serialize_guards
_save_result = AOTAutogradCache.save
_recording: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


@functools.wraps(_serialize_guards)
def _serialize(check: Any, builder: Any, sorted_guards: list[Any], output_graph: Any) -> bytes:
    recorder = getattr(output_graph, "package", None)
    if isinstance(recorder, Recorder):
        return recorder.keep_guards(check, builder, sorted_guards, output_graph)
    return _serialize_guards(check, builder, sorted_guards, output_graph)


@functools.wraps(_save_result)
def _save(key: str, entry: Any, remote: bool) -> None:
    name = entry.sanitized_aot_config.precompile_backend_id
    recorder = _recording.get(name)
    if recorder is None:
        _save_result(key, entry, remote)
        return
    entry.pre_save()
    # The backward graph in torch, which only compiled autograd reads, and texts for logs.
    entry.serialized_bw_module = None
    entry.aot_joint_graph_str = entry.aot_forward_graph_str = entry.aot_backward_graph_str = None
    entry.sanitized_aot_config.precompile_backend_id = None
    try:
        with torch.utils._python_dispatch._disable_current_modes():
            recorder.results[name] = pickle.dumps(entry)
    except Exception as problem:  # A value without pickles only keeps the call out of the cache.
        recorder.refuse(f"the compiled graph cannot be saved: {problem}")


dynamo_guards.CheckFunctionManager.serialize_guards = _serialize  # type: ignore[method-assign]
AOTAutogradCache.save = staticmethod(_save)  # type: ignore[method-assign,assignment]


def _is_torch(target: Any) -> bool:
    """Whether a function changes with the version of torch alone."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        # Its parts are graphs, which were traced.
        return target.name() == "autograd_function_apply"
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in ("aten", "prims")
    module = getattr(target, "__module__", None) or getattr(
        getattr(target, "__objclass__", None), "__module__", ""
    )
    return str(module).split(".")[0] in ("torch", "_operator", "builtins", "math")


@contextmanager
def recording(recorder: Recorder, graph: Any) -> Iterator[None]:
    """Lets AOTAutograd hand over its results of a graph while it compiles."""
    name = getattr(graph, "_backend_id", None)
    if name is None:
        recorder.refuse("Dynamo gives its graph no name")
        yield
        return
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if node.op == "call_function" and not _is_torch(node.target):
                recorder.refuse(f"its graph calls {node.target}")
    settings = {
        "bundled_autograd_cache": True,
        "bypass_autograd_cache_key": True,
        "force_non_lazy_backward_lowering": True,
        "enable_autograd_cache": True,
    }
    _recording[name] = recorder
    with torch._functorch.config.patch(settings):
        yield


# Use of entries.


@functools.cache
def _compiled_expression(expression: str) -> types.CodeType:
    return compile(expression, "<guard>", "eval")


def evaluated(expression: str, local: Any, scope: Any) -> Any:
    """Returns what the name of a guard stands for."""
    names = {**dynamo_guards._get_closure_vars(), "L": local, "G": scope}
    return eval(_compiled_expression(expression), names)


class Step:
    """A compiled call that was loaded, for calls of a module with the same guards."""

    def __init__(self, entry: Entry, forward: types.FunctionType, local: dict[str, Any]) -> None:
        """Loads an entry. Raises NotCacheable if it is of other code or other values."""
        self.kept_bytes, self._code = entry.kept_bytes, forward.__code__
        for name in entry.traced:
            if not name.is_current():
                raise NotCacheable(f"{name.module}.{name.path} changed")
        scope = forward.__globals__
        for alias, module in entry.imports.items():
            scope.setdefault(alias, importlib.import_module(module))
        if entry.builtins:
            scope.setdefault(entry.builtins, get_builtins_dict(scope))
        self._same: list[tuple[types.CodeType, Any, bool]] = []
        self._compare(entry, local, scope)
        self._guards = load_guard_manager(load_guards_state(entry.guards), self._code, scope)
        if not self.matches(forward, local):
            raise NotCacheable("its guards do not hold")
        self._make(entry, forward)

    def _compare(self, entry: Entry, local: dict[str, Any], scope: dict[str, Any]) -> None:
        """Compares what the entry has names for, and keeps what is compared before each call."""
        for expression, (expected, by_code) in entry.same.items():
            try:
                value = evaluated(expression, local, scope)
                found = value_of(value, by_code)
            except Exception as problem:
                raise NotCacheable(f"{expression} is not found: {problem}") from problem
            if found != expected:
                raise NotCacheable(f"{expression} is another {expected.kind}")
            what = value.__code__ if by_code else value
            self._same.append((_compiled_expression(expression), what, by_code))
        for (expression, aspect), wanted in entry.seen.items():
            try:
                seen = aspect_of(evaluated(expression, local, scope), aspect)
            except Exception as problem:
                raise NotCacheable(f"{expression} is not found: {problem}") from problem
            if seen != wanted:
                raise NotCacheable(f"{expression} has another {aspect}")

    def _make(self, entry: Entry, forward: types.FunctionType) -> None:
        from torch._functorch._aot_autograd import aot_autograd_result

        result = pickle.loads(entry.result)
        compiled = aot_autograd_result.deserialize_bundled_cache_entry(result)
        # Several modules may load one entry, each with its sessions.
        name = f"{entry.graph}_{next(_numbers)}"
        code = marshal.loads(entry.code)
        code = code.replace(co_names=tuple(name if n == entry.graph else n for n in code.co_names))
        scope = forward.__globals__
        scope[name] = torch._dynamo.disable(compiled, reason="a compiled graph")
        weakref.finalize(self, scope.pop, name, None)
        self.run = types.FunctionType(
            code, scope, forward.__name__, forward.__defaults__, forward.__closure__
        )
        self.run.__kwdefaults__ = forward.__kwdefaults__

    def matches(self, forward: types.FunctionType, local: dict[str, Any]) -> bool:
        """Whether a call has the code and the values of which the entry was made."""
        if forward.__code__ is not self._code:
            return False
        names = {**dynamo_guards._get_closure_vars(), "L": local, "G": forward.__globals__}
        try:
            for expression, expected, by_code in self._same:
                value = eval(expression, names)
                if (value.__code__ if by_code else value) is not expected:
                    return False
        except (AttributeError, LookupError, TypeError, NameError):
            return False
        return bool(self._guards.check(local))


class StepCache:
    """The entries of one module in a folder, and those that are loaded.

    Args:
        folder: the folder. Its files are pickles: nobody else may write to it.
        settings: what a compilation depends on beside the module and its arguments.

    Raises:
        ValueError: others may write to the folder.
        OSError: it cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str], settings: object) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._folder.stat()
        if hasattr(os, "getuid"):
            others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if others or found.st_uid not in (os.getuid(), 0):
                raise ValueError(
                    f"others may write to {self._folder}, and its files are pickles; "
                    "take a folder that is yours alone (chmod go-w)"
                )
        self._settings = repr(settings)
        self._seen: set[str] = set()
        self._steps: list[Step] = []
        self.recorder = Recorder()

    def step(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Step | None:
        """Returns the compiled call for arguments, None if the module has to be traced.

        It is then recorded. `save` writes what was.
        """
        self.recorder.clear()
        self._name = ""
        forward = _forward_of(module)
        if forward is None:
            return None
        try:
            local = _locals_of(forward, module, args, kwargs)
        except (TypeError, ValueError):
            return None
        for step in self._steps:
            if step.matches(forward, local):
                return step
        # Dynamo looks for hooks when it traces, and not later. Parameters of other classes, as
        # sharded ones, are placed by more than a graph says.
        has_hooks = any(_has_hooks(one) for one in module.modules())
        if has_hooks or any(type(one) is not torch.nn.Parameter for one in module.parameters()):
            return None
        name = self._file_of(module, forward, local)
        if name in self._seen:
            return None
        self._seen.add(name)
        self._name = name
        return self._loaded(name, forward, local)

    def _loaded(self, name: str, forward: Any, local: dict[str, Any]) -> Step | None:
        try:
            entry = pickle.loads((self._folder / name).read_bytes())
            step = Step(entry, forward, local)
        except FileNotFoundError:
            return None
        except NotCacheable as problem:
            logger.info("an entry of the capture cache is not used: %s", problem)
            return None
        except Exception as problem:  # A damaged file is as good as none.
            logger.warning("%s in the capture cache cannot be read: %s", name, problem)
            return None
        self._steps.append(step)
        return step

    def save(self, module: torch.nn.Module) -> None:
        """Writes what was recorded since `step`, if the module was traced."""
        if not self._name or not self.recorder.codes:
            return
        try:
            content = pickle.dumps(self.recorder.entry(_forward_of(module)))
            handle, path = tempfile.mkstemp(dir=self._folder)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(path, self._folder / self._name)
        except NotCacheable as problem:
            logger.info("the capture of the module is not cached: %s", problem)
        except (OSError, pickle.PicklingError, AttributeError, TypeError) as problem:
            logger.warning("the capture of the module is not cached: %s", problem)
        self.recorder.clear()

    def _file_of(self, module: Any, forward: Any, local: dict[str, Any]) -> str:
        modes = [one.training for one in module.modules()]
        facts = (
            _versions(), self._settings, type(module).__module__, type(module).__qualname__,
            forward.__code__.co_qualname, torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"), str(torch.get_default_dtype()), modes,
            {name: _kind_of(value) for name, value in local.items() if value is not module},
            [(name, _kind_of(value)) for name, value in module.named_parameters()],
        )  # fmt: skip
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def _kind_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        kind = type(value).__name__
        return kind, str(value.dtype), tuple(value.shape), value.stride(), value.requires_grad
    if isinstance(value, dict):
        return {str(key): _kind_of(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_kind_of(one) for one in value]
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    return type(value).__qualname__


@functools.cache
def _versions() -> tuple[str, ...]:
    """What made an entry, in the packages and in the machine."""
    own = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        own.update(path.read_bytes())
    native = importlib.import_module("ort_runtime.capi.onnxruntime_pybind11_state")
    facts = os.stat(str(native.__file__))
    return (
        sys.version, torch.__version__, str(torch.version.git_version), own.hexdigest(),
        ort_runtime.get_runtime_version(), f"{facts.st_size} {facts.st_mtime_ns}",
    )  # fmt: skip


def _has_hooks(module: torch.nn.Module) -> bool:
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks,
        module._backward_pre_hooks,
    )  # fmt: skip
    return any(hooks)


def _forward_of(module: torch.nn.Module) -> types.FunctionType | None:
    """Returns the function that a call of the module runs, None if it runs more than that."""
    forward = getattr(module.forward, "__func__", None)
    is_plain = type(module).__call__ is torch.nn.Module.__call__
    if not is_plain or _has_hooks(module) or torch.nn.modules.module._has_any_global_hook():
        return None
    if torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None:
        # Dynamo cuts the graph where buckets end.
        return None
    return forward if isinstance(forward, types.FunctionType) else None


@functools.cache
def _signature_of(forward: types.FunctionType) -> inspect.Signature:
    # That of the function itself, not of one that it wraps.
    return inspect.signature(forward, follow_wrapped=False)


def _locals_of(forward: Any, module: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the local variables with which a call begins."""
    found = {}
    for name, cell in zip(forward.__code__.co_freevars, forward.__closure__ or ()):
        found[name] = cell.cell_contents
    bound = _signature_of(forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    return found | bound.arguments
