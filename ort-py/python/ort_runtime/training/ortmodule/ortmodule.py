"""The wrapper: a module with the parameters, names and signature of the one inside."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import time
import types
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ort_runtime.torch import Backend, NotTranslated, Recompute, read_requests
from ort_runtime.torch._capture import Example, StepPlanner, largest
from ort_runtime.torch._memory import NotEnoughMemory, StepPlan, bytes_of_text
from ort_runtime.torch._partition import Partition

from ._fallback import (
    ORTModuleDeviceException,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
    _FallbackPolicy,
)
from ._options import DebugOptions, Environment, LogLevel
from ._report import insight, report

if TYPE_CHECKING:
    from ort_runtime.torch._step_cache import StepCache

__all__ = ["ORTModule"]

logger = logging.getLogger("orttraining")

#: The wrapper's own attributes. Everything else is the wrapped module's. Libraries that replace
#: `forward` keep what it was under `_original_forward`.
_OWN = frozenset(
    {
        "_wrapped", "_options", "_environment", "_limit", "_backend", "_compiled", "_inputs",
        "_cache", "_cache_dir", "forward", "_original_forward",
    }
)  # fmt: skip

#: Methods of torch.nn.Module that act on the wrapped module, whose names are its own.
_DELEGATED = (
    "state_dict", "load_state_dict", "parameters", "named_parameters", "buffers", "named_buffers",
    "children", "named_children", "modules", "named_modules", "get_parameter", "get_buffer",
    "get_submodule", "zero_grad", "extra_repr", "_load_from_state_dict", "register_buffer",
    "register_parameter", "register_module", "_named_members",
)  # fmt: skip
#: Those that return the module itself.
_CHAINED = (
    "train", "eval", "to", "cuda", "cpu", "half", "float", "double", "bfloat16", "apply", "_apply",
    "requires_grad_", "share_memory", "type", "to_empty",
)  # fmt: skip


class ORTModule(torch.nn.Module):
    """A torch module whose forward and backward passes run in this runtime.

    It has the same Parameter objects, under the same names, and the same signature. What
    the runtime does not cover runs in torch, with one warning, unless the fallback policy forbids.
    The environment is read when the module is wrapped.

    Args:
        module: the module; it stays usable.
        debug_options: what is logged and saved.
        memory_limit: the most bytes of a training step beside parameters, inputs and the optimizer:
            a number, or a text such as "2 GiB". The lowest level of recomputation within it is
            taken, unless the environment chooses one. A limit that no level meets is an error that
            names the minimum.
        cache_dir: a folder that keeps the capture for later processes, which then trace nothing
            as long as code, settings, and the sizes of inputs are the same. Its files are pickles.
            `ORTMODULE_CACHE_DIR` without it.

    Raises:
        TypeError: `module` is no torch module, or `debug_options` no DebugOptions.
        ORTModuleTorchModelException: the module cannot be wrapped.
        ValueError, OSError: the environment, the limit or the configuration file is wrong.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        debug_options: DebugOptions | None = None,
        memory_limit: int | str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"ORTModule wraps a torch.nn.Module, not {type(module).__name__}")
        if isinstance(module, torch.nn.DataParallel):
            raise ORTModuleTorchModelException(
                "ORTModule is not compatible with torch.nn.DataParallel; "
                "use torch.nn.parallel.DistributedDataParallel around the ORTModule"
            )
        if debug_options is not None and not isinstance(debug_options, DebugOptions):
            raise TypeError(f"debug_options are DebugOptions, not {type(debug_options).__name__}")
        super().__init__()
        state = self.__dict__
        state["_wrapped"] = module
        state["_options"] = debug_options or DebugOptions()
        state["_environment"] = Environment.read()
        state["_limit"] = memory_limit
        state["_cache_dir"] = cache_dir or os.environ.get("ORTMODULE_CACHE_DIR") or None
        self._prepare()
        _warn_of_clashes(module)

    # Compilation.

    def _prepare(self) -> None:
        """Makes the backend anew, and forgets what was compiled."""
        state = self.__dict__
        state["_backend"] = _Session(self._options, self._environment, self._limit)
        state["_compiled"] = None
        state["_inputs"] = None
        state["_cache"] = self._backend.cache_in(self._cache_dir)
        # A bound method, since libraries wrap its function and bind the result again.
        state["forward"] = types.MethodType(_with_signature(self._wrapped.forward), self)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__
        policy = self._environment.policy
        forced = (
            _FallbackPolicy.FALLBACK_FORCE_TORCH_FORWARD
            | _FallbackPolicy.FALLBACK_FORCE_TORCH_BACKWARD
        )
        if policy & forced:
            return self._wrapped(*args, **kwargs)
        if state["_compiled"] is None:
            problem = _device_problem(self._wrapped)
            if problem:
                self._backend.refuse(ORTModuleDeviceException(problem), "DEVICE")
                return self._wrapped(*args, **kwargs)
            # Hooks of the wrapped module are called by it, so it is compiled as it is called.
            state["_compiled"] = self._backend.compiled(self._wrapped)
        if state["_inputs"] is None:
            state["_inputs"] = Example(args, kwargs).emptied()
        started = time.perf_counter()
        step = self._cache.step(self._wrapped, args, kwargs) if self._cache else None
        if step is None:
            called = state["_compiled"]
        else:
            called = functools.partial(step.run, self._wrapped)
        kept_bytes = step.kept_bytes if step else None
        is_training = self._wrapped.training
        found = self._backend.call(called, is_training, args, kwargs, started, kept_bytes)
        if self._cache and step is None:
            self._cache.save(self._wrapped)
        return found

    # Memory.

    def plan(
        self, inputs: Any = None, *, batch: int | None = None, seq: int | None = None
    ) -> StepPlan:
        """Returns what a training step allocates at some sizes. The module is traced but not run.

        Args:
            inputs: a tensor, the arguments of a call, or a mapping of named ones. Only their types
                and ranks matter. By default the inputs of the first call, or the `dummy_inputs` of
                a module that has them.
            batch: the size of the first axis of each input.
            seq: the size of the second axis of the inputs that share its size.

        Raises:
            NotEnoughMemory: the memory limit is too small.
            ValueError: there are no inputs to trace with, or the module is not a single graph.
        """
        planner = StepPlanner(
            self._wrapped, self._example(inputs).sized(batch, seq), self._backend.levels()
        )
        return planner.plan(bytes_of_text(self._limit))

    def largest_batch(
        self, budget: int | str | None = None, inputs: Any = None, *, seq: int | None = None
    ) -> int | None:
        """Returns the largest batch whose training step allocates at most `budget` bytes.

        None if a single example needs more. The budget is the memory limit by default. The other
        arguments are those of `plan`.

        Raises:
            ValueError: there is no budget, or the module fixes the size of its batch.
        """
        limit = bytes_of_text(self._limit if budget is None else budget)
        if limit is None:
            raise ValueError("largest_batch needs a budget, or an ORTModule with a memory_limit")
        example = self._example(inputs).sized(None, seq)
        return largest(self._wrapped, example, self._backend.levels(), limit)

    def _example(self, inputs: Any) -> Example:
        if inputs is None:
            inputs = self.__dict__["_inputs"]
        if isinstance(inputs, Example):
            return inputs
        if inputs is None:
            inputs = getattr(self._wrapped, "dummy_inputs", None)
        if inputs is None:
            raise ValueError("give the inputs of a call, of which types and ranks matter: inputs=")
        return Example.of(inputs)

    # Transparency.

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        return self.__dict__["_wrapped"]

    def __getattr__(self, name: str) -> Any:
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or "_wrapped" not in self.__dict__:
            self.__dict__[name] = value
            return
        setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._wrapped, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._wrapped)})

    def __repr__(self) -> str:
        return f"ORTModule({self._wrapped!r})"

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Is refused: the graph is that of the module when it was wrapped."""
        raise NotImplementedError("ORTModule does not support adding modules to it")

    # Libraries choose by class how a model is saved, what its labels are, and what it computes.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the wrapped module; `type` tells the wrapper from it."""
        wrapped = self.__dict__.get("_wrapped")
        return ORTModule if wrapped is None else type(wrapped)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unprepared, (), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_wrapped", "_options", "_environment", "_limit", "_cache_dir")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__init__(self)
        self.__dict__.update(state)
        self._prepare()

    # Training mode is read by torch.nn.Module's own code, too.
    @property
    def training(self) -> bool:  # type: ignore[override]
        """Whether the wrapped module is in training mode."""
        wrapped = self.__dict__.get("_wrapped")
        return wrapped.training if wrapped is not None else True

    @training.setter
    def training(self, mode: bool) -> None:
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is not None:
            wrapped.training = mode


