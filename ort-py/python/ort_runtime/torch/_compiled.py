"""Compiled graphs: a session that takes and returns torch tensors without copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import sympy
import torch
from torch._inductor.output_code import OutputCode
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.printers import PythonPrinter

import ort_runtime

from ._memory import evaluated
from ._translate import Output, Program

__all__ = ["CompiledGraph", "SessionCode", "TorchCode", "is_here", "session_options"]

#: The names that printed expressions of sizes use.
_NAMES = {"math": __import__("math"), **vars(sympy_functions)}

# Types that numpy lacks cross as integers of the same width.
_WITHOUT_NUMPY = {torch.bfloat16: torch.int16}
_BFLOAT16 = 16


def is_here(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in memory that a session reads."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided


def evaluator(expression: int | sympy.Expr) -> Callable[[dict[str, int]], int]:
    """Returns a function that computes an expression from the sizes of a call."""
    if isinstance(expression, int):
        return lambda sizes: expression
    if expression.is_Symbol:
        symbol = str(expression)
        return lambda sizes: sizes[symbol]
    code = compile(PythonPrinter().doprint(expression), "<size>", "eval")
    return lambda sizes: int(eval(code, _NAMES, sizes))


class CompiledGraph:
    """A session for a graph, callable with the graph's arguments.

    Arguments are read where they lie, results lie where the session wrote them. The arguments
    come as a list, which is emptied so that what nothing else holds is freed after the run.

    Args:
        program: the graph as a model.
        options: of the session.
        donated: inputs that a backward pass may overwrite, and frees after their last use. Nothing
            else holds them by then.
    """

    def __init__(
        self,
        program: Program,
        options: ort_runtime.SessionOptions,
        donated: frozenset[str] = frozenset(),
    ) -> None:
        self.program = program
        self._donated = donated & frozenset(program.inputs.values())
        self.session: Any = None
        if any(output.name for output in program.outputs):
            self.session = ort_runtime.InferenceSession(
                program.model, options, providers=["CPUExecutionProvider"]
            )
        self._outputs = [output for output in program.outputs]
        names = dict.fromkeys(output.name for output in self._outputs if output.name)
        self._names = list(names)
        self._numbers = {
            place: evaluator(output.expression)
            for place, output in enumerate(self._outputs)
            if output.expression is not None
        }
        self._computed = [(one.name, evaluator(one.expression)) for one in program.computed]
        self._draws = [
            (draw.name, [evaluator(size) for size in draw.shape], draw.probability)
            for draw in program.draws
        ]
        self._strides = {
            place: [[evaluator(size) for size in sizes] for sizes in output.strides]
            for place, output in enumerate(self._outputs)
            if output.strides is not None
        }
        self._values = _values_of(self.session, self._names)

    def sizes(self, arguments: Sequence[Any]) -> dict[str, int]:
        """Returns the sizes that arguments bind."""
        found = {}
        for symbol, place, axis in self.program.sizes:
            argument = arguments[place]
            found[symbol] = int(argument if axis is None else argument.shape[axis])
        return found

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Runs the graph."""
        sizes = self.sizes(arguments)
        feed: dict[str, Any] = {
            name: _lent(arguments[place]) for place, name in self.program.inputs.items()
        }
        for name, value in self._computed:
            feed[name] = np.array([value(sizes)], np.int64)
        drawn = {}
        for name, shape, probability in self._draws:
            mask = torch.empty([size(sizes) for size in shape], dtype=torch.bool)
            drawn[name] = mask.bernoulli_(probability)
            feed[name] = mask.numpy()
        passed: dict[int | str, Any] = {
            output.argument: arguments[output.argument]
            for output in self._outputs
            if output.argument is not None
        }
        passed.update(drawn)
        arguments.clear()
        results = self._run(feed, self._given_away(feed))
        return [
            self._result(place, output, passed, results, sizes)
            for place, output in enumerate(self._outputs)
        ]

    def planned_bytes(self, sizes: Mapping[str, int]) -> int:
        """Returns the most bytes that a run allocates, drawn masks included.

        Args:
            sizes: numbers by symbol.
        """
        drawn = 0
        for draw in self.program.draws:
            count = 1
            for size in draw.shape:
                count *= evaluated(size, sizes)
            drawn += count
        if self.session is None:
            return drawn
        # The session computes the other sizes of its inputs from these.
        dims = {
            str(size): sizes[str(size)]
            for shape in self.program.shapes
            for size in shape
            if isinstance(size, sympy.Symbol)
        }
        plan = self.session._sess.plan(dims, sorted(self._donated))
        peak = plan.peak_bytes
        # Sizes that only a run tells: what is known bounds them from below.
        return drawn + (peak if peak is not None else plan.to_dict()["planned_bytes"])

    def _given_away(self, feed: dict[str, Any]) -> dict[str, Any]:
        """Takes out of a feed what the run may overwrite and free."""
        # A graph that is kept runs backward once more, and needs the values then.
        if not self._donated or torch._C._autograd._get_current_graph_task_keep_graph():
            return {}
        return {name: feed.pop(name) for name in self._donated if name in feed}

    def _run(self, feed: dict[str, Any], donated: dict[str, Any]) -> dict[str, torch.Tensor]:
        if not self._names:
            return {}
        if donated:
            return _as_tensors(self._names, self.session.run_donating(self._names, feed, donated))
        if self._values:
            values = self.session.run_with_ort_values(self._names, _as_values(feed))
            return _as_tensors(self._names, values)
        found = self.session.run(self._names, feed)
        return {name: torch.from_numpy(array) for name, array in zip(self._names, found)}

    def _result(
        self,
        place: int,
        output: Output,
        passed: dict[int | str, Any],
        results: dict[str, torch.Tensor],
        sizes: dict[str, int],
    ) -> Any:
        if output.name:
            found = results[output.name]
            return self._restrided(place, found, sizes) if place in self._strides else found
        if output.draw:
            return passed[output.draw]
        if output.argument is not None:
            return passed[output.argument]
        number = self._numbers.get(place)
        return number(sizes) if number is not None else None

    def _restrided(self, place: int, found: torch.Tensor, sizes: dict[str, int]) -> torch.Tensor:
        """Returns a copy with the strides that torch traced: views may be made by them."""
        shape, strides = ([size(sizes) for size in each] for each in self._strides[place])
        copy = torch.empty_strided(shape, strides, dtype=found.dtype)
        # Along an axis of stride 0 all elements are one.
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
        copy[once].copy_(found[once])
        return copy