def _unprepared() -> ORTModule:
    """Returns a wrapper without a module, for `__setstate__`."""
    return ORTModule.__new__(ORTModule)


def _delegated(name: str, chained: bool) -> Callable[..., Any]:
    original = getattr(torch.nn.Module, name)

    @functools.wraps(original)
    def method(self: ORTModule, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self.__dict__["_wrapped"], name)(*args, **kwargs)
        return self if chained else found

    return method


for _name in _DELEGATED + _CHAINED:
    if hasattr(torch.nn.Module, _name):
        setattr(ORTModule, _name, _delegated(_name, _name in _CHAINED))


class _Session:
    """The backend of one wrapper, and what it reports."""

    def __init__(
        self, options: DebugOptions, environment: Environment, limit: int | str | None
    ) -> None:
        self._options, self._environment = options, environment
        requests = []
        if environment.config and not environment.level:
            requests = read_requests(environment.config)
        disabled = environment.policy.is_disabled()
        allowed = _FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL in environment.policy
        self.recompute: Recompute | None = Recompute(int(environment.level), requests)
        if limit is not None and not environment.level and not requests:
            self.recompute = None
        self.backend = Backend(
            recompute=self.recompute,
            on_missing="torch" if allowed and not disabled else "raise",
            memory_limit=limit,
            on_compiled=self._compiled,
            on_partition=self._partitioned,
        )
        self._partition: Partition | None = None
        self._reported: set[str] = set()
        self._refused = False
        self._saved: dict[str, int] = {}

    def cache_in(self, folder: str | os.PathLike[str] | None) -> StepCache | None:
        """Returns the cache of captures in a folder.

        None without one, and where reports or saved models need the graph itself.
        """
        is_told = self._options.logging.log_level < LogLevel.WARNING
        if folder is None or is_told or self._options.save_onnx_models.save:
            return None
        # It changes torch, which only a cache needs.
        from ort_runtime.torch._step_cache import StepCache

        backend = self.backend
        cache = StepCache(folder, (backend.recompute, backend.memory_limit, backend.on_missing))
        backend.recorder = cache.recorder
        return cache

    def compiled(self, module: torch.nn.Module) -> Any:
        """Returns a module that this backend compiles when it is called."""
        if self.backend.recorder is None:
            return torch.compile(module, backend=self.backend)
        # `torch.compile` takes no recorder.
        return torch._dynamo.optimize(self.backend, package=self.backend.recorder)(module)  # type: ignore[arg-type]

    def _partitioned(self, partition: Partition) -> None:
        self._partition = partition
        if self.backend.recorder is not None:
            self.backend.recorder.kept_bytes = partition.kept_bytes()
        self._check_requests(partition)

    def levels(self) -> list[Recompute]:
        """Returns the levels of recomputation to choose from."""
        return [self.recompute] if self.recompute else [Recompute(level) for level in range(3)]

    def _check_requests(self, partition: Partition) -> None:
        known = {cluster.id for cluster in partition.clusters}
        for request in self.recompute.requests if self.recompute else ():
            if request.id not in known:
                logger.warning(
                    "%s is not a recompute plan of this module, whose plans are: %s",
                    request.id,
                    ", ".join(sorted(known)) or "none",
                )

    def _compiled(self, kind: str, graph: Any) -> None:
        saved = self._options.save_onnx_models
        if not saved.save or graph is None:
            return
        mode = "inference" if kind == "inference" else "training"
        what = "execution_model" if kind == "inference" else f"{kind}_model"
        count = self._saved[kind] = self._saved.get(kind, 0) + 1
        # A second graph of a kind, for other sizes or after a graph break, has a number.
        number = f"_{count}" if count > 1 else ""
        name = f"{saved.name_prefix}_{what}_{mode}{number}.onnx"
        with open(os.path.join(saved.path, name), "wb") as file:
            file.write(graph.program.model)

    def refuse(self, problem: Exception, kind: str) -> None:
        """Raises a problem, or warns of it once if the policy lets torch run instead."""
        flag = _FallbackPolicy[f"FALLBACK_UNSUPPORTED_{kind}"]
        if self._environment.policy.is_disabled() or flag not in self._environment.policy:
            raise problem
        if not self._refused:
            self._refused = True
            warnings.warn(f"Fallback to torch: {problem}", UserWarning, stacklevel=3)

    def call(
        self,
        compiled: Any,
        training: bool,
        args: Any,
        kwargs: Any,
        started: float,
        kept_bytes: int | None = None,
    ) -> Any:
        """Calls the compiled module, and reports what the first call in each mode did.

        Args:
            compiled: the compiled module.
            training: whether it is in training mode.
            args: of the call.
            kwargs: of the call.
            started: when the call began.
            kept_bytes: what a call from the cache keeps for its backward pass.
        """
        mode = "training" if training and torch.is_grad_enabled() else "inference"
        is_first = mode not in self._reported
        try:
            found = compiled(*args, **kwargs)
        except Exception as problem:
            cause = _own_cause(problem)
            if cause is None:
                raise
            if isinstance(cause, NotEnoughMemory):
                raise cause from problem
            raise ORTModuleONNXModelException(str(cause)) from problem
        if is_first:
            self._reported.add(mode)
            self._report(mode, time.perf_counter() - started, kept_bytes)
        return found

    def _report(self, mode: str, seconds: float, kept_bytes: int | None) -> None:
        level = self._options.logging.log_level
        if level > LogLevel.WARNING:
            return
        partition = self._partition if mode == "training" else None
        plans = level < LogLevel.WARNING
        if partition is not None:
            kept_bytes = partition.kept_bytes()
        text = report(mode, self._environment, partition if plans else None, seconds, kept_bytes)
        logger.warning("%s", text)
        if level <= LogLevel.DEVINFO and partition is not None:
            logger.warning("%s", insight(partition, self._environment.config))


def _own_cause(problem: BaseException) -> NotTranslated | NotEnoughMemory | None:
    """Returns the backend's own exception behind the one that Dynamo raises."""
    cause: BaseException | None = problem
    while cause is not None and not isinstance(cause, NotTranslated | NotEnoughMemory):
        inner = getattr(cause, "inner_exception", None)
        cause = inner or cause.__cause__ or cause.__context__
    return cause


def _device_problem(module: torch.nn.Module) -> str:
    """Returns what is wrong with where parameters and buffers are, empty if nothing is."""
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if value.device.type != "cpu":
            return f"{name} is on {value.device}; sessions read tensors of the CPU"
    return ""


def _with_signature(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method with the signature and documentation of the wrapped forward."""

    def forward(self: ORTModule, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    forward.__doc__ = original.__doc__
    signature = inspect.signature(original)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[own, *signature.parameters.values()]
    )
    return forward


def _warn_of_clashes(module: torch.nn.Module) -> None:
    """Warns of attributes of the module that the wrapper has itself."""
    own = {name for name in vars(ORTModule) if not name.startswith("__")}
    for name in sorted(own & set(vars(type(module)))):
        is_torch = getattr(torch.nn.Module, name, None)
        if name == "forward" or getattr(type(module), name) is is_torch:
            continue
        if name in _DELEGATED or name in _CHAINED:
            continue
        warnings.warn(
            f"User module's attribute name {name} collides with ORTModule's attribute name; "
            "use .module to reach the user module's",
            stacklevel=3,
        )