def session_options(memory_limit: int | str | None) -> ort_runtime.SessionOptions:
    """Returns the options of a session with a limit, and with the threads of torch."""
    options = ort_runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    if memory_limit is not None:
        options.memory_limit = memory_limit
    return options


class SessionCode(OutputCode):
    """A compiled graph as AOTAutograd keeps and saves it: without its session in a file."""

    def __init__(
        self, program: Program, donated: frozenset[str], memory_limit: int | str | None
    ) -> None:
        self._program, self._donated, self._limit = program, donated, memory_limit
        # Torch's wrappers copy what an instance has.
        self._boxed_call = True
        self.graph: CompiledGraph | None = None
        self._open()

    def _open(self) -> None:
        self.graph = CompiledGraph(self._program, session_options(self._limit), self._donated)

    def __call__(self, inputs: Any) -> Any:
        """Runs the graph."""
        return self.graph(inputs)  # type: ignore[misc]

    def prepare_for_serialization(self) -> None:
        """Leaves the session out of a copy."""
        self.graph = None

    def post_compile(self, *_: Any) -> None:
        """Makes the session again, after the file was read."""
        if self.graph is None:
            self._open()


class TorchCode(OutputCode):
    """A graph that runs in torch. It is not saved."""

    graph = None

    def __init__(self, run: Callable[[list[Any]], Any]) -> None:
        self._run = run
        self._boxed_call = True

    def __call__(self, inputs: Any) -> Any:
        """Runs the graph."""
        return self._run(inputs)

    def prepare_for_serialization(self) -> None:
        """Does nothing."""

    def post_compile(self, *_: Any) -> None:
        """Does nothing."""


def _lent(tensor: torch.Tensor) -> Any:
    """Returns a tensor as what a session reads, in the same memory if that is contiguous."""
    tensor = tensor.detach().contiguous()
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_neg().resolve_conj()
    if tensor.dtype in _WITHOUT_NUMPY:
        array = _array(tensor.view(_WITHOUT_NUMPY[tensor.dtype]))
        return ort_runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16)
    return _array(tensor)


class _Lent:
    """The memory of a tensor, for numpy.

    `Tensor.numpy` would mark the storage as one that cannot be resized, and FSDP resizes those of
    gathered parameters.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": _type_of(tensor.dtype),
            "shape": tuple(tensor.shape),
            "data": (tensor.data_ptr(), False),
        }


@lru_cache
def _type_of(dtype: torch.dtype) -> str:
    return torch.empty(0, dtype=dtype).numpy().dtype.str


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Returns a contiguous tensor as an array."""
    # Numpy takes no memory without an address.
    return np.asarray(_Lent(tensor)) if tensor.numel() else tensor.numpy()


def _as_tensors(names: list[str], values: list[Any]) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_dlpack(value._ortvalue.to_dlpack()) for name, value in zip(names, values)
    }


def _as_values(feed: dict[str, Any]) -> dict[str, Any]:
    wrap = ort_runtime.OrtValue.ortvalue_from_numpy
    return {
        name: wrap(value) if isinstance(value, np.ndarray) else value
        for name, value in feed.items()
    }


def _values_of(session: Any, names: list[str]) -> bool:
    """Whether a result is of a type that numpy lacks."""
    if session is None:
        return False
    types = {output.name: output.type for output in session.get_outputs()}
    return any(types[name] == "tensor(bfloat16)" for name in names)
